"""The partition: what the log of one Raft group means.

``Partition`` implements ``rayqueue.raft.machine.StateMachine``. It owns the
offsets (which batch is where), the lanes, the producers, the groups' offsets
and the start of the log. Its state is a function of the log and nothing else, so all
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

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, islice, pairwise
from struct import Struct
from typing import Protocol

import msgspec
from msgspec.structs import astuple

from rayqueue.errors import (
    InvalidInputError,
    InvariantBrokenError,
    RayQueueError,
    TopicKindError,
    UnknownFormatError,
)
from rayqueue.ids import Index, Offset
from rayqueue.log.store import LogStore
from rayqueue.partition.answers import (
    Appended,
    Committed,
    Configured,
    Deleted,
    Ended,
    Expired,
    Fenced,
    Pinned,
    Staged,
    TimePassed,
    Trimmed,
)
from rayqueue.partition.backlog import Backlog, Done, Progress
from rayqueue.partition.clock import Clock, Times
from rayqueue.partition.commands import (
    Command,
    CommitOffsets,
    Configure,
    DeleteGroup,
    ExpireGroups,
    FenceProducer,
    ForgetGroup,
    PassTime,
    PinGroup,
    Trim,
    check_offset,
    decode,
    pass_time_command,
    trim_command,
)
from rayqueue.partition.groups import Groups
from rayqueue.partition.jobs import dump
from rayqueue.partition.jobs.commands import AckAll, ChangeJobs, EndWorkers, JobCommand, LeaseJobs, SettleJobs
from rayqueue.partition.jobs.frontier import NOT_PLAIN
from rayqueue.partition.jobs.queue import Grant
from rayqueue.partition.jobs.staged import StagingQueue
from rayqueue.partition.lanes import Lanes, committed_prefix, emptied
from rayqueue.partition.producers import Producers
from rayqueue.partition.retention import retention_point
from rayqueue.partition.rows import (
    LOG_KEY,
    SETTINGS_KEY,
    BatchRow,
    LogRow,
    bounds,
    find_batch,
    load_log,
    offset_key,
    pack_batch,
    read_batch,
)
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.tables import META, OFFSETS
from rayqueue.partition.transactions.commands import EndTransaction, StageAcks, StageOffsets
from rayqueue.partition.transactions.endings import Endings, transaction_of
from rayqueue.partition.transactions.open import Transactions
from rayqueue.partition.transactions.runs import aborted_at
from rayqueue.protocol.calls import Lag, Position
from rayqueue.protocol.jobs import AckedAll, Settled
from rayqueue.protocol.unpacking import unpack
from rayqueue.records import BATCH_TAG, BatchHeader
from rayqueue.records.checksum import crc32c

Answer = (
    Appended
    | Trimmed
    | Committed
    | Pinned
    | Deleted
    | Fenced
    | TimePassed
    | Expired
    | Configured
    | Staged
    | Ended
    | Settled
    | tuple[Grant | None, ...]
    | tuple[Settled, ...]
    | tuple[AckedAll, ...]
    | tuple[int, ...]
    | int
    | RayQueueError
)

_KIND = ("queue", "ordered_by_key", "fair_by_key")
"""Settings that say what a partition's rows mean."""

SWEEP_ROWS = 128
"""Rows below the log's start that one entry deletes at most, so that a large trim holds up nobody."""

_CHECKPOINT_VERSION = 4
_TIMED_VERSION = 3
_UNTIMED_VERSION = 2
# crc, version, start, next, total bytes, max timestamp, held at, lengths of settings, lanes, producers, groups
_UNTIMED = Struct("<IBQQQqQIIII")
_TIMED = Struct("<IBQQQqQIIIIQQ")  # the same, then the clock's times


class _State(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A checkpoint. Fields are only added at its end, with a default that means what there was before; with one that
    this release does not know, it is not this release's to restore."""

    start_offset: Offset
    next_offset: Offset
    total_bytes: int
    max_timestamp: int
    held_at: Index
    settings: bytes
    lanes: bytes
    producers: bytes
    groups: bytes
    first_ms: int = 0
    now_ms: int = 0
    jobs: bytes = b""
    """Of a work queue. Not written where there is nothing: the release before does not know it."""
    transactions: bytes = b""
    """Those that are open. The same."""


_encode_state = msgspec.msgpack.Encoder().encode
_state_decoder = msgspec.msgpack.Decoder(_State)


def _encode_checkpoint(state: _State) -> bytes:
    written = list(astuple(state))
    while written[-1] == b"":
        written.pop()
    body = bytes((_CHECKPOINT_VERSION,)) + _encode_state(written)
    return crc32c(body).to_bytes(4, "little") + body


def emptied_at(offset: Offset, settings: PartitionSettings) -> bytes:
    """A checkpoint of a partition that has lost all that it had, and goes on at this offset. Groups and producers are
    unknown to it."""
    indexes_lanes = settings.lanes > 1 and not settings.queue
    lanes = emptied(settings.lanes, offset) if indexes_lanes else b""
    state = _State(offset, offset, 0, LogRow().max_timestamp, Index(0), settings.encode(), lanes, b"", b"")
    return _encode_checkpoint(state)


def _decode_state(checkpoint: bytes) -> _State:
    """``UnknownFormatError`` if this release cannot read it."""
    if crc32c(checkpoint[4:]) != int.from_bytes(checkpoint[:4], "little"):
        raise InvariantBrokenError("the checkpoint does not match its checksum")
    version = checkpoint[4]
    if version == _CHECKPOINT_VERSION:
        return unpack(
            _state_decoder,
            memoryview(checkpoint)[5:],
            lambda why: UnknownFormatError(f"a checkpoint that this release cannot read, a newer one wrote it: {why}"),
        )
    layout = {_UNTIMED_VERSION: _UNTIMED, _TIMED_VERSION: _TIMED}.get(version)
    if layout is None:
        raise UnknownFormatError(
            f"the checkpoint has version {version}, this release reads {_UNTIMED_VERSION} to {_CHECKPOINT_VERSION}",
            found=version,
            newest=_CHECKPOINT_VERSION,
        )
    _, _, start, end, total_bytes, max_timestamp, held_at, *rest = layout.unpack_from(checkpoint)
    lengths, times = rest[:4], rest[4:]
    cuts = list(accumulate(lengths, initial=layout.size))
    settings, lanes, producers, groups = (checkpoint[at:until] for at, until in pairwise(cuts))
    return _State(start, end, total_bytes, max_timestamp, held_at, settings, lanes, producers, groups, *times)


class Watcher(Protocol):
    """The tail of a running replica, which is told what the log gets, as it gets it."""

    def append(self, base_offset: Offset, count: int, payload: bytes, lane: int) -> None:
        """A batch was accepted."""

    def ended(self, lanes: Iterable[int], aborted: Iterable[tuple[Offset, Offset]]) -> None:
        """A transaction has ended that had batches in these lanes; those in these ranges were aborted."""

    def reset(self, end: Offset, lane_ends: Mapping[int, Offset]) -> None:
        """The log was replaced by a checkpoint that ends here."""


class Partition:
    """One replica's copy of the partition's state, kept in memory and written through to the store."""

    def __init__(self, store: LogStore, settings: PartitionSettings) -> None:
        self._store = store
        self.clock = Clock(store)
        self.clock.load()
        self.producers = Producers(store, self.clock)
        self.groups = Groups(store, self.clock)
        self.transactions = Transactions(store, self.clock)
        self._lanes = Lanes(store)
        known = store.get(META, SETTINGS_KEY)
        if known is None:
            store.put(META, SETTINGS_KEY, settings.encode())
        self.settings = settings if known is None else PartitionSettings.decode(known)
        self.producers.load()
        self.groups.load()
        self.transactions.load()
        self._lanes.load(self.settings.lanes)
        self.progress = Progress(self.groups, self._done)
        """What its groups are done with."""
        self.jobs = self._queue()
        """What is known of its records, if they are jobs."""
        self._use_log(load_log(store))
        self._applied = store.applied
        self.watcher: Watcher | None = None
        self.endings = Endings(self)

    def _queue(self) -> StagingQueue | None:
        return StagingQueue(self._store, self.clock, self.settings) if self.settings.queue else None

    @property
    def _indexes_lanes(self) -> bool:
        """A queue has an order of its own."""
        return self.settings.lanes > 1 and not self.settings.queue

    def watch(self, watcher: Watcher) -> None:
        """Tell this one from now on."""
        self.watcher = watcher

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
        self.progress.forget()

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

    @property
    def applied(self) -> Index:
        return self._applied

    def first_needed(self) -> Index:
        return Index(self._applied + 1) if self._first_needed is None else self._first_needed

    @property
    def stable_offset(self) -> Offset:
        """The last stable offset: no transaction is open before it."""
        first_open = self.transactions.first_open()
        return self.next_offset if first_open is None else max(first_open, self.readable_from)

    def is_aborted(self, offset: int) -> bool:
        """Whether the record there was written by a transaction that was aborted."""
        return aborted_at(self._store, offset) is not None

    def locate(self, offset: int) -> Index | None:
        """The log entry of the batch that holds this offset; None if it is trimmed or not there yet."""
        if not self.readable_from <= offset < self.next_offset:
            return None
        batch = find_batch(self._store, offset)
        return None if batch is None else batch.index

    def synced_end(self) -> Offset:
        """The end of the log that snapshots of the store show."""
        if not self._store.dirty:
            return self.next_offset
        with self._store.snapshot() as snapshot:
            return bounds(snapshot)[1]

    def batches(self, offset: Offset) -> Iterator[tuple[BatchRow, bytes]]:
        """From the one that begins there on, synced or not."""
        for key, row in self._store.scan(OFFSETS, offset_key(offset)):
            batch = read_batch(key, row)
            yield batch, self._store.entry(batch.index).payload

    # -- groups: what they have read, and what they have not. On the engine's thread only ------

    def position(self, group: str) -> Position | None:
        known = self.groups.get(group)
        return None if known is None else known.position()

    def positions(self) -> dict[str, Position]:
        """Of every group that has one here."""
        return {name: group.position() for name, group in self.groups.items()}

    def lag(self, group: str) -> Lag:
        """The records that the group has not committed yet. One that is not known here has committed nothing."""
        known = self.groups.get(group)
        offsets = {} if known is None else known.offsets
        start = self.readable_from
        by_lane: dict[int, int] = {}
        unstable = 0
        for lane in range(self.settings.lanes):
            at = max(start, offsets.get(lane, start))
            records = self._records(lane)
            by_lane[lane] = records - self._before(lane, at)[0]
            first_open = self.transactions.first_open(lane)
            if first_open is not None:
                unstable += records - self._before(lane, max(at, first_open))[0]
        return Lag(sum(by_lane.values()), by_lane, unstable)

    def lags(self) -> dict[str, int]:
        """Of every group that has a position here, in records. Costs nothing for groups that did not move."""
        return {name: self.next_offset - records for name, records in self.progress.records()}

    def backlog(self) -> Backlog:
        """The records that the slowest group has not committed yet; all that is retained, if there is no group."""
        if self.jobs is not None:
            counts = self.jobs.counts
            return Backlog(counts.ready + counts.leased + counts.delayed, self.size_bytes)
        records, size_bytes = self.progress.least()
        return Backlog(self.next_offset - records, self.total_bytes - size_bytes)

    @property
    def size_bytes(self) -> int:
        """Of batches that are retained."""
        if self.start_offset == self.next_offset:
            return 0
        batch = find_batch(self._store, self.start_offset)
        return self.total_bytes - (0 if batch is None else batch.bytes_before)

    def lane_ends(self) -> dict[int, Offset]:
        """The end of the last batch of each lane: a reader that is there has nothing to read in that lane."""
        return self._lanes.ends() if self._indexes_lanes else {0: self.next_offset}

    def _done(self, offsets: Mapping[int, Offset]) -> Done:
        start = self.readable_from
        counted = [self._before(lane, max(start, offsets.get(lane, start))) for lane in range(self.settings.lanes)]
        return sum(records for records, _ in counted), sum(size_bytes for _, size_bytes in counted)

    def _records(self, lane: int) -> int:
        return self.next_offset if self.settings.lanes == 1 else self._lanes.totals(lane).records

    def _before(self, lane: int, offset: int) -> Done:
        """Records and bytes of the lane that are before this offset."""
        if self.settings.lanes > 1:
            return self._lanes.before(lane, offset)
        if offset >= self.next_offset:
            return self.next_offset, self.total_bytes
        batch = find_batch(self._store, offset)
        if batch is None:
            raise InvariantBrokenError(f"no batch holds offset {offset}, but the log ends at {self.next_offset}")
        return offset, batch.bytes_before

    # -- where to trim. On the engine's thread only -------------------------------------------

    def retention_command(
        self, now_ms: int, *, retention_ms: int | None = None, retention_bytes: int | None = None
    ) -> bytes | None:
        """The trim that the settings ask for now, to be proposed by the leader; None if there is nothing to trim.

        The arguments are for a partition whose own settings say nothing.
        """
        settings = self.settings
        if self.jobs is not None:  # neither age nor size: a job stays until it is done
            first = self.jobs.first_place(self.next_offset)
            return trim_command(first) if first > self.start_offset else None
        age_ms = retention_ms if settings.retention_ms is None else settings.retention_ms
        most_bytes = retention_bytes if settings.retention_bytes is None else settings.retention_bytes
        if age_ms is None and most_bytes is None and not settings.retention_consumed:
            return None
        point = retention_point(
            self._store,
            now_ms,
            age_ms,
            most_bytes,
            consumed=settings.retention_consumed,
            groups=self.groups.values(),
        )
        point = self._before_open(point)
        return trim_command(point, as_of=self._applied) if point > self.start_offset else None

    def _before_open(self, offset: int) -> Offset:
        """There, or where the first batch is whose transaction is open: nobody who reads what is committed has had the
        chance to read it."""
        first_open = self.transactions.first_open()
        return Offset(offset if first_open is None else min(offset, first_open))

    def guarded_trim(self, before: int) -> bytes:
        """The trim to this offset, or to where a pinned group stands if that is less."""
        before = min(check_offset(before), self.next_offset)
        pinned = [group.offsets for group in self.groups.values() if group.pinned]
        if pinned:
            start = self.readable_from
            held = committed_prefix(self._store, start, self.next_offset, self.settings.lanes, pinned)
            before = min(before, held)
        return trim_command(self._before_open(before), as_of=self._applied)

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
        transaction = transaction_of(header)
        if transaction is not None:
            refused = self.endings.batch_refusal(transaction, header)
            if refused is not None:
                return refused
        base_offset = self.next_offset
        count, lane, size = header.count, header.lane, len(payload)
        if self.jobs is not None:
            if header.control:
                self.jobs.moved(index, base_offset, payload)
                lane = NOT_PLAIN
            elif not self.jobs.append(base_offset, header, payload):
                lane = NOT_PLAIN
            self.jobs.flush()
        timestamp = header.max_timestamp
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        key = offset_key(base_offset)
        row = pack_batch(index, self.total_bytes, self.max_timestamp, timestamp, count, size, lane)
        self._store.put(OFFSETS, key, row)
        if self._indexes_lanes:
            self._lanes.append(lane, base_offset, count, size)
        if header.producer_id:
            self.producers.accept(header, base_offset, index, self.settings)
        if transaction is not None:
            self.transactions.append(transaction, base_offset, count, lane)
        self.next_offset = Offset(base_offset + count)
        self.total_bytes += size
        if self._first_needed is None:
            self._first_needed = index
        if self.watcher is not None:
            self.watcher.append(base_offset, count, payload, lane if self._indexes_lanes else 0)
        return Appended(base_offset, count, False)

    def _execute(self, index: Index, command: Command) -> Answer:
        match command:
            case Trim(to_offset, as_of):
                return self._trim(to_offset, as_of)
            case CommitOffsets():
                pending = self.transactions.pending(command.group, command.generation)
                if pending is not None:
                    return pending
                return self._commit(index, command)
            case DeleteGroup(group):
                self.progress.moved(group)
                return self.groups.delete(group)
            case ForgetGroup():
                self.progress.moved(command.group)
                return self.groups.forget(command)
            case PinGroup(group, pinned):
                self.progress.moved(group)
                return self.groups.pin(group, pinned, index, self.settings)
            case PassTime(now_ms, group_retention_ms):
                return self._pass_time(now_ms, group_retention_ms)
            case ExpireGroups():
                return self._expired(self.groups.expire(command))
            case FenceProducer(producer_id, epoch):
                return self.producers.fence(producer_id, epoch, index, self.settings)
            case Configure(settings):
                return self._configure(settings)
            case LeaseJobs() | SettleJobs() | EndWorkers() | ChangeJobs() | AckAll():
                return self._change_jobs(index, command)
            case StageOffsets() | StageAcks() | EndTransaction():
                return self.endings.change(index, command)

    def _commit(self, index: Index, command: CommitOffsets) -> Committed | RayQueueError:
        self.progress.moved(command.group)
        return self.groups.commit(command, index, self.start_offset, self.next_offset, self.settings)

    def commit_offsets(
        self, index: Index, group: str, generation: int, offsets: Mapping[int, int], metadata: bytes
    ) -> Committed | RayQueueError:
        """For ``endings``: what was staged."""
        return self._commit(index, CommitOffsets(group, generation, offsets, metadata, rewind=False))

    def _change_jobs(self, index: Index, command: JobCommand) -> Answer:
        jobs = self.jobs
        if jobs is None:
            return TopicKindError("this partition is a log, not a work queue")
        answer: Answer
        match command:
            case LeaseJobs():
                answer = jobs.lease(command)
            case SettleJobs():
                answer = jobs.settle(index, command)
            case EndWorkers():
                answer = jobs.end_workers(command)
            case ChangeJobs():
                answer = jobs.change(command)
            case AckAll():
                answer = jobs.ack_all(command)
        jobs.flush()
        return answer

    def _pass_time(self, now_ms: int, group_retention_ms: int) -> TimePassed:
        self.clock.pass_to(now_ms)
        if self.jobs is not None:
            self.jobs.pass_time(now_ms)
            self.jobs.flush()
        if group_retention_ms:
            self._expired(self.groups.expire_unused(group_retention_ms))
        return TimePassed(self.clock.now_ms)

    def _expired(self, groups: tuple[str, ...]) -> Expired:
        for group in groups:
            self.progress.moved(group)
        return Expired(groups)

    def expiry_command(self, now_ms: int, group_retention_ms: int) -> bytes | None:
        """The command that the leader is to propose so that unused positions go; None if there are none."""
        if not self.groups.has_expired(now_ms, group_retention_ms):
            return None
        return pass_time_command(now_ms, group_retention_ms)

    def _configure(self, settings: PartitionSettings) -> Configured | InvalidInputError:
        if settings.version < self.settings.version:
            return Configured()  # from a coordinator that was deposed meanwhile
        lanes = self.settings.lanes
        if self.next_offset and (settings.lanes < lanes or 1 == lanes < settings.lanes):
            return InvalidInputError(
                f"a partition with records cannot go from {lanes} lanes to {settings.lanes}: "
                "the records of a partition with one lane are in no lane index, those of a lane must stay in it",
                key="lanes",
            )
        kind = [name for name in _KIND if getattr(settings, name) != getattr(self.settings, name)]
        if kind and self.next_offset:
            return InvalidInputError(f"a partition with records cannot change {', '.join(kind)}", key=kind[0])
        self.settings = settings
        self._store.put(META, SETTINGS_KEY, settings.encode())
        if kind:
            self.jobs = self._queue()
        elif self.jobs is not None:
            self.jobs.settings = settings
        self.producers.shrink(settings)
        self.progress.forget()
        return Configured()

    # -- trimming -------------------------------------------------------------------------

    def _trim(self, to_offset: int, as_of: int | None) -> Trimmed:
        start = Offset(min(to_offset, self.next_offset))
        if self.jobs is not None:  # whoever chose it may have seen less
            start = Offset(min(start, self.jobs.first_place(self.next_offset)))
        start = self._before_open(start)
        if start > self.start_offset and (as_of is None or as_of >= self.groups.held_at):
            self.start_offset = start
            self._write_log()
            self._lanes.write()
            self._find_first_needed()
            self._sweep()
            self.progress.forget()
        return Trimmed(self.start_offset)

    def _write_log(self) -> None:
        log = LogRow(self.start_offset, self._readable_from, self.next_offset, self.total_bytes, self.max_timestamp)
        self._store.put(META, LOG_KEY, log.encode())

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
        rows = list(islice(store.scan(OFFSETS, self._swept_to, until), SWEEP_ROWS))
        for key, row in rows:
            store.delete(OFFSETS, key)
            if self._indexes_lanes:
                batch = read_batch(key, row)
                self._lanes.delete(batch.lane, batch.base_offset)
        if len(rows) < SWEEP_ROWS:
            self._swept_to, self._sweep_until = until, b""
        else:
            self._swept_to = rows[-1][0]
        self.transactions.sweep(self.readable_from, SWEEP_ROWS)

    # -- checkpoints ------------------------------------------------------------------------

    def checkpoint(self) -> bytes:
        state = _State(
            self.start_offset,
            self.next_offset,
            self.total_bytes,
            self.max_timestamp,
            self.groups.held_at,
            self.settings.encode(),
            self._lanes.dump(),
            self.producers.dump(),
            self.groups.dump(),
            *self.clock.times,
            jobs=b"" if self.jobs is None else dump.dump(self.jobs, self._store),
            transactions=self.transactions.dump(),
        )
        return _encode_checkpoint(state)

    def restore(self, state: bytes) -> None:
        found = _decode_state(state)
        self.clock.restore(Times(found.first_ms, found.now_ms))
        self.settings = PartitionSettings.decode(found.settings)
        self._store.put(META, SETTINGS_KEY, found.settings)
        self._lanes.restore(found.lanes)
        self.producers.restore(found.producers)
        self.groups.restore(found.groups, found.held_at)
        self.transactions.restore(found.transactions)
        # The rows of what was appended before the checkpoint are not here, and neither are the entries.
        end = found.next_offset
        self._use_log(LogRow(found.start_offset, end, end, found.total_bytes, found.max_timestamp))
        self._write_log()
        self._restore_jobs(found.jobs)
        self._applied = self._store.applied
        if self.watcher is not None:
            self.watcher.reset(self.next_offset, self.lane_ends())

    def _restore_jobs(self, dumped: bytes) -> None:
        ahead = dump.write(dumped, self._store) if dumped else {}
        self.jobs = self._queue()
        if self.jobs is not None:
            for lane, runs in ahead.items():
                self.jobs.frontier(lane).keep(runs, self.jobs.frontier(lane).fresh)
            dump.index(self.jobs)
