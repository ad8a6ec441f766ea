"""The partition against a model of lists and dicts, through crashes and checkpoints.

The model says what each entry must answer; the real thing runs on a store that
forgets what was not synced, is restarted, and is compared with replicas that
started from a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayqueue.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    ProducerError,
    ProducerFencedError,
    RayQueueError,
    SequenceExpiredError,
    SequenceGapError,
    StaleGenerationError,
    TooManyProducersError,
)
from rayqueue.log.store import Checkpoint
from rayqueue.partition import (
    Admission,
    Deleted,
    Fenced,
    PartitionSettings,
    TimePassed,
    Trimmed,
    commit_command,
    delete_group_command,
    fence_command,
    machine,
    offset_for_time,
    pass_time_command,
    producers,
    read,
    retention_point,
    trim_command,
)
from rayqueue.partition.tables import LANES, OFFSETS, PRODUCERS
from rayqueue.records import RecordBatch
from tests.unit.partition.partition_log import Log, appended, committed

IDLE_MS, MAX_KNOWN = 20, 5
SETTINGS = PartitionSettings(lanes=3, max_producers=3, dedupe_window=2, max_groups=2)


@dataclass
class Written:
    """A batch in the model's log."""

    base: int
    payload: bytes
    times: list[int]
    lane: int

    @property
    def end(self) -> int:
        return self.base + len(self.times)


@dataclass
class ModelProducer:
    epoch: int
    expected: int = 0
    used_ms: int = 0
    window: list[tuple[int, int, int]] = field(default_factory=list)  # sequence, count, base


class Model:
    def __init__(self) -> None:
        self.start = 0
        self.batches: list[Written] = []
        self.producers: OrderedDict[int, ModelProducer] = OrderedDict()
        self.first_ms = self.now_ms = 0
        self.groups: dict[str, tuple[int, dict[int, int]]] = {}

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def append(self, payload: bytes, times: list[int], lane: int, pid: int, epoch: int, sequence: int) -> Any:
        if pid:
            judged = self._judge(pid, epoch, sequence, len(times))
            if judged is not None:
                return judged
        base = self.end
        self.batches.append(Written(base, payload, times, lane))
        if pid:
            producer = self.producers[pid]
            producer.expected = sequence + len(times)
            producer.window = [*producer.window, (sequence, len(times), base)][-SETTINGS.dedupe_window :]
        return appended(base, len(times))

    def _judge(self, pid: int, epoch: int, sequence: int, count: int) -> Any:
        producer = self.producers.get(pid)
        if producer is None or epoch > producer.epoch:
            if sequence:
                return SequenceGapError
            if producer is None and self._full():
                return TooManyProducersError
            self._add(pid, ModelProducer(epoch))
            return None
        if epoch < producer.epoch:
            return ProducerFencedError
        if sequence > producer.expected:
            return SequenceGapError
        if sequence == producer.expected:
            self._use(pid, producer)
            return None
        for first, size, base in producer.window:
            if first <= sequence and sequence + count <= first + size:  # it, or a part of it
                return appended(base + sequence - first, count, duplicate=True)
        return SequenceExpiredError if sequence < producer.window[0][0] else ProducerError

    def _use(self, pid: int, producer: ModelProducer) -> None:
        self.producers[pid] = producer
        self.producers.move_to_end(pid)
        producer.used_ms = self.now_ms

    def _add(self, pid: int, producer: ModelProducer) -> None:
        """Others are forgotten for one that is new, or has a new epoch; not whenever somebody writes."""
        self._use(pid, producer)
        while len(self.producers) > SETTINGS.max_producers and self._oldest_is_idle():
            self.producers.popitem(last=False)

    def _oldest_is_idle(self) -> bool:
        oldest = next(iter(self.producers.values()))
        return self.now_ms == 0 or self.now_ms - (oldest.used_ms or self.first_ms) > IDLE_MS

    def _full(self) -> bool:
        return len(self.producers) >= MAX_KNOWN and not self._oldest_is_idle()

    def pass_time(self, now_ms: int) -> TimePassed:
        self.first_ms = self.first_ms or now_ms
        self.now_ms = max(self.now_ms, now_ms)
        return TimePassed(self.now_ms)

    def fence(self, pid: int, epoch: int) -> Any:
        producer = self.producers.get(pid)
        if producer is not None and epoch < producer.epoch:
            return ProducerFencedError
        if producer is None and self._full():
            return TooManyProducersError
        if producer is None or epoch > producer.epoch:
            self._add(pid, ModelProducer(epoch))
        return Fenced(epoch)

    def trim(self, to: int) -> int:
        self.start = max(self.start, min(to, self.end))
        return self.start

    def commit(self, name: str, generation: int, offsets: dict[int, int], rewind: bool) -> Any:
        if name not in self.groups and len(self.groups) == SETTINGS.max_groups:
            return InvalidInputError
        current, known = self.groups.get(name, (0, {}))
        if generation < current:
            return StaleGenerationError
        if any(offset > self.end for offset in offsets.values()):
            return OffsetOutOfRangeError
        moved = {lane: at for lane, at in offsets.items() if rewind or at >= known.get(lane, 0)}
        self.groups[name] = (generation, known | moved)
        return committed(generation, known | moved)

    # -- what a reader must find ------------------------------------------------------

    def readable(self) -> list[Written]:
        return [batch for batch in self.batches if batch.end > self.start]

    def records(self) -> Iterator[tuple[int, int]]:
        """Offset and timestamp of every record that can be read."""
        for batch in self.readable():
            for offset, time in enumerate(batch.times, batch.base):
                if offset >= self.start:
                    yield offset, time

    def retention_point(self, oldest: int, retention_bytes: int) -> int:
        point = self.start
        running = -(10**9)
        for batch in self.batches:
            running = max([running, *batch.times])
            if running < oldest:
                point = max(point, batch.end)
        kept = self.batches[-1].base if self.batches and point < self.end else point
        size = 0
        for batch in reversed(self.batches):
            size += len(batch.payload)
            if size > retention_bytes:
                break
            kept = min(kept, batch.base)
        return max(point, kept)


def agrees(answer: Any, expected: Any) -> bool:
    return type(answer) is expected if isinstance(expected, type) else bool(answer == expected)


pids = st.integers(0, 7)
epochs = st.integers(0, 2)


class PartitionAgainstModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.sweeps = ExitStack()
        for module, name, small in (
            (machine, "SWEEP_ROWS", 3),
            (producers, "IDLE_MS", IDLE_MS),
            (producers, "MAX_KNOWN", MAX_KNOWN),
        ):
            self.sweeps.enter_context(patch.object(module, name, small))
        self.log = Log(SETTINGS)
        self.model = Model()
        self.checkpoints: list[tuple[Checkpoint, int]] = []

    def teardown(self) -> None:
        if hasattr(self, "sweeps"):
            self.sweeps.close()

    def apply(self, payload: bytes, expected: Any) -> None:
        answer = self.log.apply(payload)
        assert agrees(answer, expected), f"{answer!r} instead of {expected!r}"

    @rule(
        pid=pids,
        epoch=epochs,
        shift=st.sampled_from([0, 0, 0, 0, 0, -1, -2, -3, -4, -6, 1]),
        times=st.lists(st.integers(0, 50), min_size=1, max_size=3),
        lane=st.integers(0, SETTINGS.lanes - 1),
    )
    def append(self, pid: int, epoch: int, shift: int, times: list[int], lane: int) -> None:
        producer = self.model.producers.get(pid)
        expected = producer.expected if producer is not None and producer.epoch == epoch else 0
        sequence = max(0, expected + shift)
        payload = RecordBatch.encode(
            [b"%d" % time for time in times],
            timestamps=times,
            lane=lane,
            producer_id=pid,
            epoch=epoch,
            sequence=sequence,
        )
        if pid:
            self._admission_agrees(payload)
        self.apply(payload, self.model.append(payload, times, lane, pid, epoch, sequence))

    def _admission_agrees(self, payload: bytes) -> None:
        """With nothing in flight, admission says exactly what applying says."""
        admission = Admission(self.log.partition)
        partition_says = self.log.partition.producers.answer(admission.check(payload))
        if isinstance(partition_says, RayQueueError):
            with pytest.raises(type(partition_says)):
                admission.admit(payload)
        else:
            assert admission.admit(payload) == partition_says

    @precondition(lambda self: any(producer.window for producer in self.model.producers.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        pid = data.draw(st.sampled_from([pid for pid, producer in self.model.producers.items() if producer.window]))
        producer = self.model.producers[pid]
        sequence, count, base = data.draw(st.sampled_from(producer.window))
        expected: Any = appended(base, count, duplicate=True)
        if data.draw(st.integers(0, 3)) == 0:
            count, expected = count + 1, ProducerError  # cut into batches in another way
        payload = RecordBatch.encode(
            [b"again"] * count, timestamps=0, producer_id=pid, epoch=producer.epoch, sequence=sequence
        )
        self.apply(payload, expected)

    @rule(passed_ms=st.integers(-5, 15))
    def pass_time(self, passed_ms: int) -> None:
        now_ms = max(1, self.model.now_ms + passed_ms)
        self.apply(pass_time_command(now_ms), self.model.pass_time(now_ms))

    @rule(pid=st.integers(1, 7), epoch=epochs)
    def fence(self, pid: int, epoch: int) -> None:
        self.apply(fence_command(pid, epoch), self.model.fence(pid, epoch))

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(0, self.model.end + 2))
        start = self.model.trim(to)
        answer = self.log.apply(trim_command(to))
        assert isinstance(answer, Trimmed)
        assert answer.start_offset == start

    @rule(
        name=st.sampled_from(["a", "b", "c"]),
        newer=st.sampled_from([0, 0, 0, 1, -1]),
        rewind=st.booleans(),
        data=st.data(),
    )
    def commit(self, name: str, newer: int, rewind: bool, data: st.DataObject) -> None:
        generation = max(0, self.model.groups.get(name, (0, {}))[0] + newer)
        offsets = st.integers(0, self.model.end + 1)
        moved = data.draw(st.dictionaries(st.integers(0, SETTINGS.lanes - 1), offsets, max_size=2))
        expected = self.model.commit(name, generation, moved, rewind)
        self.apply(commit_command(name, generation, moved, rewind=rewind), expected)

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def delete_group(self, name: str) -> None:
        existed = self.model.groups.pop(name, None) is not None
        self.apply(delete_group_command(name), Deleted(existed))

    # -- what happens to replicas ----------------------------------------------------------

    @rule()
    def sync(self) -> None:
        self.log.store.sync()

    @rule(synced=st.booleans())
    def restart(self, synced: bool) -> None:
        if synced:
            self.log.store.sync()
        before = self.log.partition.checkpoint()
        self.log.crash()
        assert self.log.partition.checkpoint() == before

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
        assert twin.partition.checkpoint() == self.log.partition.checkpoint()
        assert twin.partition.readable_from == max(self.model.start, end)
        assert twin.partition.first_needed() > checkpoint.index
        with twin.snapshot() as snapshot:
            found = read(snapshot, twin.partition.readable_from, 1 << 20)
        expected = [batch for batch in self.model.readable() if batch.end > end]
        assert [(fetched.base_offset, fetched.payload) for fetched in found] == [
            (batch.base, batch.payload) for batch in expected
        ]

    @rule(max_bytes=st.sampled_from([0, 700, 2000, 10**6]), data=st.data())
    def read_some(self, max_bytes: int, data: st.DataObject) -> None:
        model = self.model
        offset = data.draw(st.integers(0, model.end + 1))
        lane = data.draw(st.none() | st.integers(0, SETTINGS.lanes - 1))
        with self.log.snapshot() as snapshot:
            if not model.start <= offset <= model.end:
                with pytest.raises(OffsetOutOfRangeError) as caught:
                    read(snapshot, offset, max_bytes, lane=lane)
                assert caught.value.details == {"offset": offset, "start": model.start, "end": model.end}
                return
            found = read(snapshot, offset, max_bytes, lane=lane)
        wanted = [batch for batch in model.batches if batch.end > offset and lane in (None, batch.lane)]
        taken: list[tuple[int, int, bytes]] = []
        for batch in wanted:
            max_bytes -= len(batch.payload)
            if max_bytes < 0 and taken:
                break
            taken.append((batch.base, len(batch.times), batch.payload))
        assert found == taken

    @rule(timestamp=st.integers(-1, 52))
    def seek_by_time(self, timestamp: int) -> None:
        expected = next((offset for offset, time in self.model.records() if time >= timestamp), self.model.end)
        with self.log.snapshot() as snapshot:
            assert offset_for_time(snapshot, timestamp) == expected

    @rule(oldest=st.integers(-1, 52), retention_bytes=st.sampled_from([0, 500, 1500, 10**6]))
    def find_retention_point(self, oldest: int, retention_bytes: int) -> None:
        with self.log.snapshot() as snapshot:
            point = retention_point(snapshot, oldest + 1000, 1000, retention_bytes)
        assert point == self.model.retention_point(oldest, retention_bytes)

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "log"):
            return
        partition, model = self.log.partition, self.model
        assert (partition.start_offset, partition.next_offset) == (model.start, model.end)
        assert partition.total_bytes == sum(len(batch.payload) for batch in model.batches)
        assert len(partition.producers) == len(model.producers) == len(list(self.log.store.scan(PRODUCERS)))
        assert {name: partition.groups.get(name) for name in partition.groups}.keys() == model.groups.keys()
        for name, (generation, moved) in model.groups.items():
            group = partition.groups.get(name)
            assert group is not None
            assert (group.generation, group.offsets) == (generation, moved)
        readable = model.readable()
        if not partition._sweep_until:
            for table in (OFFSETS, LANES):
                kept = [int.from_bytes(key[-8:], "big") for key, _ in self.log.store.scan(table)]
                assert sorted(kept) == [batch.base for batch in readable]
        if readable:
            index = partition.locate(max(readable[0].base, model.start))
            assert index == partition.first_needed()
            assert index is not None
            assert self.log.payloads[index - 1] == readable[0].payload
        else:
            assert partition.first_needed() == len(self.log.payloads) + 1


TestPartitionAgainstModel = pytest.mark.slow(PartitionAgainstModel.TestCase)
TestPartitionAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
