"""The LMDB store and its in-memory twin against a model that is nothing but dicts.

Random operations, right and wrong ones; the three must agree on every answer,
every error, and on what a crash leaves."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from rayqueue.errors import RayQueueError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, HardState, LogStore, Snapshot, Table
from rayqueue.partition.tables import META, OFFSETS, PARTITION
from tests.unit.log.store_disks import LmdbTestDisk, MemoryTestDisk, entry

KEYS = st.sampled_from([b"a", b"b", b"\x00", b"\xff" * 3, b"k" * 511]) | st.binary(min_size=1, max_size=3)
SIZES = st.sampled_from([0, 1, 90, 3000, 9000])
TABLES = st.sampled_from([OFFSETS, META])  # one of each kind


@dataclass
class Model:
    """What a store is, said as plainly as possible."""

    entries: dict[int, Entry] = field(default_factory=dict)
    tables: dict[Table, dict[bytes, bytes]] = field(default_factory=lambda: {table: {} for table in PARTITION.tables})
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    hard: HardState = field(default_factory=lambda: HardState(Term(0), None, Index(0)))
    applied: int = 0
    base: int = 0
    base_term: int = 0

    @property
    def last(self) -> int:
        return max(self.entries, default=self.base)

    def term_at(self, index: int) -> int | None:
        if index == self.base:
            return self.base_term
        return self.entries[index].term if index in self.entries else None


class Twins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.lmdb = LmdbTestDisk(self.directory / "replica")
        self.memory = MemoryTestDisk()
        self.now = Model()
        self.synced = Model()  # what a crash leaves
        self.seen = Model()  # what a snapshot sees

    def teardown(self) -> None:
        self.lmdb.close()
        self.memory.close()
        shutil.rmtree(self.directory)

    def both(self, call: Callable[[LogStore], Any]) -> bool:
        """The same call on both stores; True if it was accepted. They must answer alike."""
        answers: list[object] = []
        for disk in (self.lmdb, self.memory):
            try:
                answers.append(("returned", call(disk.store)))
            except (RayQueueError, KeyError) as error:
                answers.append(("raised", type(error)))
        assert answers[0] == answers[1]
        return isinstance(answers[0], tuple) and answers[0][0] == "returned"

    @rule(count=st.integers(1, 6), newer=st.booleans(), size=SIZES, gap=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def append(self, count: int, newer: bool, size: int, gap: int) -> None:
        first = self.now.last + 1 + gap
        term = (self.now.term_at(self.now.last) or 0) + newer
        new = [entry(index, term, bytes([index % 256]) * size) for index in range(first, first + count)]
        if self.both(lambda store: store.append(new)):
            assert gap == 0
            self.now.entries.update({each.index: each for each in new})

    @rule(back=st.integers(-1, 8))
    def truncate(self, back: int) -> None:
        index = self.now.last - back + 1
        if self.both(lambda store: store.truncate_from(Index(index))):
            assert index > max(self.now.applied, self.now.base)
            self.now.entries = {at: each for at, each in self.now.entries.items() if at < index}

    @rule(back=st.integers(1, 8), count=st.integers(1, 6), size=SIZES, max_bytes=st.sampled_from([100, 1 << 20]))
    def conflict(self, back: int, count: int, size: int, max_bytes: int) -> None:
        """What a follower does when the new leader's log differs."""
        self.truncate(back)
        self.append(count, True, size, 0)
        self.read(max_bytes, 1)

    @rule(more=st.integers(-1, 2), vote=st.sampled_from([None, ReplicaId("a"), ReplicaId("b")]))
    def set_hard(self, more: int, vote: ReplicaId | None) -> None:
        hard = HardState(Term(max(0, self.now.hard.term + more)), vote, Index(self.now.applied))
        if self.both(lambda store: store.set_hard(hard)):
            self.now.hard = hard

    @rule(more=st.integers(-1, 5))
    def set_applied(self, more: int) -> None:
        index = self.now.applied + more
        if self.both(lambda store: store.set_applied(Index(index))):
            assert index <= self.now.last
            self.now.applied = index

    @rule(table=TABLES, key=KEYS, value=st.binary(max_size=40))
    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self.both(lambda store: store.put(table, key, value))
        self.now.tables[table][key] = value

    @rule(table=TABLES, key=KEYS)
    def delete(self, table: Table, key: bytes) -> None:
        self.both(lambda store: store.delete(table, key))
        self.now.tables[table].pop(key, None)

    @rule(back=st.integers(-1, 6), wrong_term=st.sampled_from([0, 0, 0, 1]))
    def save_checkpoint(self, back: int, wrong_term: int) -> None:
        index = self.now.applied - back
        term = (self.now.term_at(index) or 0) + wrong_term
        saved = Checkpoint(Index(index), Term(term), b"members", b"%d" % index * 50)
        if self.both(lambda store: store.save_checkpoint(saved)):
            assert self.now.term_at(index) == term
            self.now.checkpoints[index] = saved

    @rule(which=st.integers(0, 3), wrong=st.sampled_from([0, 0, 0, 1]), max_entries=st.integers(0, 10))
    def trim(self, which: int, wrong: int, max_entries: int) -> None:
        points = sorted(self.now.checkpoints)
        index = (points[which % len(points)] if points else 0) + wrong
        if self.both(lambda store: store.trim_to(Index(index), max_entries)):
            if index > self.now.base:
                self.now.base, self.now.base_term = index, self.now.checkpoints[index].term
            self.now.entries = {at: each for at, each in self.now.entries.items() if at > index}
            self.now.checkpoints = {at: each for at, each in self.now.checkpoints.items() if at >= index}

    @rule(ahead=st.integers(1, 9), restored=st.dictionaries(KEYS, st.binary(max_size=5), max_size=2))
    def install(self, ahead: int, restored: dict[bytes, bytes]) -> None:
        index = self.now.last + ahead
        got = Checkpoint(Index(index), Term(self.now.hard.term), b"we", b"state")
        self.both(lambda store: store.install(got))
        hard = replace(self.now.hard, commit=Index(index))
        self.now = Model(hard=hard, applied=index, base=index, base_term=got.term, checkpoints={index: got})
        self.now.tables[MEMBERS][index.to_bytes(8, "big")] = b"we"
        for key, value in restored.items():
            self.both(lambda store, key=key, value=value: store.put(META, key, value))  # type: ignore[misc]
        self.now.tables[META].update(restored)

    @rule()
    def sync(self) -> None:
        assert self.both(lambda store: store.sync())
        self.synced = self.seen = copy.deepcopy(self.now)

    @rule()
    def persist(self) -> None:
        assert self.both(lambda store: store.persist())
        self.synced = copy.deepcopy(self.now)
        if not self.lmdb.store.dirty:
            self.seen = self.synced

    @rule()
    def crash(self) -> None:
        self.lmdb.reopen()
        self.memory.reopen()
        self.now = copy.deepcopy(self.synced)
        self.seen = self.synced

    @invariant()
    def single_values_agree(self) -> None:
        now = self.now
        for store in (self.lmdb.store, self.memory.store):
            assert (store.base_index, store.base_term) == (now.base, now.base_term)
            assert (store.last_index, store.last_term) == (now.last, now.term_at(now.last))
            assert (store.hard, store.applied) == (now.hard, now.applied)
            assert store.checkpoints() == sorted(now.checkpoints)
        assert self.both(lambda store: store.must_sync)
        assert self.both(lambda store: store.dirty)

    @rule(max_bytes=st.sampled_from([0, 100, 5000, 1 << 20]), skip=st.integers(1, 9))
    def read(self, max_bytes: int, skip: int) -> None:
        now = self.now
        for store in (self.lmdb.store, self.memory.store):
            assert store.checkpoint == now.checkpoints.get(now.base)
            for index in range(now.base - 1, now.last + 2):
                assert store.term_at(Index(index)) == now.term_at(index)
            first = now.base + skip
            expected: list[Entry] = []
            for index in range(first, now.last + 1):
                expected.append(now.entries[index])
                if len(expected) > 1 and sum(len(each.payload) for each in expected) > max_bytes:
                    expected.pop()
                    break
            assert store.entries(Index(first), max_bytes) == expected
            for table in PARTITION.tables:
                rows = sorted(now.tables[table].items())
                assert list(store.scan(table)) == rows
                assert list(store.scan(table, reverse=True)) == rows[::-1]
                assert all(store.get(table, key) == value for key, value in rows)

    @rule(start=KEYS, stop=KEYS, table=TABLES, reverse=st.booleans())
    def read_range(self, start: bytes, stop: bytes, table: Table, reverse: bool) -> None:
        rows = sorted((row for row in self.now.tables[table].items() if start <= row[0] < stop), reverse=reverse)
        for store in (self.lmdb.store, self.memory.store):
            assert list(store.scan(table, start, stop, reverse=reverse)) == rows
            assert store.get(table, start) == self.now.tables[table].get(start)

    @rule()
    def read_snapshot(self) -> None:
        for store in (self.lmdb.store, self.memory.store):
            with store.snapshot() as snapshot:
                self.compare_snapshot(snapshot, self.seen)

    def compare_snapshot(self, snapshot: Snapshot, seen: Model) -> None:
        for index in range(seen.base - 1, seen.last + 2):
            try:
                found = snapshot.entry(Index(index))
            except KeyError:
                assert index not in seen.entries
            else:
                assert found == seen.entries[index]
        for table in PARTITION.tables:
            rows = sorted(seen.tables[table].items())
            assert list(snapshot.scan(table)) == rows
            assert list(snapshot.scan(table, reverse=True)) == rows[::-1]


TestTwins = pytest.mark.slow(Twins.TestCase)
TestTwins.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
