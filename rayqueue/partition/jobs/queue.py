"""The state of a work queue's partition: which jobs are ready, leased, delayed or dead.

The theory: below a lane's frontier (``frontier``) every job is done unless a
lease (``leases``) or a row (``rows``) says otherwise; above it, every job of a
plain batch is ready, and so are runs that were handed back. A job gets a row when
it becomes something else: delayed, failed, dead, or when its batch says something
of it. With its last row or lease goes all that is known of it.

A job is in one state at a time:

    put ──> ready ──> leased ──> (done)
      └> delayed ─^ ^───┤ └────> dead ──> ready (redriven), (purged)
            ^───────────┘

``Partition`` calls this for entries about jobs, and for batches. Nothing here
reads a batch that was appended earlier: a replica that began with a checkpoint has
not got it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rayqueue.errors import InvalidInputError
from rayqueue.partition.jobs import runs
from rayqueue.partition.jobs.commands import (
    AckAll,
    ChangeJobs,
    EndWorkers,
    Held,
    LeaseJobs,
    Request,
    Settle,
    SettleJobs,
)
from rayqueue.partition.jobs.index import Timer
from rayqueue.partition.jobs.leases import REMEMBERED_RUNS, Lease
from rayqueue.partition.jobs.rows import JobRow, Kind, Note, State
from rayqueue.partition.jobs.runs import Part
from rayqueue.partition.jobs.states import OUTLIVED, JobStates, id_key
from rayqueue.protocol.jobs import JOB_HEADER, AckedAll, JobOptions, Settled, decode_options
from rayqueue.records import BatchHeader, RecordBatch
from rayqueue.records.header import HAS_HEADERS, Compression
from rayqueue.records.record import Headers

EVENTS_PER_ENTRY = 1000
"""Leases that end, and jobs that are due, when one entry is applied: a bound, so that no entry holds up the others."""
MOVED_HEADER = "rayqueue-moved"
"""In a batch that the leader has appended again: which job a record is, and what is told of it."""

_MARK = JOB_HEADER.encode()
_NO_OPTIONS = JobOptions()


class Grant(NamedTuple):
    """A lease that was given."""

    token: int
    until_ms: int
    parts: list[Part]


def part_of(row: JobRow) -> Part:
    return Part(row.id, 1, row.place, row.deliveries, row.lane, row.want_result, row.forgiven)


class Text(msgspec.Struct, frozen=True, array_like=True):
    """The reason and traceback of one note, on the way to another entry."""

    index: int
    at: int
    nth: int
    reason: str
    traceback: str


class Moved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The value of ``MOVED_HEADER``."""

    id: int
    place: int
    """Where it was."""
    token: int
    """Of its lease, if it has one and no row. 0, without a row: it waits ahead of its lane's frontier."""
    texts: tuple[Text, ...] = ()


decode_moved = msgspec.msgpack.Decoder(Moved).decode


class JobQueue(JobStates):
    """The commands of a queue, applied."""

    # -- putting ----------------------------------------------------------------------

    def append(self, base_offset: int, header: BatchHeader, payload: bytes) -> bool:
        """A batch was appended there. True if it is plain: nothing is said of any of its jobs."""
        pending = header.transactional
        if not self.keyed and not pending and not _may_have_options(header, payload):
            self.frontier(header.lane).append(base_offset, header.count)
            self.counts.ready += header.count
            return True
        batch = RecordBatch.decode(payload)
        all_headers = batch.headers()
        options = [_options_of(headers) for headers in all_headers]
        if not self.keyed and not pending and all(each is None for each in options):
            self.frontier(header.lane).append(base_offset, header.count)
            self.counts.ready += header.count
            return True
        keys = batch.keys() if self.keyed else [None] * header.count
        for job_id, (key, wanted) in enumerate(zip(keys, options, strict=True), base_offset):
            self._put(job_id, header.lane, key, _NO_OPTIONS if wanted is None else wanted, pending=pending)
        return False

    # -- leasing ----------------------------------------------------------------------

    def lease(self, command: LeaseJobs) -> tuple[Grant | None, ...]:
        self.pass_time(command.now_ms)
        return tuple([self._lease(request) for request in command.requests])

    def _lease(self, request: Request) -> Grant | None:
        known = self.leases.of_attempt(request.worker, request.attempt)
        if known is not None:
            return self._grant_again(known)
        settings, counts, now_ms = self.settings, self.counts, self._clock.now_ms
        wanted = min(request.max_jobs, self.available, settings.max_leased - counts.leased)
        if wanted < max(request.least_jobs, 1):
            return None
        gathered = self._gather(wanted, now_ms)
        found = sum([each if isinstance(each, int) else 1 for _, each, _ in gathered])
        if found < request.least_jobs:
            self._give_back(gathered)
            return None
        token = counts.next_token
        counts.next_token += 1
        lease_ms = min(request.lease_ms or settings.lease_ms, settings.max_lease_ms)
        lease = Lease(token, request.worker, request.attempt, now_ms, now_ms + lease_ms, [], {}, [])
        parts: list[Part] = []
        self._pass_cancelled()
        for first, each, lane in gathered:
            if isinstance(each, int):
                lease.runs.append((first, each, lane))
                parts.append(Part(first, each, first, 1, lane, False))
            else:
                lease.ids[first] = each.place
                parts.append(self._hand_out(each, token))
        counts.leased += found
        counts.ready -= found
        self.leases.add(lease)
        return Grant(token, lease.until_ms, parts)

    def _gather(self, wanted: int, now_ms: int) -> list[tuple[int, int | JobRow, int]]:
        """The next jobs, taken from where they wait: first id, how many or the row, lane."""
        gathered: list[tuple[int, int | JobRow, int]] = []
        for lane in range(self.settings.lanes - 1, -1, -1):
            front = self.frontiers.get(lane)
            while wanted:
                head = self.ready.first(lane)
                start = front.first() if front is not None else None
                if front is not None and start is not None and (head is None or start < head):
                    first, count = front.take(wanted, 2**63 if head is None else head)
                    wanted -= self._add_run(gathered, first, count, lane)
                elif head is not None:
                    row = self._row(head)
                    self.ready.remove(row)
                    if 0 < row.expires_ms <= now_ms:
                        self.counts.ready -= 1
                        self._outlived(row, now_ms)
                        continue
                    gathered.append((head, row, lane))
                    wanted -= 1
                else:
                    break
        return gathered

    def _add_run(self, gathered: list[tuple[int, int | JobRow, int]], first: int, count: int, lane: int) -> int:
        """How many of them there are: those that were cancelled are passed over."""
        if self.counts.cancelled:
            pieces: list[tuple[int, int]] = []
            for job_id in range(first, first + count):
                if self.rows.get(job_id) is None:
                    runs.add(pieces, job_id, 1)
                else:
                    self.rows.remove(job_id)
                    self.counts.cancelled -= 1
        else:
            pieces = [(first, count)]
        for start, length in pieces:
            last = gathered[-1] if gathered else None
            if last is not None and isinstance(last[1], int) and last[2] == lane and last[0] + last[1] == start:
                gathered[-1] = (last[0], last[1] + length, lane)
            else:
                gathered.append((start, length, lane))
        return sum([length for _, length in pieces])

    def _give_back(self, gathered: list[tuple[int, int | JobRow, int]]) -> None:
        for first, each, lane in reversed(gathered):
            if isinstance(each, int):
                self.frontier(lane).put_back(first, each)
            else:
                self.ready.add(each)

    def _hand_out(self, row: JobRow, token: int) -> Part:
        row.deliveries += 1
        row.state, row.token = State.LEASED, token
        if self._ordered(row):
            self._keys.lease(row)
        self.rows.put(row)
        return part_of(row)

    def _grant_again(self, lease: Lease) -> Grant:
        """What a worker that has lost the answer is told."""
        parts = [Part(first, count, first, 1, lane, False) for first, count, lane in lease.runs]
        parts += map(part_of, map(self._row, lease.ids))
        return Grant(lease.token, lease.until_ms, parts)

    # -- settling ---------------------------------------------------------------------

    def settle(self, index: int, command: SettleJobs) -> tuple[Settled, ...]:
        self.pass_time(command.now_ms)
        return tuple([self._settle(index, at, each) for at, each in enumerate(command.settles)])

    def _settle(self, index: int, at: int, told: Settle) -> Settled:
        lease = self.leases.get(told.token)
        if told.kind == "extend":
            return self._extend(lease, told)
        note = Note(self._clock.now_ms, Kind.NACK, told.worker, index if told.reason or told.traceback else 0, at)
        lost: list[tuple[int, int]] = []
        for first, count in told.jobs:
            taken = runs.subtract(lease.runs, first, count) if lease is not None and lease.runs else []
            for start, length, lane in taken:
                self.counts.leased -= length
                _remember(lease, told, start, length)
                if told.kind == "release":
                    self.frontier(lane).put_back(start, length)
                    self.counts.ready += length
                elif told.kind != "ack":
                    for job_id in range(start, start + length):
                        self._settle_row(self._new_row(job_id, lane, told.token), told, note)
            for start, length in runs.without(first, count, taken):
                for job_id in range(start, start + length):
                    if not self._settle_other(lease, job_id, told, note):
                        runs.add(lost, job_id, 1)
        if lease is not None:
            self.leases.changed(lease)
        return Settled(tuple(lost))

    def _extend(self, lease: Lease | None, told: Settle) -> Settled:
        if lease is None or not lease.held:
            return Settled(told.jobs)
        settings, now_ms = self.settings, self._clock.now_ms
        until_ms = min(now_ms + (told.lease_ms or settings.lease_ms), lease.began_ms + settings.max_lease_ms)
        if until_ms > lease.until_ms:
            lease.until_ms = until_ms
            self.leases.extended(lease)
        lost: list[tuple[int, int]] = []
        for first, count in told.jobs:
            for job_id in range(first, first + count):
                held = job_id in lease.ids or any(start <= job_id < start + length for start, length, _ in lease.runs)
                if not held:
                    runs.add(lost, job_id, 1)
        return Settled(tuple(lost), lease.until_ms - now_ms)

    def _settle_other(self, lease: Lease | None, job_id: int, told: Settle, note: Note) -> bool:
        """A job that is not held by the lease as one without a row. False if the lease is lost."""
        row = self.rows.get(job_id)
        if lease is not None and lease.ids.pop(job_id, None) is not None:
            self.counts.leased -= 1
            _remember(lease, told, job_id, 1)
            self._settle_row(self._row(job_id), told, note)
            return True
        if told.kind == "release":
            return lease is not None and runs.holds(lease.back, job_id)
        if row is None:
            return told.kind == "ack" and lease is not None and runs.holds(lease.done, job_id)
        if not told.token or row.token != told.token or row.state in (State.LEASED, State.CANCELLED):
            return False
        # The lease has ended, and nobody has got the job since.
        if told.kind == "ack":
            self._leave(row)
            _remember(lease, told, job_id, 1)
            self._finish(row, told.result)
        elif told.kind == "reject" and row.state != State.DEAD:
            self._leave(row)
            row.note(msgspec.structs.replace(note, kind=Kind.REJECT))
            self._die(row, told.reason, told.traceback)
        return True

    def _settle_row(self, row: JobRow, told: Settle, note: Note) -> None:
        """The job's lease ends. It is counted as leased no more, and is in no lease."""
        self._end_key(row)
        match told.kind:
            case "ack":
                self._finish(row, told.result)
            case "nack":
                delay_ms = self._backoff_ms(row) if told.delay_ms < 0 else told.delay_ms
                self._retry(row, note, delay_ms, told)
            case "reject":
                row.note(msgspec.structs.replace(note, kind=Kind.REJECT))
                self._die(row, told.reason, told.traceback)
            case _:  # release: the token is good for nothing any more
                row.deliveries -= 1
                row.token = 0
                if 0 < row.expires_ms <= self._clock.now_ms:
                    self._outlived(row, self._clock.now_ms)
                else:
                    self._make_ready(row)

    def ack_all(self, command: AckAll) -> tuple[AckedAll, ...]:
        self.pass_time(command.now_ms)
        return tuple([self._ack_all(each) for each in command.acks])

    def _ack_all(self, held: Held) -> AckedAll:
        """First it is seen whether it reaches all of them."""
        forgotten = False
        for token, jobs in held:
            lease = self.leases.get(token)
            left = [] if lease is None else list(lease.runs)
            for first, count in jobs:
                for start, length in runs.without(first, count, runs.subtract(left, first, count)):
                    for job_id in range(start, start + length):
                        if self._is_forgotten(token, lease, job_id):
                            forgotten = True
                        elif not self._acks(token, lease, job_id):
                            return AckedAll(done=False)
        if forgotten:
            return AckedAll(done=False, forgotten=True)
        for token, jobs in held:
            self._settle(0, 0, Settle("", "ack", token, jobs, -1, 0, "", "", None))
        return AckedAll(done=True)

    def _acks(self, token: int, lease: Lease | None, job_id: int) -> bool:
        """Whether an acknowledgement by this lease reaches a job that it does not hold as one without a row."""
        if lease is not None and job_id in lease.ids:
            return True
        row = self.rows.get(job_id)
        if row is None:
            return lease is not None and runs.holds(lease.done, job_id)
        return bool(token) and row.token == token and row.state not in (State.LEASED, State.CANCELLED)

    def _is_forgotten(self, token: int, lease: Lease | None, job_id: int) -> bool:
        """Whether this lease may have acknowledged it, so long ago that nobody knows."""
        if self.rows.get(job_id) is not None:
            return False
        if lease is None:
            return 0 < token < self.counts.next_token
        done = lease.done
        return not lease.held and len(done) >= REMEMBERED_RUNS and job_id < done[0][0]

    # -- time ---------------------------------------------------------------------------

    def pass_time(self, now_ms: int) -> None:
        """The leader's clock is there. What is due by then happens, a bounded part of it."""
        self._clock.pass_to(now_ms)
        now_ms = self._clock.now_ms
        for _ in range(EVENTS_PER_ENTRY):
            lease = self.leases.pop_expired(now_ms)
            if lease is None:
                break
            self._end(lease, Kind.EXPIRED)
        for time_ms, timer, what in self.times.due(now_ms, EVENTS_PER_ENTRY):
            self.times.remove(time_ms, timer, what)
            if timer is Timer.RESULT:
                self.results.remove(what, time_ms)
            elif timer is Timer.DEDUPE:
                self.dedupes.remove(what)
            else:
                self._due(int.from_bytes(what, "big"), time_ms, timer)

    def _due(self, job_id: int, time_ms: int, timer: Timer) -> None:
        """Unless what was due before has changed it."""
        row = self.rows.get(job_id)
        if row is None or row.state == State.DEAD:
            return
        if timer is Timer.DUE:
            if row.state == State.DELAYED and row.due_ms == time_ms:
                self.counts.delayed -= 1
                self._make_ready(row)
        elif row.state == State.LEASED:
            row.expires_ms = OUTLIVED
            self.rows.put(row)
        else:
            self._leave(row)
            self._outlived(row, self._clock.now_ms)

    def _end(self, lease: Lease, kind: Kind) -> int:
        """The lease ends as a whole. How many jobs it had."""
        note = Note(self._clock.now_ms, kind, lease.worker)
        held, given, ids = lease.held, lease.runs, lease.ids
        lease.runs, lease.ids = [], {}
        self.counts.leased -= held
        self.leases.changed(lease)
        rows = [
            self._new_row(job, lane, lease.token) for first, count, lane in given for job in range(first, first + count)
        ]
        for row in [*rows, *map(self._row, ids)]:
            self._end_key(row)
            self._retry(row, note, 0)
        return held

    def end_workers(self, command: EndWorkers) -> tuple[int, ...]:
        self.pass_time(command.now_ms)
        return tuple(
            [
                sum([self._end(lease, Kind.WORKER_GONE) for lease in self.leases.of_worker(worker)])
                for worker in command.workers
            ]
        )

    # -- dead letters, and others ---------------------------------------------------------

    def change(self, command: ChangeJobs) -> int:
        self.pass_time(command.now_ms)
        changed = 0
        for job_id in command.ids:
            if command.kind == "cancel":
                changed += self._cancel(job_id)
                continue
            row = self.rows.get(job_id)
            if row is None or row.state != State.DEAD:
                continue
            changed += 1
            self._leave(row)
            if command.kind == "purge":
                self._forget(row)
            else:
                self._redrive(row)
        return changed

    def _redrive(self, row: JobRow) -> None:
        row.note(Note(self._clock.now_ms, Kind.REDRIVEN, ""))
        row.forgiven, row.expires_ms, row.state = row.deliveries, 0, State.READY
        if row.want_result:
            self.results.remove(id_key(row.id))
        if self._ordered(row):
            self._keys.add(row)
            first, *others = self._keys.first(row.key, 2)
            for job_id in others if first == row.id else ():
                second = self._row(job_id)
                if second.state == State.READY and not second.held:
                    self.ready.remove(second)
                    second.held = True
                    self.counts.held += 1
                    self.rows.put(second)
        self._make_ready(row)

    def _cancel(self, job_id: int) -> bool:
        row = self.rows.get(job_id)
        if row is not None:
            if row.state not in (State.READY, State.DELAYED):
                return False
            self._leave(row)
            if row.want_result:
                self._tell(row, "cancelled")
            self._forget(row)
            return True
        lane = next((lane for lane, front in self.frontiers.items() if front.count and front.has(job_id)), None)
        if lane is None:
            return False
        self.rows.put(JobRow(job_id, job_id, State.CANCELLED, lane, 0))
        self.counts.cancelled += 1
        self.counts.ready -= 1
        self._pass_cancelled()
        return True

    def _pass_cancelled(self) -> None:
        """The first job ahead of a frontier is one that somebody will get: one that was cancelled is not waited for."""
        for front in self.frontiers.values() if self.counts.cancelled else ():
            while front.count and (start := front.first()) is not None and self.rows.get(start) is not None:
                front.take(1, start + 1)
                self.rows.remove(start)
                self.counts.cancelled -= 1

    # -- moving -----------------------------------------------------------------------------

    def moved(self, index: int, base_offset: int, payload: bytes) -> None:
        """The leader has appended jobs again. Those that are still where it saw them are here from now on."""
        for at, headers in enumerate(RecordBatch.decode(payload).headers()):
            told = next((value for name, value in headers if name == MOVED_HEADER), None)
            if told is not None:
                self._move(index, at, base_offset + at, decode_moved(told))

    def _move(self, index: int, at: int, place: int, told: Moved) -> None:
        row = self.rows.get(told.id)
        if row is None and not told.token:
            lane = self._taken_ahead(told.id)
            if lane is None:
                return
            row = JobRow(told.id, told.id, State.READY, lane, 0)
            self.places.add(row)
            self.ready.add(row)
        elif row is None:
            lease = self.leases.get(told.token)
            taken = runs.subtract(lease.runs, told.id, 1) if lease is not None else []
            if lease is None or not taken:
                return
            row = self._new_row(told.id, taken[0][2], told.token)
            lease.ids[told.id] = place
            self.leases.changed(lease)
        elif row.place != told.place or row.state == State.CANCELLED:
            return
        numbers = {(text.index, text.at, text.nth): nth for nth, text in enumerate(told.texts)}
        if any(note.index and (note.index, note.at, note.nth) not in numbers for note in row.notes):
            self.rows.put(row)
            return  # it has failed once more meanwhile; what was told of that would be trimmed
        self.places.remove(row)
        row.place = place
        row.notes = tuple(
            [
                msgspec.structs.replace(note, index=index, at=at, nth=numbers[note.index, note.at, note.nth])
                if note.index
                else note
                for note in row.notes
            ]
        )
        self.places.add(row)
        self.rows.put(row)

    def _taken_ahead(self, job_id: int) -> int | None:
        """Take the job out of what is ahead of its lane's frontier, if it is the first one there. The lane."""
        for lane, front in self.frontiers.items():
            if front.count and front.first() == job_id:
                front.take(1, job_id + 1)
                self._pass_cancelled()
                return lane
        return None


def _remember(lease: Lease | None, told: Settle, first: int, count: int) -> None:
    """A settlement that is repeated is told the same."""
    if lease is not None and told.kind in ("ack", "release"):
        runs.add(lease.done if told.kind == "ack" else lease.back, first, count)


def _may_have_options(header: BatchHeader, payload: bytes) -> bool:
    if not header.flags & HAS_HEADERS:
        return False
    return header.compression != Compression.NONE or _MARK in payload


def check_options(header: BatchHeader, payload: bytes) -> None:
    """``InvalidInputError`` if a batch that is about to be put says of a job what cannot be read, or done."""
    if _may_have_options(header, payload):
        for headers in RecordBatch.decode(payload).headers():
            for name, value in headers:
                if name == JOB_HEADER:
                    options = decode_options(value)
                    if header.transactional and (options.ttl_ms or options.dedupe_id):
                        raise InvalidInputError(
                            "a job that is put in a transaction has no ttl_ms and no dedupe_id: it is there once, from "
                            "when the transaction is committed"
                        )


def _options_of(headers: Headers) -> JobOptions | None:
    for name, value in headers:
        if name == JOB_HEADER:
            try:
                return decode_options(value)
            except InvalidInputError:
                return None  # admission refuses these
    return None
