"""A model of a work queue for tests: every rule as plainly as it can be said, looking through everything each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayqueue.partition import PartitionSettings
from rayqueue.partition.jobs.commands import Held, Request, Settle
from rayqueue.partition.jobs.queue import Grant
from rayqueue.records.checksum import crc32c

Key = tuple[int, int]
"""A transaction: producer id, epoch."""

READY, LEASED, DELAYED, DEAD = "ready", "leased", "delayed", "dead"


@dataclass
class Job:
    id: int
    lane: int
    key: bytes | None
    state: str = READY
    deliveries: int = 0
    forgiven: int = 0
    token: int = 0
    due_ms: int = 0
    expires_ms: int = 0
    want_result: bool = False
    notes: list[str] = field(default_factory=list)
    transaction: Key | None = None
    """The open one that has put it, if it is delayed, or that has staged its acknowledgement, if it is leased."""


@dataclass
class Lease:
    worker: str
    attempt: int
    began_ms: int
    until_ms: int
    ids: list[int]
    done: set[int] = field(default_factory=set)
    back: set[int] = field(default_factory=set)


class Model:
    def __init__(self, settings: PartitionSettings) -> None:
        self.settings = settings
        self.now_ms = 0
        self.jobs: dict[int, Job] = {}
        self.leases: dict[int, Lease] = {}
        self.results: dict[int, tuple[int, str, bytes | None]] = {}
        self.dedupes: dict[str, tuple[int, int]] = {}
        self.next_token = 1
        self.expired = self.dropped = self.deduplicated = 0
        self._served_since: dict[tuple[int, bytes | None], set[bytes | None]] = {}
        """Lane and key that waits, to the keys that were served in that lane since its turn was given."""

    # -- what is there ----------------------------------------------------------------

    def count(self, state: str) -> int:
        return sum(job.state == state for job in self.jobs.values())

    def eligible(self) -> list[Job]:
        """Those that may be given to somebody, in order."""
        ready = [job for job in self.jobs.values() if job.state == READY and not self._is_held(job)]
        return sorted(ready, key=lambda job: (-job.lane, job.id))

    def _is_held(self, job: Job) -> bool:
        if not self.settings.ordered_by_key or job.key is None:
            return False
        same = [each for each in self.jobs.values() if each.key == job.key and each.state != DEAD]
        return min(each.id for each in same) != job.id or any(each.state == LEASED for each in same)

    # -- what happens -----------------------------------------------------------------

    def put(self, job_id: int, lane: int, key: bytes | None, *, transaction: Key | None = None, **options: Any) -> None:
        dedupe_id = options.get("dedupe_id")
        if dedupe_id:
            if dedupe_id in self.dedupes and self.dedupes[dedupe_id][1] > self.now_ms:
                self.deduplicated += 1
                return
            self.dedupes[dedupe_id] = job_id, self.now_ms + self.settings.dedupe_window_ms
        due_ms = max(self.now_ms + options.get("delay_ms", 0), options.get("deliver_at_ms", 0))
        expires_ms = self.now_ms + options["ttl_ms"] if options.get("ttl_ms") else 0
        job = Job(job_id, lane, key, expires_ms=expires_ms, want_result=options.get("want_result", False))
        self.jobs[job_id] = job
        if transaction is None:
            self._wait(job, due_ms)
        else:
            job.state, job.due_ms, job.transaction = DELAYED, due_ms, transaction

    def _wait(self, job: Job, due_ms: int) -> None:
        job.state, job.due_ms = (DELAYED, due_ms) if due_ms > self.now_ms else (READY, 0)

    def pass_time(self, now_ms: int) -> None:
        self.now_ms = max(self.now_ms, now_ms)
        for token in sorted(self.leases, key=lambda token: (self.leases[token].until_ms, token)):
            if self.leases[token].until_ms <= self.now_ms:
                self.end(token, "lease expired")
        for job in list(self.jobs.values()):
            outlived = 0 < job.expires_ms <= self.now_ms
            if outlived and job.state in (READY, DELAYED):
                self._outlive(job)
            elif job.state == DELAYED and job.due_ms <= self.now_ms and job.transaction is None:
                self._wait(job, 0)
        self.results = {job: each for job, each in self.results.items() if each[0] > self.now_ms}
        self.dedupes = {name: each for name, each in self.dedupes.items() if each[1] > self.now_ms}

    def granted(self, request: Request, grant: Grant | None) -> None:
        """What it got is what it should have got."""
        known = [token for token, each in self.leases.items() if _asked(each, request) and each.ids]
        if known:
            assert grant is not None
            assert (grant.token, sorted(_ids(grant))) == (known[-1], sorted(self.leases[known[-1]].ids))
            return
        eligible = self.eligible()
        count = min(request.max_jobs, len(eligible), self.settings.max_leased - self.count(LEASED))
        if count < max(request.least_jobs, 1):
            assert grant is None
            return
        assert grant is not None
        ids = _ids(grant)
        assert len(ids) == len(set(ids)) == count
        if self.settings.fair_by_key:
            best = sorted([job.lane for job in eligible], reverse=True)[:count]
            assert sorted([self.jobs[each].lane for each in ids], reverse=True) == best
            assert set(ids) <= {job.id for job in eligible}
            self._take_turns(eligible, ids)
        else:
            assert ids == [job.id for job in eligible[:count]]
        assert grant.token == self.next_token
        self.next_token += 1
        lease_ms = min(request.lease_ms or self.settings.lease_ms, self.settings.max_lease_ms)
        until_ms = self.now_ms + lease_ms
        self.leases[grant.token] = Lease(request.worker, request.attempt, self.now_ms, until_ms, ids)
        for job, deliveries in zip(map(self.jobs.__getitem__, ids), _deliveries(grant), strict=True):
            job.deliveries += 1
            assert deliveries == job.deliveries
            job.state, job.token = LEASED, grant.token

    def _take_turns(self, eligible: list[Job], ids: list[int]) -> None:
        """Between two jobs of one key every key that waited all the time gets one. Jobs of a key keep their order."""
        waiting = {job.id: job for job in eligible}
        for job_id in ids:
            job = waiting.pop(job_id)
            others = {each.key for each in waiting.values() if each.lane == job.lane}
            same = [each.id for each in waiting.values() if (each.lane, each.key) == (job.lane, job.key)]
            assert not same or job_id < min(same), f"job {job_id} overtakes one of its key"
            for key in others - {job.key}:
                served = self._served_since.setdefault((job.lane, key), set())
                assert job.key not in served, f"{job.key!r} is served twice while {key!r} waits"
                served.add(job.key)
            self._served_since[job.lane, job.key] = set()

    def _loses_turn(self, job: Job) -> None:
        """One of its key waits no more, though nobody has got it; also one that was due in the same moment."""
        if job.state == READY or (job.state == DELAYED and job.due_ms <= self.now_ms):
            self._served_since[job.lane, job.key] = set()

    def settle(self, told: Settle) -> set[int]:
        """Those that it does not reach."""
        ids = [job_id for first, count in told.jobs for job_id in range(first, first + count)]
        lease = self.leases.get(told.token)
        if told.kind == "extend":
            if lease is None or not lease.ids:
                return set(ids)
            asked_ms = self.now_ms + (told.lease_ms or self.settings.lease_ms)
            lease.until_ms = max(lease.until_ms, min(asked_ms, lease.began_ms + self.settings.max_lease_ms))
            return set(ids) - set(lease.ids)
        return {job_id for job_id in ids if not self._settle(told, lease, job_id)}

    def _settle(self, told: Settle, lease: Lease | None, job_id: int) -> bool:
        job = self.jobs.get(job_id)
        if lease is not None and job_id in lease.ids:
            lease.ids.remove(job_id)
            assert job is not None
            if told.kind == "ack":
                lease.done.add(job_id)
                self._finish(job, told.result)
            elif told.kind == "nack":
                self._fail(job, "nack", told.delay_ms)
            elif told.kind == "reject":
                job.notes.append("reject")
                self._die(job)
            else:
                lease.back.add(job_id)
                job.deliveries -= 1
                job.token = 0
                if 0 < job.expires_ms <= self.now_ms:
                    self._outlive(job)
                else:
                    self._wait(job, 0)
            return True
        if told.kind == "release":
            return lease is not None and job_id in lease.back
        if job is None:
            return told.kind == "ack" and lease is not None and job_id in lease.done
        if job.token != told.token or job.state == LEASED or job.token == 0:
            return False
        if told.kind == "ack":
            if lease is not None:
                lease.done.add(job_id)
            self._finish(job, told.result)
        elif told.kind == "reject" and job.state != DEAD:
            job.notes.append("reject")
            self._die(job)
        return True

    def ack_all(self, held: Held) -> bool:
        """Whether all of them are done by these leases, as they were before or from now on; else nothing changes."""
        named = [(token, first + at) for token, jobs in held for first, count in jobs for at in range(count)]
        if not all(self._may_ack(token, job_id) for token, job_id in named):
            return False
        for token, jobs in held:
            assert not self.settle(Settle("", "ack", token, jobs, -1, 0, "", "", None))
        return True

    def _may_ack(self, token: int, job_id: int) -> bool:
        lease, job = self.leases.get(token), self.jobs.get(job_id)
        if job is None:
            return lease is not None and job_id in lease.done
        return job.token == token != 0 and (job.state != LEASED or (lease is not None and job_id in lease.ids))

    # -- transactions -----------------------------------------------------------------

    def stage(self, transaction: Key, token: int, ids: list[int]) -> set[int]:
        """Those that it does not reach."""
        lease, lost = self.leases.get(token), set()
        for job_id in ids:
            job = self.jobs.get(job_id)
            if lease is not None and job_id in lease.ids:
                lease.ids.remove(job_id)
                self.jobs[job_id].transaction = transaction
            elif job is None or job.state != LEASED or job.transaction != transaction:
                lost.add(job_id)
        return lost

    def end_transaction(self, transaction: Key, *, commit: bool) -> None:
        for job in [job for job in self.jobs.values() if job.transaction == transaction]:
            job.transaction = None
            if job.state == LEASED and commit:
                if job.token in self.leases:
                    self.leases[job.token].done.add(job.id)
                self._finish(job, None)
            elif job.state == LEASED:
                self._fail(job, "nack", -1)
            elif commit:
                self._wait(job, job.due_ms)
            else:
                del self.jobs[job.id]

    def _backoff_ms(self, job: Job) -> int:
        first_ms, most_ms = self.settings.retry_backoff_ms, self.settings.retry_backoff_max_ms
        delay_ms: int = min(first_ms * 2 ** (job.deliveries - job.forgiven - 1), most_ms)
        dice = crc32c(job.id.to_bytes(8, "big") + job.deliveries.to_bytes(8, "big"))
        return delay_ms * 3 // 4 + dice % (delay_ms // 2 + 1)

    # -- ends -------------------------------------------------------------------------

    def end(self, token: int, why: str) -> int:
        lease = self.leases[token]
        ids, lease.ids = lease.ids, []
        for job_id in ids:
            self._fail(self.jobs[job_id], why, 0)
        return len(ids)

    def end_worker(self, worker: str) -> int:
        tokens = [token for token, each in self.leases.items() if each.worker == worker]
        return sum(self.end(token, "worker gone") for token in tokens)

    def _fail(self, job: Job, why: str, delay_ms: int) -> None:
        """-1: nobody has said how long it is to wait."""
        job.notes.append(why)
        most = self.settings.max_deliveries
        if most is not None and job.deliveries - job.forgiven >= most:
            self._die(job)
        elif 0 < job.expires_ms <= self.now_ms:
            self._outlive(job)
        else:
            self._wait(job, self.now_ms + (self._backoff_ms(job) if delay_ms < 0 else delay_ms))

    def _outlive(self, job: Job) -> None:
        job.notes.append("time to live")
        self.expired += 1
        self._die(job)

    def _die(self, job: Job) -> None:
        self._loses_turn(job)
        if job.want_result:
            self.results[job.id] = self.now_ms + self.settings.result_ttl_ms, "dead", None
        if self.settings.dead_letter:
            job.state = DEAD
        else:
            self.dropped += 1
            del self.jobs[job.id]

    def _finish(self, job: Job, result: bytes | None) -> None:
        self._loses_turn(job)
        if job.want_result:
            self.results[job.id] = self.now_ms + self.settings.result_ttl_ms, "done", result
        del self.jobs[job.id]

    def change(self, kind: str, ids: list[int]) -> int:
        changed = 0
        for job_id in ids:
            job = self.jobs.get(job_id)
            if job is None or (kind == "cancel") != (job.state in (READY, DELAYED)) or job.state == LEASED:
                continue
            changed += 1
            self._loses_turn(job)
            if kind == "redrive":
                job.notes.append("redriven")
                job.forgiven, job.expires_ms = job.deliveries, 0
                self.results.pop(job_id, None)
                self._wait(job, 0)
            else:
                if kind == "cancel" and job.want_result:
                    self.results[job_id] = self.now_ms + self.settings.result_ttl_ms, "cancelled", None
                del self.jobs[job_id]
        return changed


def _asked(lease: Lease, request: Request) -> bool:
    return (lease.worker, lease.attempt) == (request.worker, request.attempt)


def _ids(grant: Grant) -> list[int]:
    return [job_id for part in grant.parts for job_id in range(part.first, part.first + part.count)]


def _deliveries(grant: Grant) -> list[int]:
    return [part.deliveries for part in grant.parts for _ in range(part.count)]
