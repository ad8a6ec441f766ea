"""Groups' positions and backlog, against a model that counts records one by one.

Lag, backlog, positions by lane, pins, retention, reads by lane from disk and
from the tail: with one lane and with several, on both stores, through crashes
and checkpoints, and with trims that were decided before what happened since.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayqueue.errors import OffsetOutOfRangeError, StaleGenerationError
from rayqueue.ids import Offset
from rayqueue.log.store import Checkpoint
from rayqueue.partition import (
    Deleted,
    Partition,
    PartitionSettings,
    Pinned,
    commit_command,
    configure_command,
    delete_group_command,
    machine,
    pin_command,
    read_lanes,
    trim_command,
)
from rayqueue.protocol.calls import Position
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.records import RecordBatch
from rayqueue.replica.tail import Tail
from tests.unit.log.store_disks import LmdbTestDisk
from tests.unit.partition.partition_log import Log, appended, committed

NAMES = ("a", "b", "c")
TAIL_BYTES = 900


@dataclass
class Batch:
    base: int
    count: int
    payload: bytes
    lane: int
    time: int

    @property
    def end(self) -> int:
        return self.base + self.count


@dataclass
class ModelGroup:
    generation: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    pinned: bool = False


@dataclass
class Decided:
    """A trim that is not in the log yet."""

    command: bytes
    to: int
    by_consumption: bool
    held: bool = False


class Model:
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.start = 0
        self.batches: list[Batch] = []
        self.groups: dict[str, ModelGroup] = {}

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def lag(self, offsets: dict[int, int], start: int) -> tuple[dict[int, int], int]:
        """Records by lane, and bytes of batches."""
        by_lane = dict.fromkeys(range(self.lanes), 0)
        size_bytes = 0
        for batch in self.batches:
            begin = max(start, offsets.get(batch.lane, 0))
            left = [offset for offset in range(batch.base, batch.end) if offset >= begin]
            by_lane[batch.lane] += len(left)
            size_bytes += len(batch.payload) if left else 0
        return by_lane, size_bytes

    def backlog(self, start: int) -> tuple[int, int]:
        lags = [self.lag(group.offsets, start) for group in self.groups.values()] or [self.lag({}, start)]
        return max(sum(by_lane.values()) for by_lane, _ in lags), max(size_bytes for _, size_bytes in lags)

    def prefix(self, groups: Collection[ModelGroup]) -> int:
        for batch in self.batches:
            for offset in range(batch.base, batch.end):
                if offset >= self.start and any(group.offsets.get(batch.lane, 0) <= offset for group in groups):
                    return offset
        return self.end

    def pinned(self) -> list[ModelGroup]:
        return [group for group in self.groups.values() if group.pinned]

    def retention_point(self, oldest: int | None, most_bytes: int | None, consumed: bool) -> int:
        point = self.start
        running = -(10**9)
        if oldest is not None:
            for batch in self.batches:
                running = max(running, batch.time)
                if running < oldest:
                    point = max(point, batch.end)
        if most_bytes is not None and point < self.end:
            kept, size = self.batches[-1].base, 0
            for batch in reversed(self.batches):
                size += len(batch.payload)
                if size > most_bytes:
                    break
                kept = min(kept, batch.base)
            point = max(point, kept)
        if consumed and self.groups:
            point = max(point, self.prefix(self.groups.values()))
        if self.pinned():
            point = min(point, self.prefix(self.pinned()))
        return point

    def lost(self, lane: int, offset: int) -> bool:
        """Whether the lane had something from this offset to the start of the log."""
        return lane == ANY_LANE or any(
            batch.lane == lane and batch.end > offset and batch.base < self.start for batch in self.batches
        )

    def read_lanes(self, cursors: list[Cursor], max_bytes: int) -> list[tuple[int, int, bytes]]:
        found: list[tuple[int, int, bytes]] = []
        for lane, offset in sorted(cursors, reverse=True):
            for batch in self.batches:
                if batch.end > offset and lane in (ANY_LANE, batch.lane):
                    max_bytes -= len(batch.payload)
                    if max_bytes < 0 and found:
                        return found
                    found.append((batch.base, batch.count, batch.payload))
        return found


class GroupsAgainstModel(RuleBasedStateMachine):
    lmdb = False

    @initialize(lanes=st.sampled_from([1, 3]))
    def begin(self, lanes: int) -> None:
        self.sweeps = patch.object(machine, "SWEEP_ROWS", 3)
        self.sweeps.start()
        self.folder = TemporaryDirectory()
        self.settings = PartitionSettings(lanes=lanes, max_groups=len(NAMES))
        self.log = Log(self.settings, LmdbTestDisk(Path(self.folder.name) / "store") if self.lmdb else None)
        self.model = Model(lanes)
        self.tail = Tail(Offset(0), TAIL_BYTES, {})
        self.checkpoints: list[tuple[Checkpoint, int]] = []
        self.decided: list[Decided] = []

    def teardown(self) -> None:
        if hasattr(self, "sweeps"):
            self.sweeps.stop()
            self.log.store.close()
            self.folder.cleanup()

    @property
    def partition(self) -> Partition:
        return self.log.partition

    def held(self) -> None:
        for decided in self.decided:
            decided.held = True

    # -- what is in the log -----------------------------------------------------------

    @rule(lane=st.integers(0, 2), count=st.integers(1, 4), time=st.integers(0, 30), size=st.sampled_from([1, 90]))
    def append(self, lane: int, count: int, time: int, size: int) -> None:
        lane = min(lane, self.model.lanes - 1)
        payload = RecordBatch.encode([b"x" * size] * count, timestamps=time, lane=lane)
        base = self.model.end
        assert self.log.apply(payload) == appended(base, count)
        self.model.batches.append(Batch(base, count, payload, lane, time))
        self.tail.append(Offset(base), count, payload, lane)

    @rule(name=st.sampled_from(NAMES), newer=st.sampled_from([0, 0, 0, 1, -1]), rewind=st.booleans(), data=st.data())
    def commit(self, name: str, newer: int, rewind: bool, data: st.DataObject) -> None:
        known = self.model.groups.get(name)
        generation = max(0, (known.generation if known else 0) + newer)
        lanes, offsets = st.integers(0, self.model.lanes - 1), st.integers(0, self.model.end)
        moved = data.draw(st.dictionaries(lanes, offsets, max_size=3))
        answer = self.log.apply(commit_command(name, generation, moved, rewind=rewind))
        group = known or ModelGroup()
        if generation < group.generation:
            assert isinstance(answer, StaleGenerationError)
            return
        if known is None or (rewind and any(at < group.offsets.get(lane, 0) for lane, at in moved.items())):
            self.held()
        taken = {lane: at for lane, at in moved.items() if rewind or at >= group.offsets.get(lane, 0)}
        self.model.groups[name] = ModelGroup(generation, group.offsets | taken, group.pinned)
        assert answer == committed(generation, group.offsets | taken, pinned=group.pinned)

    @rule(name=st.sampled_from(NAMES))
    def catch_up(self, name: str) -> None:
        """To the end, in all lanes: otherwise little would ever be consumed by all."""
        group = self.model.groups.get(name, ModelGroup())
        if name not in self.model.groups:
            self.held()
        offsets = dict.fromkeys(range(self.model.lanes), self.model.end)
        self.log.apply(commit_command(name, group.generation, offsets))
        self.model.groups[name] = ModelGroup(group.generation, offsets, group.pinned)

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        assert self.log.apply(pin_command(name, pinned)) == Pinned(pinned)
        known = self.model.groups.get(name)
        if pinned and (known is None or not known.pinned):
            self.held()
        if pinned or known is not None:
            self.model.groups.setdefault(name, ModelGroup()).pinned = pinned

    @rule(name=st.sampled_from(NAMES))
    def delete_group(self, name: str) -> None:
        existed = self.model.groups.pop(name, None) is not None
        assert self.log.apply(delete_group_command(name)) == Deleted(existed)

    @rule(data=st.data())
    def trim_whatever_is_held(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(0, self.model.end))
        self.log.apply(trim_command(to))
        self.model.start = max(self.model.start, to)

    @rule(data=st.data())
    def decide_a_trim(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(0, self.model.end + 2))
        pinned = self.model.pinned()
        point = min(to, self.model.end, self.model.prefix(pinned) if pinned else to)
        self.decided.append(Decided(self.partition.guarded_trim(to), point, False))

    @rule(
        oldest=st.none() | st.integers(0, 31),
        most_bytes=st.sampled_from([None, None, 500, 1500]),
        consumed=st.booleans(),
    )
    def decide_by_retention(self, oldest: int | None, most_bytes: int | None, consumed: bool) -> None:
        age = None if oldest is None else 1000
        changed = PartitionSettings(
            lanes=self.model.lanes,
            max_groups=len(NAMES),
            retention_ms=age,
            retention_bytes=most_bytes,
            retention_consumed=consumed,
        )
        self.log.apply(configure_command(changed))
        command = self.partition.retention_command((oldest or 0) + 1000)
        point = self.model.retention_point(oldest, most_bytes, consumed)
        assert (command is not None) == (point > self.model.start)
        if command is not None:
            self.decided.append(Decided(command, point, oldest is None and most_bytes is None))

    @precondition(lambda self: self.decided)
    @rule()
    def propose_what_was_decided(self) -> None:
        decided, model = self.decided.pop(0), self.model
        before = model.start
        model.start = self.log.apply(decided.command).start_offset
        assert model.start == (before if decided.held else max(before, decided.to))
        if model.pinned() and model.start > before:
            assert model.start <= self.model_prefix(before, model.pinned())
        if decided.by_consumption and model.groups and model.start > before:
            assert model.start <= self.model_prefix(before, model.groups.values())

    def model_prefix(self, start: int, groups: Collection[ModelGroup]) -> int:
        now, self.model.start = self.model.start, start
        prefix = self.model.prefix(groups)
        self.model.start = now
        return prefix

    # -- what happens to replicas ----------------------------------------------------------

    @rule()
    def sync(self) -> None:
        self.log.store.sync()
        self.tail.synced()

    @rule(synced=st.booleans())
    def restart(self, synced: bool) -> None:
        if synced:
            self.log.store.sync()
        before = self.partition.checkpoint()
        self.log.crash()
        self.log.store.sync()
        assert self.partition.checkpoint() == before
        self.tail = Tail(self.partition.next_offset, TAIL_BYTES, self.partition.lane_ends())

    @precondition(lambda self: self.log.payloads)
    @rule()
    def save_checkpoint(self) -> None:
        self.checkpoints.append((self.log.checkpoint(), self.model.end))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data(), restarted=st.booleans())
    def start_from_a_checkpoint(self, data: st.DataObject, restarted: bool) -> None:
        checkpoint, end = data.draw(st.sampled_from(self.checkpoints))
        twin = self.log.twin_from_checkpoint(checkpoint)
        if restarted:
            twin.store.sync()
            twin.crash()
        assert twin.partition.checkpoint() == self.partition.checkpoint()
        assert twin.partition.lane_ends() == self.partition.lane_ends()
        self.counts(twin.partition, max(self.model.start, end))

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "log"):
            assert self.partition.start_offset == self.model.start
            self.counts(self.partition, self.model.start)

    def counts(self, partition: Partition, start: int) -> None:
        model = self.model
        for name in NAMES:
            by_lane, _ = model.lag(model.groups[name].offsets if name in model.groups else {}, start)
            lag = partition.lag(name)
            assert (lag.records, lag.records_by_lane) == (sum(by_lane.values()), by_lane)
        lags = {name: sum(model.lag(group.offsets, start)[0].values()) for name, group in model.groups.items()}
        assert partition.lags() == lags
        assert partition.backlog() == model.backlog(start)
        positions = {
            name: Position(group.generation, group.offsets, b"", group.pinned) for name, group in model.groups.items()
        }
        assert partition.positions() == positions
        assert [partition.position(name) for name in NAMES] == [positions.get(name) for name in NAMES]

    @rule(max_bytes=st.sampled_from([0, 700, 2000, 10**6]), data=st.data())
    def read(self, max_bytes: int, data: st.DataObject) -> None:
        model = self.model
        offsets = st.integers(model.start, model.end)
        if data.draw(st.booleans()):
            drawn = data.draw(st.dictionaries(st.integers(0, model.lanes), offsets, min_size=1))
        else:
            drawn = {ANY_LANE: data.draw(offsets)}
        cursors = [Cursor(lane, offset) for lane, offset in drawn.items()]
        expected = model.read_lanes(cursors, max_bytes)
        with self.log.snapshot() as snapshot:
            assert read_lanes(snapshot, cursors, max_bytes) == expected
            lane = data.draw(st.sampled_from(sorted(drawn)))
            before = data.draw(st.integers(0, max(0, model.start - 1)))
            for outside in (before, model.end + 1):
                moved = [Cursor(each, outside if each == lane else at) for each, at in drawn.items()]
                if model.start <= outside <= model.end or (outside < model.start and not model.lost(lane, outside)):
                    assert read_lanes(snapshot, moved, max_bytes) == model.read_lanes(moved, max_bytes)
                    continue
                with pytest.raises(OffsetOutOfRangeError) as caught:
                    read_lanes(snapshot, moved, max_bytes)
                assert caught.value.details == {
                    "offset": outside,
                    "lane": lane,
                    "start": model.start,
                    "end": model.end,
                }
        from_memory: Any = self.tail.read_lanes(cursors, max_bytes)
        if from_memory is None:
            assert expected[0][0] < self.tail.start
        else:
            # Less is right where a lower lane would have to come from disk, but never nothing.
            assert from_memory == expected[: len(from_memory)]
            assert bool(from_memory) == bool(expected)
            if len(from_memory) < len(expected):
                assert expected[len(from_memory)][0] < self.tail.start


class GroupsOnLmdbAgainstModel(GroupsAgainstModel):
    lmdb = True


TestGroupsAgainstModel = pytest.mark.slow(GroupsAgainstModel.TestCase)
TestGroupsAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestGroupsOnLmdbAgainstModel = pytest.mark.slow(GroupsOnLmdbAgainstModel.TestCase)
TestGroupsOnLmdbAgainstModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
