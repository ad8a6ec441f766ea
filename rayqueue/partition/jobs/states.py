"""The states of single jobs, and the ways between them.

``JobStates`` owns everything that a queue keeps, and moves one job at a time; the
commands, which are about many, are in ``queue``, whose text says how it fits
together. Each way is told where the job is: in no lease any more, taken out of
where it waited, or new. Who calls it has seen to that.
"""

from __future__ import annotations

from rayqueue.errors import InvariantBrokenError
from rayqueue.log.store import LogStore
from rayqueue.partition.clock import Clock
from rayqueue.partition.jobs.commands import Settle
from rayqueue.partition.jobs.facts import MAX_REASON, Dedupes, Result, Results, digest, load_counts, save_counts
from rayqueue.partition.jobs.frontier import Frontier, lanes_back
from rayqueue.partition.jobs.index import Dead, FairReady, FifoReady, Keys, Places, Timer, Times
from rayqueue.partition.jobs.leases import Leases
from rayqueue.partition.jobs.rows import KIND_TEXTS, JobRow, JobRows, Kind, Note, State
from rayqueue.partition.settings import PartitionSettings
from rayqueue.protocol.jobs import JobOptions
from rayqueue.records.checksum import crc32c

NO_KEY = digest(b"\0")
"""Jobs without a key: in no order among each other."""
OUTLIVED = 1
"""In place of the end of a time to live that came while the job was leased."""

PENDING_MS = 2**62
"""Added to the time from which a job may be given to somebody, while its transaction is open: that never comes."""


def id_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class JobStates:
    def __init__(self, store: LogStore, clock: Clock, settings: PartitionSettings) -> None:
        self.settings = settings
        self.counts = load_counts(store)
        self.leases = Leases(store)
        self.rows = JobRows(store)
        self.times = Times(store)
        self.places = Places(store)
        self.dead = Dead(store)
        self.ready: FifoReady | FairReady = FairReady(store) if settings.fair_by_key else FifoReady(store)
        self.results = Results(store, self.times, self.counts)
        self.dedupes = Dedupes(store, self.times)
        self.frontiers: dict[int, Frontier] = {}
        self._keys = Keys(store)
        self._store = store
        self._clock = clock
        self._finished: set[int] = set()
        self.load()

    def load(self) -> None:
        """Begin with what the tables say."""
        self.leases.load()
        self.results.load()
        if isinstance(self.ready, FairReady):
            self.ready.next_turn = self.counts.next_turn
        for lane, (start, count) in self.counts.frontiers.items():
            self.frontier(lane).load(start, count)
        for lane in lanes_back(self._store):
            self.frontier(lane).load_back()

    @property
    def available(self) -> int:
        """Jobs that a worker would get now."""
        return self.counts.ready - self.counts.held

    @property
    def keyed(self) -> bool:
        return self.settings.ordered_by_key or self.settings.fair_by_key

    def frontier(self, lane: int) -> Frontier:
        known = self.frontiers.get(lane)
        if known is None:
            known = self.frontiers[lane] = Frontier(self._store, lane)
        return known

    def take_finished(self) -> set[int]:
        """Jobs whose results have come since the last call. No part of the state."""
        finished, self._finished = self._finished, set()
        return finished

    def next_event_ms(self) -> int | None:
        """When something is due."""
        found = [each for each in (self.leases.next_deadline_ms(), self.times.next_ms()) if each is not None]
        return min(found, default=None)

    def first_place(self, end: int) -> int:
        """The first offset that is still needed."""
        found = [end]
        found += [front.start for front in self.frontiers.values() if front.count]
        found += [first for lease in self.leases.holding() for first, _, _ in lease.runs]
        place = self.places.first()
        if place is not None:
            found.append(place)
        return min(found)

    def flush(self) -> None:
        """At the end of each entry."""
        self.rows.flush()
        counts = self.counts
        if isinstance(self.ready, FairReady):
            counts.next_turn = self.ready.next_turn
        counts.frontiers = {
            lane: (front.fresh_start, front.fresh) for lane, front in sorted(self.frontiers.items()) if front.fresh
        }
        save_counts(self._store, counts)

    # -- from one state to another ------------------------------------------------------

    def _put(self, job_id: int, lane: int, key: bytes | None, options: JobOptions, *, pending: bool = False) -> None:
        now_ms = self._clock.now_ms
        if options.dedupe_id:
            if self.dedupes.first(options.dedupe_id, now_ms) is not None:
                self.counts.deduplicated += 1
                return
            self.dedupes.add(options.dedupe_id, job_id, now_ms + self.settings.dedupe_window_ms)
        due_ms = max(now_ms + options.delay_ms, options.deliver_at_ms) + (PENDING_MS if pending else 0)
        expires_ms = now_ms + options.ttl_ms if options.ttl_ms else 0
        hashed = b"" if not self.keyed else digest(b"\0" if key is None else b"k" + key)
        row = JobRow(
            job_id,
            job_id,
            State.READY,
            lane,
            0,
            expires_ms=expires_ms,
            key=hashed,
            want_result=options.want_result,
        )
        self.places.add(row)
        if expires_ms:
            self.times.add(expires_ms, Timer.TTL, id_key(job_id))
        if self._ordered(row):
            self._keys.add(row)
        self._wait_or_ready(row, due_ms, now_ms)

    def _ordered(self, row: JobRow) -> bool:
        return self.settings.ordered_by_key and row.key != NO_KEY

    def _wait_or_ready(self, row: JobRow, due_ms: int, now_ms: int) -> None:
        if due_ms > now_ms:
            row.state, row.due_ms = State.DELAYED, due_ms
            self.counts.delayed += 1
            self.times.add(due_ms, Timer.DUE, id_key(row.id))
            self.rows.put(row)
        else:
            self._make_ready(row)

    def _make_ready(self, row: JobRow) -> None:
        row.state, row.due_ms = State.READY, 0
        self.counts.ready += 1
        self.rows.put(row)
        if self._ordered(row):
            row.held = True
            self.counts.held += 1
            self._release(row.key)
        else:
            self.ready.add(row)

    def _release(self, key: bytes) -> None:
        """Let the first job of the key be given to somebody, if it is ready and none of them is leased."""
        if self._keys.is_leased(key):
            return
        for job_id in self._keys.first(key):
            head = self._row(job_id)
            if head.state == State.READY and head.held:
                head.held = False
                self.counts.held -= 1
                self.ready.add(head)
                self.rows.put(head)

    def index_key(self, row: JobRow) -> None:
        """Into the order of its key, where the queue has one."""
        if self._ordered(row):
            self._keys.add(row)
            if row.state == State.LEASED:
                self._keys.lease(row)

    def _row(self, job_id: int) -> JobRow:
        row = self.rows.get(job_id)
        if row is None:
            raise InvariantBrokenError(f"an index names job {job_id}, which has no row")
        return row

    def _new_row(self, job_id: int, lane: int, token: int) -> JobRow:
        """Of a job that was delivered for the first time."""
        row = JobRow(job_id, job_id, State.LEASED, lane, 1, token)
        self.places.add(row)
        return row

    def _end_key(self, row: JobRow) -> None:
        if self._ordered(row):
            self._keys.end_lease(row)

    def _backoff_ms(self, row: JobRow) -> int:
        """Twice as long each time, and up to a quarter more or less: the same on every replica."""
        settings = self.settings
        tries = min(row.deliveries - row.forgiven - 1, 40)
        delay_ms = min(settings.retry_backoff_ms << tries, settings.retry_backoff_max_ms)
        dice = crc32c(id_key(row.id) + id_key(row.deliveries))
        return delay_ms * 3 // 4 + dice % (delay_ms // 2 + 1)

    def _retry(self, row: JobRow, note: Note, delay_ms: int, told: Settle | None = None) -> None:
        """The delivery has failed."""
        row.note(note)
        now_ms, most = self._clock.now_ms, self.settings.max_deliveries
        if most is not None and row.deliveries - row.forgiven >= most:
            self._die(row, "" if told is None else told.reason, "" if told is None else told.traceback)
        elif 0 < row.expires_ms <= now_ms:
            self._outlived(row, now_ms)
        else:
            self._wait_or_ready(row, now_ms + delay_ms, now_ms)
            if self._ordered(row):
                self._release(row.key)  # it may not be the first of its key: an earlier one was redriven

    def _leave(self, row: JobRow) -> None:
        """Take a job out of where it waits, or lies."""
        counts = self.counts
        if row.state == State.READY:
            counts.ready -= 1
            if row.held:
                row.held = False
                counts.held -= 1
            else:
                self.ready.remove(row)
        elif row.state == State.DELAYED:
            counts.delayed -= 1
            self.times.remove(row.due_ms, Timer.DUE, id_key(row.id))
        elif row.state == State.DEAD:
            counts.dead -= 1
            self.dead.remove(row)

    def _finish(self, row: JobRow, result: bytes | None) -> None:
        if row.want_result:
            self._tell(row, "done", result)
        self._forget(row)

    def _tell(self, row: JobRow, state: str, value: bytes | None = None, reason: str = "", traceback: str = "") -> None:
        until_ms = self._clock.now_ms + self.settings.result_ttl_ms
        result = Result(until_ms, state, value, reason[:MAX_REASON], traceback[:MAX_REASON])
        self.results.add(row.id, result, self.settings.max_results_bytes)
        self._finished.add(row.id)

    def _forget(self, row: JobRow) -> None:
        """It is done, dropped or purged, and in no order but those of all rows."""
        self._leave_key(row)
        self.places.remove(row)
        if self.rows.get(row.id) is not None:
            self.rows.remove(row.id)

    def _leave_key(self, row: JobRow) -> None:
        """Also the end of its time to live."""
        if row.expires_ms > OUTLIVED and row.state != State.DEAD:
            self.times.remove(row.expires_ms, Timer.TTL, id_key(row.id))
        if self._ordered(row) and row.state != State.DEAD:
            self._keys.remove(row)
            self._release(row.key)

    def _die(self, row: JobRow, reason: str, traceback: str) -> None:
        """It is in no order any more but those of all rows."""
        self._leave_key(row)
        if row.want_result:
            kind = row.notes[-1].kind if row.notes else Kind.NACK
            self._tell(row, "dead", None, reason or KIND_TEXTS[Kind(kind)], traceback)
        if self.settings.dead_letter:
            row.state, row.due_ms = State.DEAD, self._clock.now_ms
            self.counts.dead += 1
            self.dead.add(row)
            self.rows.put(row)
        else:
            self.counts.dropped += 1
            row.state = State.DEAD
            self._forget(row)

    def _outlived(self, row: JobRow, now_ms: int) -> None:
        self.counts.expired += 1
        row.note(Note(now_ms, Kind.TTL, ""))
        self._die(row, "", "")
