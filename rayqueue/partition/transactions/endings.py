"""Staging and ending: a partition's entries about transactions, applied.

A marker ends everything that its transaction has here in one entry: batches,
positions of groups, acknowledgements of jobs. What was staged was checked, and
the place in which it is to go was taken, when it was staged; so to commit it
cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayqueue.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    RayQueueError,
    TopicKindError,
)
from rayqueue.ids import Index
from rayqueue.partition.answers import Ended, Staged
from rayqueue.partition.transactions.commands import EndTransaction, StageAcks, StageOffsets, TransactionCommand
from rayqueue.partition.transactions.open import Key, Opened, StagedJobs, StagedPosition
from rayqueue.protocol.jobs import Settled
from rayqueue.protocol.transactions import MAX_EPOCH
from rayqueue.records import BatchHeader
from rayqueue.records.header import TRANSACTIONAL

if TYPE_CHECKING:
    from rayqueue.partition.machine import Partition

_MAX_PRODUCER_ID = 2**63 - 1


def transaction_of(header: BatchHeader) -> Key | None:
    """The transaction that a batch is of."""
    return (header.producer_id, header.epoch) if header.flags & TRANSACTIONAL and header.producer_id else None


class Endings:
    """Of one partition."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def batch_refusal(self, key: Key, header: BatchHeader) -> RayQueueError | None:
        """Why a batch of a transaction is not taken, though its producer may write; None if it is."""
        partition = self._partition
        if header.epoch > MAX_EPOCH or header.producer_id > _MAX_PRODUCER_ID:
            return InvalidInputError(f"there is no transaction {header.epoch} of producer {header.producer_id}")
        batch = (partition.next_offset, header.lane)
        jobs = 0 if partition.jobs is None else header.count
        return partition.transactions.refusal(key, partition.settings, batch=batch, jobs=jobs)

    def change(self, index: Index, command: TransactionCommand) -> Staged | Settled | Ended | RayQueueError:
        key = command.producer_id, command.epoch
        if isinstance(command, EndTransaction):
            return self._end(index, key, commit=command.commit)
        producer = self._partition.producers.get(command.producer_id)
        if producer is not None and producer.epoch > command.epoch:
            return ProducerFencedError(
                f"transaction {command.epoch} of producer {command.producer_id} has ended here, or was overtaken",
                epoch=command.epoch,
                current=producer.epoch,
            )
        if isinstance(command, StageOffsets):
            return self._stage_offsets(index, key, command)
        return self._stage_acks(key, command)

    def _stage_offsets(self, index: Index, key: Key, command: StageOffsets) -> Staged | RayQueueError:
        """Claims the partition for the generation: whoever has an older one is fenced from now on, and whoever has a
        newer one has to wait."""
        partition, group = self._partition, command.group
        transactions, settings = partition.transactions, partition.settings
        if partition.jobs is not None:
            return TopicKindError("this topic is a work queue: it has jobs, and groups have no positions in it")
        refused = transactions.pending(group, command.generation) or transactions.refusal(key, settings, group=group)
        if refused is not None:
            return refused
        for lane, offset in command.offsets.items():
            if lane >= settings.lanes:
                return InvalidInputError(f"there is no lane {lane}; the partition has {settings.lanes}", lane=lane)
            if offset > partition.next_offset:
                start, end = partition.start_offset, partition.next_offset
                text = f"offset {offset} cannot be staged, the log ends at {end}"
                return OffsetOutOfRangeError(text, offset=offset, start=start, end=end)
        claimed = partition.commit_offsets(index, group, command.generation, {}, b"")
        if isinstance(claimed, RayQueueError):
            return claimed
        transactions.stage_position(key, group, StagedPosition(command.generation, command.offsets, command.metadata))
        return Staged()

    def _stage_acks(self, key: Key, command: StageAcks) -> Settled | RayQueueError:
        partition, jobs = self._partition, self._partition.jobs
        if jobs is None:
            return TopicKindError("this partition is a log, not a work queue")
        wanted = sum(count for _, count in command.jobs)
        refused = partition.transactions.refusal(key, partition.settings, jobs=wanted)
        if refused is not None:
            return refused
        jobs.pass_time(command.now_ms)
        opened = partition.transactions.get(key)
        before = [] if opened is None else [run for each in opened.jobs for run in each.jobs]
        settled, taken = jobs.stage(command.token, command.jobs, before)
        partition.transactions.stage_jobs(key, StagedJobs(command.worker, command.token, taken))
        jobs.flush()
        return settled

    def _end(self, index: Index, key: Key, *, commit: bool) -> Ended:
        """The first marker counts: after it the transaction is not open, and cannot be opened again."""
        partition = self._partition
        opened = partition.transactions.end(key, commit=commit)
        # Void if it is further already. If no other producer can be remembered, what is late opens the transaction
        # again, and finds out that it has ended.
        partition.producers.fence(key[0], key[1] + 1, index, partition.settings)
        if opened is None:
            return Ended(False)
        if commit:
            for group, staged in opened.groups.items():
                partition.commit_offsets(index, group, staged.generation, staged.offsets, staged.metadata)
        if partition.jobs is not None:
            partition.jobs.end_put([(start, end) for start, (end, _) in opened.runs.items()], commit=commit)
            for each in opened.jobs:
                partition.jobs.end_staged(each.worker, each.token, each.jobs, commit=commit)
            partition.jobs.flush()
        self._tell(opened, commit=commit)
        return Ended(True)

    def _tell(self, opened: Opened, *, commit: bool) -> None:
        watcher = self._partition.watcher
        if watcher is not None and opened.runs:
            lanes = {lane for _, lane in opened.runs.values()}
            watcher.ended(lanes, [] if commit else [(start, end) for start, (end, _) in opened.runs.items()])
