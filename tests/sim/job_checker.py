"""The jobs of a work queue as its committed log has them: a model beside the machine; both must agree all the time.

``JobLog`` is told of every entry and of its answer. It knows besides what a model
does not: who was granted what, and which acknowledgements counted.
"""

from __future__ import annotations

from typing import Any

from rayqueue.log.store import Entry
from rayqueue.partition import Appended, Ended, Trimmed
from rayqueue.partition.commands import PassTime, decode
from rayqueue.partition.jobs.commands import AckAll, ChangeJobs, EndWorkers, LeaseJobs, SettleJobs
from rayqueue.partition.tables import RESULTS
from rayqueue.partition.transactions.commands import EndTransaction, StageAcks
from rayqueue.partition.transactions.endings import transaction_of
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, Settled, decode_options
from rayqueue.records import BATCH_TAG, RecordBatch
from tests.sim.checker import ReadChecker
from tests.sim.invariants import BrokenError, Invariant
from tests.unit.partition.jobs_model import DEAD, Model


class JobLog:
    """Of one queue. ``reads`` has the machine that applies the log."""

    def __init__(self, reads: ReadChecker) -> None:
        self._reads = reads
        self.model = Model(reads.machine.settings)
        self.granted: dict[int, dict[int, int]] = {}
        """Token to the jobs of the lease, and how often each was delivered by then."""
        self.acked: set[tuple[int, int]] = set()
        """Token and job."""
        self.values: dict[int, bytes] = {}
        self.never: set[int] = set()
        """Jobs that were not put, because one with their ``dedupe_id`` was there."""
        self.changed: dict[str, set[int]] = {"cancel": set(), "purge": set(), "redrive": set()}
        self.moved = 0

    def applied(self, entry: Entry, answer: Any) -> None:
        """``BrokenError`` if it was not as the model has it."""
        try:
            if entry.payload[0] == BATCH_TAG:
                self._put(entry.payload, answer)
            else:
                self._change(entry.payload, answer)
        except AssertionError as error:
            raise BrokenError(Invariant.JOB_STATE, f"entry {entry.index}: {error}") from error
        self._compare(entry)

    def _put(self, payload: bytes, answer: Any) -> None:
        if not isinstance(answer, Appended) or answer.duplicate:
            return
        batch = RecordBatch.decode(payload)
        if batch.header.control:
            self.moved += 1
            return
        for job_id, (key, value, headers) in enumerate(
            zip(batch.keys(), batch.values(), batch.headers(), strict=True), answer.base_offset
        ):
            told = dict(headers).get(JOB_HEADER)
            options = JobOptions() if told is None else decode_options(told)
            self.values[job_id] = value or b""
            self.model.put(
                job_id,
                batch.header.lane,
                key,
                transaction=transaction_of(batch.header),
                delay_ms=options.delay_ms,
                deliver_at_ms=options.deliver_at_ms,
                ttl_ms=options.ttl_ms,
                dedupe_id=options.dedupe_id,
                want_result=options.want_result,
            )
            if job_id not in self.model.jobs:
                self.never.add(job_id)

    def _change(self, payload: bytes, answer: Any) -> None:
        model, command = self.model, decode(payload)
        if isinstance(command, (PassTime, LeaseJobs, SettleJobs, EndWorkers, ChangeJobs, AckAll)):
            model.pass_time(command.now_ms)
        match command:
            case LeaseJobs():
                for asked, grant in zip(command.requests, answer, strict=True):
                    model.granted(asked, grant)
                    if grant is not None:
                        jobs = {part.first + at: part.deliveries for part in grant.parts for at in range(part.count)}
                        self.granted.setdefault(grant.token, jobs)
            case SettleJobs():
                for told, settled in zip(command.settles, answer, strict=True):
                    before = set(model.jobs)
                    lost = {first + at for first, count in settled.lost for at in range(count)}
                    assert lost == model.settle(told), f"{told} reached {lost}"
                    if told.kind == "ack":
                        ids = {first + at for first, count in told.jobs for at in range(count)}
                        self.acked |= {(told.token, job_id) for job_id in (ids & before) - set(model.jobs)}
            case AckAll():
                for held, acked in zip(command.acks, answer, strict=True):
                    before = set(model.jobs)
                    assert acked.done == model.ack_all(held), f"{held} is answered with {acked}"
                    gone = before - set(model.jobs)
                    self.acked |= {
                        (token, first + at)
                        for token, jobs in held
                        for first, count in jobs
                        for at in range(count)
                        if first + at in gone
                    }
            case EndWorkers():
                expected = tuple([model.end_worker(worker) for worker in command.workers])
                assert answer == expected, f"{answer} leases ended, not {expected}"
            case StageAcks() if isinstance(answer, Settled):
                model.pass_time(command.now_ms)
                named = [first + at for first, count in command.jobs for at in range(count)]
                lost = {first + at for first, count in answer.lost for at in range(count)}
                expected_lost = model.stage((command.producer_id, command.epoch), command.token, named)
                assert lost == expected_lost, f"{command} does not reach {lost}"
            case EndTransaction() if isinstance(answer, Ended) and answer.was_open:
                model.end_transaction((command.producer_id, command.epoch), commit=command.commit)
            case ChangeJobs():
                states = {job_id: job.state for job_id, job in model.jobs.items()}
                assert answer == model.change(command.kind, list(command.ids))
                after = {job_id: job.state for job_id, job in model.jobs.items()}
                self.changed[command.kind] |= {each for each in states if after.get(each) != states[each]}
        if isinstance(answer, Trimmed):
            rows = self._reads.machine.jobs
            assert rows is not None
            for job_id in model.jobs:
                row = rows.rows.get(job_id)
                place = job_id if row is None else row.place
                assert place >= answer.start_offset, f"job {job_id} at {place} was trimmed"

    def _compare(self, entry: Entry) -> None:
        jobs, model = self._reads.machine.jobs, self.model
        assert jobs is not None
        counts = jobs.counts
        found = (counts.ready, counts.leased, counts.delayed, counts.dead)
        expected = tuple([model.count(state) for state in ("ready", "leased", "delayed", "dead")])
        dead = sorted([job.id for job in model.jobs.values() if job.state == DEAD])
        if jobs.dead.ids(0, len(dead) + 1) != dead:
            told = jobs.dead.ids(0, len(dead) + 1)
            raise BrokenError(Invariant.JOB_STATE, f"after entry {entry.index} {told} are dead letters, not {dead}")
        totals = (counts.expired, counts.dropped, counts.deduplicated)
        if totals != (model.expired, model.dropped, model.deduplicated):
            raise BrokenError(Invariant.JOB_STATE, f"after entry {entry.index} the totals are {totals}")
        if found != expected:
            raise BrokenError(Invariant.JOB_STATE, f"after entry {entry.index} there are {found} jobs, not {expected}")
        results = {int.from_bytes(key, "big"): each for key, each in self._reads.store.scan(RESULTS)}
        kept = {job_id: jobs.results.get(job_id) for job_id in results}
        said = {job_id: (each.until_ms, each.state, each.value) for job_id, each in kept.items() if each is not None}
        if said != model.results:
            raise BrokenError(Invariant.JOB_STATE, f"after entry {entry.index} results are {said}, not {model.results}")
