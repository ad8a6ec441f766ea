"""The partition: what the log of one Raft group means.

``Partition`` implements ``rayqueue.raft.machine.StateMachine``. It owns the
offsets (which batch is where), the producers, the groups' offsets and the
start of the log. Its state is a function of the log and nothing else, so all
replicas have the same.

A batch's bytes are never moved or written again: applying one only adds a row
that says at which Raft index the batch with this base offset is. A batch that
is a duplicate or refused has an entry in the log and no row, so readers do not
see it. Batches are not verified here; ``Admission`` did that before the leader
proposed them, and the store's checksum covers them since.

``apply`` raises only if this release cannot read an entry. A replica must stop
there, for going on without it would be to diverge.
"""

from __future__ import annotations

from itertools import islice
from struct import Struct

from rayqueue.errors import InvalidInputError, InvariantBrokenError, RayQueueError
from rayqueue.ids import Index, Offset
from rayqueue.log.store import LogStore, Table
from rayqueue.partition.answers import Appended, Committed, Configured, Deleted, Fenced, Trimmed
from rayqueue.partition.commands import (
    Command,
    CommitOffsets,
    Configure,
    DeleteGroup,
    FenceProducer,
    Trim,
    decode,
)
from rayqueue.partition.groups import Groups
from rayqueue.partition.producers import Producers
from rayqueue.partition.rows import (
    LOG_KEY,
    SETTINGS_KEY,
    LogRow,
    find_batch,
    lane_key,
    load_log,
    offset_key,
    pack_batch,
    read_batch,
)
from rayqueue.partition.settings import SETTINGS_BYTES, PartitionSettings
from rayqueue.records import BATCH_TAG, BatchHeader
from rayqueue.records.checksum import crc32c

Answer = Appended | Trimmed | Committed | Deleted | Fenced | Configured | RayQueueError

SWEEP_ROWS = 128
"""Rows below the log's start that one entry deletes at most, so that a large trim holds up nobody."""

_CHECKPOINT_VERSION = 1
_CHECKPOINT = Struct("<IBQQQqII")  # crc, version, start, next, total bytes, max timestamp, lengths of the two dumps


class Partition:
    """One replica's copy of the partition's state, kept in memory and written through to the store."""

    def __init__(self, store: LogStore, settings: PartitionSettings) -> None:
        self._store = store
        self.producers = Producers(store)
        self.groups = Groups(store)
        known = store.get(Table.META, SETTINGS_KEY)
        if known is None:
            store.put(Table.META, SETTINGS_KEY, settings.encode())
        self.settings = settings if known is None else PartitionSettings.decode(known)
        self.producers.load()
        self.groups.load()
        self._use_log(load_log(store))
        self._applied = store.applied

    def _use_log(self, log: LogRow) -> None:
        self.start_offset = log.start_offset
        self.next_offset = log.next_offset
        self.total_bytes = log.total_bytes
        self.max_timestamp = log.max_timestamp
        self._readable_from = log.readable_from
        self._swept_to = b""
        self._sweep_until = b""
        self._first_needed: Index | None = None
        self._find_first_needed()

    # -- what others ask ---------------------------------------------------------------

    @property
    def high_watermark(self) -> Offset:
        """The first offset that is not committed yet."""
        return self.next_offset

    @property
    def readable_from(self) -> Offset:
        """The first offset that this replica can serve.

        That is the start of the log, except on a replica that took over a
        checkpoint and has not yet applied the trim that made it necessary.
        """
        return max(self.start_offset, self._readable_from)

    def first_needed(self) -> Index:
        return Index(self._applied + 1) if self._first_needed is None else self._first_needed

    def locate(self, offset: int) -> Index | None:
        """The log entry of the batch that holds this offset; None if it is trimmed or not there yet."""
        if not self.readable_from <= offset < self.next_offset:
            return None
        batch = find_batch(self._store, offset)
        return None if batch is None else batch.index

    # -- applying -------------------------------------------------------------------------

    def apply(self, index: Index, payload: bytes) -> Answer:
        self._applied = index
        if self._sweep_until:
            self._sweep()
        if payload[0] == BATCH_TAG:
            return self._append(index, payload)
        return self._execute(index, decode(payload))

    def _append(self, index: Index, payload: bytes) -> Answer:
        header = BatchHeader.parse(payload)
        if header.producer_id:
            answer = self.producers.answer(header)
            if answer is not None:
                return answer
        base_offset = self.next_offset
        count, lane, size = header.count, header.lane, len(payload)
        timestamp = header.max_timestamp
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        key = offset_key(base_offset)
        row = pack_batch(index, self.total_bytes, self.max_timestamp, timestamp, count, size, lane)
        self._store.put(Table.OFFSETS, key, row)
        if self.settings.lanes > 1:
            self._store.put(Table.LANES, lane_key(lane, base_offset), b"")
        if header.producer_id:
            self.producers.accept(header, base_offset, index, self.settings)
        self.next_offset = Offset(base_offset + count)
        self.total_bytes += size
        if self._first_needed is None:
            self._first_needed = index
        return Appended(base_offset, count, False)

    def _execute(self, index: Index, command: Command) -> Answer:
        match command:
            case Trim(to_offset):
                return self._trim(to_offset)
            case CommitOffsets():
                return self.groups.commit(command, self.start_offset, self.next_offset, self.settings)
            case DeleteGroup(group):
                return self.groups.delete(group)
            case FenceProducer(producer_id, epoch):
                return self.producers.fence(producer_id, epoch, index, self.settings)
            case Configure(settings):
                return self._configure(settings)

    def _configure(self, settings: PartitionSettings) -> Configured | InvalidInputError:
        if self.next_offset and settings.lanes != self.settings.lanes and 1 in (settings.lanes, self.settings.lanes):
            return InvalidInputError(
                f"a partition with records cannot go from {self.settings.lanes} lanes to {settings.lanes}: "
                "the records of a partition with one lane are in no lane index",
                key="lanes",
            )
        self.settings = settings
        self._store.put(Table.META, SETTINGS_KEY, settings.encode())
        self.producers.shrink(settings)
        return Configured()

    # -- trimming -------------------------------------------------------------------------

    def _trim(self, to_offset: int) -> Trimmed:
        start = Offset(min(to_offset, self.next_offset))
        if start > self.start_offset:
            self.start_offset = start
            self._write_log()
            self._find_first_needed()
            self._sweep()
        return Trimmed(self.start_offset)

    def _write_log(self) -> None:
        log = LogRow(self.start_offset, self._readable_from, self.next_offset, self.total_bytes, self.max_timestamp)
        self._store.put(Table.META, LOG_KEY, log.encode())

    def _find_first_needed(self) -> None:
        """Find the first batch that readers may ask for; what is before it may be swept."""
        start = self.readable_from
        if start == self.next_offset:
            self._first_needed = None
            self._sweep_until = offset_key(start)
            return
        batch = find_batch(self._store, start)
        if batch is None:
            raise InvariantBrokenError(f"no batch holds offset {start}, but the log ends at {self.next_offset}")
        self._first_needed = batch.index
        self._sweep_until = offset_key(batch.base_offset)

    def _sweep(self) -> None:
        """Delete a bounded number of rows that no reader can reach any more."""
        store, until = self._store, self._sweep_until
        rows = list(islice(store.scan(Table.OFFSETS, self._swept_to, until), SWEEP_ROWS))
        for key, row in rows:
            store.delete(Table.OFFSETS, key)
            if self.settings.lanes > 1:
                batch = read_batch(key, row)
                store.delete(Table.LANES, lane_key(batch.lane, batch.base_offset))
        if len(rows) < SWEEP_ROWS:
            self._swept_to, self._sweep_until = until, b""
        else:
            self._swept_to = rows[-1][0]

    # -- checkpoints ------------------------------------------------------------------------

    def checkpoint(self) -> bytes:
        producers, groups = self.producers.dump(), self.groups.dump()
        head = _CHECKPOINT.pack(
            0,
            _CHECKPOINT_VERSION,
            self.start_offset,
            self.next_offset,
            self.total_bytes,
            self.max_timestamp,
            len(producers),
            len(groups),
        )
        body = b"".join((head[4:], self.settings.encode(), producers, groups))
        return crc32c(body).to_bytes(4, "little") + body

    def restore(self, state: bytes) -> None:
        if crc32c(state[4:]) != int.from_bytes(state[:4], "little"):
            raise InvariantBrokenError("the checkpoint does not match its checksum")
        version = state[4]
        if version != _CHECKPOINT_VERSION:
            raise InvariantBrokenError(f"checkpoint version {version} is unknown to this release", version=version)
        _, _, start, end, total_bytes, max_timestamp, producers_bytes, groups_bytes = _CHECKPOINT.unpack_from(state)
        producers_at = _CHECKPOINT.size + SETTINGS_BYTES
        groups_at = producers_at + producers_bytes
        self.settings = PartitionSettings.decode(state[_CHECKPOINT.size : producers_at])
        self._store.put(Table.META, SETTINGS_KEY, self.settings.encode())
        self.producers.restore(state[producers_at:groups_at])
        self.groups.restore(state[groups_at : groups_at + groups_bytes])
        # The rows of what was appended before the checkpoint are not here, and neither are the entries.
        self._use_log(LogRow(start, end, end, total_bytes, max_timestamp))
        self._write_log()
        self._applied = self._store.applied
