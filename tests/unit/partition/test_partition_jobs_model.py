"""A work queue against a model of it: any sequence of puts, leases, settlements, transactions, deaths, crashes,
checkpoints, moves and trims leaves both with the same jobs in the same states."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rayqueue.partition import Appended, PartitionSettings, pass_time_command, trim_command
from rayqueue.partition.jobs.commands import (
    Request,
    Settle,
    ack_all_command,
    change_command,
    end_workers_command,
    lease_command,
    settle_command,
)
from rayqueue.partition.jobs.moving import move_batch, plan_move
from rayqueue.partition.jobs.queue import part_of
from rayqueue.partition.jobs.reading import batches_of, jobs_of
from rayqueue.partition.jobs.rows import KIND_TEXTS, Kind, State
from rayqueue.partition.transactions.commands import end_transaction_command, stage_acks_command
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, encode_options
from rayqueue.records import RecordBatch
from tests.unit.partition.jobs_model import DEAD, LEASED, Model
from tests.unit.partition.partition_log import Log

LANES = 2
KEYS = [None, b"a", b"b", b"c"]
IDS = st.integers(0, 40)
TOKENS = st.integers(1, 12)
PRODUCERS = st.sampled_from([7, 8])
WORKERS = st.sampled_from(["w1", "w2", "w3"])


class QueueMachine(RuleBasedStateMachine):
    options: ClassVar[dict[str, Any]] = {}

    @initialize(
        max_deliveries=st.sampled_from([1, 2, 3, None]), dead_letter=st.booleans(), max_leased=st.sampled_from([3, 50])
    )
    def open(self, max_deliveries: int | None, dead_letter: bool, max_leased: int) -> None:
        self.settings = PartitionSettings(
            queue=True,
            lanes=LANES,
            lease_ms=100,
            max_lease_ms=250,
            max_deliveries=max_deliveries,
            dead_letter=dead_letter,
            max_leased=max_leased,
            dedupe_window_ms=200,
            result_ttl_ms=300,
            retry_backoff_ms=40,
            **self.options,
        )
        self.log = Log(self.settings)
        self.model = Model(self.settings)
        self.attempts = 0
        self.epochs: dict[int, int] = {}
        self.sequences: dict[tuple[int, int], int] = {}
        """Of each transaction that was opened."""

    @property
    def jobs(self) -> Any:
        return self.log.partition.jobs

    @property
    def now_ms(self) -> int:
        return self.model.now_ms

    # -- what happens -------------------------------------------------------------------

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        lane=st.integers(0, LANES - 1),
        wanted=st.sampled_from(
            [
                {},
                {},
                {"delay_ms": 50},
                {"ttl_ms": 80},
                {"delay_ms": 60, "ttl_ms": 40},
                {"dedupe_id": "d"},
                {"want_result": True},
            ]
        ),
        only_first=st.booleans(),
    )
    def put(self, keys: list[bytes | None], lane: int, wanted: dict[str, Any], only_first: bool) -> None:
        with_options = [wanted if not only_first or not number else {} for number in range(len(keys))]
        headers = [[(JOB_HEADER, encode_options(JobOptions(**each)))] if each else [] for each in with_options]
        base = self.log.partition.next_offset
        batch = RecordBatch.encode(
            [b"%d" % (base + at) for at in range(len(keys))], keys, headers, timestamps=1, lane=lane
        )
        self.log.apply(batch)
        for job_id, (key, options) in enumerate(zip(keys, with_options, strict=True), base):
            self.model.put(job_id, lane, key, **options)

    @rule(
        workers=st.lists(WORKERS, min_size=1, max_size=3),
        max_jobs=st.integers(1, 5),
        all_or_nothing=st.booleans(),
        lease_ms=st.sampled_from([0, 30, 10_000]),
        again=st.booleans(),
    )
    def lease(self, workers: list[str], max_jobs: int, all_or_nothing: bool, lease_ms: int, again: bool) -> None:
        least = max_jobs if all_or_nothing else 1
        requests = []
        for worker in workers:
            self.attempts += not again
            requests.append(Request(worker, self.attempts, max_jobs, least, lease_ms))
        self.model.pass_time(self.now_ms + 1)
        grants = self.log.apply(lease_command(self.now_ms, requests))
        for request, grant in zip(requests, grants, strict=True):
            self.model.granted(request, grant)

    @rule(
        worker=WORKERS,
        kind=st.sampled_from(["ack", "ack", "nack", "reject", "extend", "release"]),
        token=TOKENS,
        runs=st.lists(st.tuples(IDS, st.integers(1, 4)), min_size=1, max_size=3),
        delay_ms=st.sampled_from([0, 40, -1]),
        text=st.booleans(),
    )
    def settle(self, worker: str, kind: str, token: int, runs: Any, delay_ms: int, text: bool) -> None:
        self._settle(worker, kind, token, tuple(runs), delay_ms, text)

    @precondition(lambda self: any(lease.ids for lease in self.model.leases.values()))
    @rule(
        data=st.data(),
        kind=st.sampled_from(["ack", "ack", "nack", "reject", "release"]),
        delay_ms=st.sampled_from([0, 40, -1]),
        text=st.booleans(),
    )
    def settle_one(self, data: st.DataObject, kind: str, delay_ms: int, text: bool) -> None:
        """One that is leased now: what workers do."""
        held = [(token, job_id) for token, lease in self.model.leases.items() for job_id in lease.ids]
        token, job_id = data.draw(st.sampled_from(held))
        self._settle(self.model.leases[token].worker, kind, token, ((job_id, 1),), delay_ms, text)

    def _settle(self, worker: str, kind: str, token: int, runs: Any, delay_ms: int, text: bool) -> None:
        reason = "why" if text else ""
        told = Settle(worker, kind, token, runs, delay_ms, 0, reason, reason, b"r" if kind == "ack" else None)
        self.model.pass_time(self.now_ms + 1)
        (settled,) = self.log.apply(settle_command(self.now_ms, [told]))
        lost = {each for first, count in settled.lost for each in range(first, first + count)}
        assert lost == self.model.settle(told)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), count=st.integers(1, 3))
    def ack_all(self, data: st.DataObject, count: int) -> None:
        """What some leases have, or had; mostly of those that hold it still."""
        leases = {token: lease for token, lease in self.model.leases.items() if lease.ids or lease.done}
        chosen = data.draw(st.lists(st.sampled_from(sorted(leases)), max_size=count, unique=True)) if leases else []
        held = []
        for token in chosen:
            had = {*leases[token].ids, *leases[token].done}
            named = data.draw(st.sets(st.sampled_from(sorted(had)) | IDS, min_size=1, max_size=4))
            held.append((token, tuple([(job_id, 1) for job_id in sorted(named)])))
        if held:
            self.model.pass_time(self.now_ms + 1)
            (acked,) = self.log.apply(ack_all_command(self.now_ms, [tuple(held)]))
            assert acked.done == self.model.ack_all(tuple(held))

    # -- transactions -------------------------------------------------------------------

    @rule(
        producer_id=PRODUCERS,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        lane=st.integers(0, LANES - 1),
        delay_ms=st.sampled_from([0, 0, 60]),
    )
    def put_in_a_transaction(self, producer_id: int, keys: list[bytes | None], lane: int, delay_ms: int) -> None:
        headers = [[(JOB_HEADER, encode_options(JobOptions(delay_ms=delay_ms)))]] * len(keys)
        base, key = self.log.partition.next_offset, self._transaction(producer_id)
        batch = RecordBatch.encode(
            [b"%d" % (base + at) for at in range(len(keys))],
            keys,
            headers,
            timestamps=1,
            lane=lane,
            producer_id=key[0],
            epoch=key[1],
            sequence=self.sequences.get(key, 0),
            transactional=True,
        )
        assert self.log.apply(batch) == Appended(base, len(keys), duplicate=False)
        self.sequences[key] = self.sequences.get(key, 0) + len(keys)
        for job_id, job_key in enumerate(keys, base):
            self.model.put(job_id, lane, job_key, transaction=key, delay_ms=delay_ms)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), producer_id=PRODUCERS)
    def stage(self, data: st.DataObject, producer_id: int) -> None:
        """Of what somebody has leased, has staged, or had; and of what he never had."""
        token = data.draw(st.sampled_from(sorted(self.model.leases)))
        lease = self.model.leases[token]
        had = {job.id for job in self.model.jobs.values() if job.token == token}
        ids = data.draw(st.lists(st.sampled_from(sorted(had)) | IDS if had else IDS, min_size=1, max_size=4))
        key = self._transaction(producer_id)
        self.model.pass_time(self.now_ms + 1)
        command = stage_acks_command(self.now_ms, *key, lease.worker, token, [(each, 1) for each in ids])
        settled = self.log.apply(command)
        lost = {each for first, count in settled.lost for each in range(first, first + count)}
        assert lost == self.model.stage(key, token, ids)
        self.sequences.setdefault(key, 0)

    @rule(producer_id=PRODUCERS, commit=st.booleans())
    def end_transaction(self, producer_id: int, commit: bool) -> None:
        key = self._transaction(producer_id)
        ended = self.log.apply(end_transaction_command(*key, commit=commit))
        assert ended.was_open == (key in self.sequences)
        self.model.end_transaction(key, commit=commit)
        self.epochs[producer_id] = key[1] + 1

    def _transaction(self, producer_id: int) -> tuple[int, int]:
        return producer_id, self.epochs.get(producer_id, 0)

    # -- time, workers, operators -------------------------------------------------------

    @rule(by_ms=st.sampled_from([1, 30, 110, 400]))
    def time_passes(self, by_ms: int) -> None:
        self.model.pass_time(self.now_ms + by_ms)
        self.log.apply(pass_time_command(self.now_ms))

    @rule()
    def a_leader_whose_clock_is_behind(self) -> None:
        self.log.apply(pass_time_command(max(0, self.now_ms - 500)))

    @rule(worker=WORKERS)
    def end_worker(self, worker: str) -> None:
        self.model.pass_time(self.now_ms + 1)
        assert self.log.apply(end_workers_command(self.now_ms, [worker])) == (self.model.end_worker(worker),)

    @rule(kind=st.sampled_from(["redrive", "purge", "cancel"]), ids=st.lists(IDS, min_size=1, max_size=5, unique=True))
    def change(self, kind: str, ids: list[int]) -> None:
        self._change(kind, ids)

    @precondition(lambda self: self.model.count(DEAD))
    @rule(kind=st.sampled_from(["redrive", "redrive", "purge"]))
    def change_dead(self, kind: str) -> None:
        ids = [job.id for job in self.model.jobs.values() if job.state == DEAD]
        self._change(kind, ids)

    def _change(self, kind: str, ids: list[int]) -> None:
        self.model.pass_time(self.now_ms + 1)
        assert self.log.apply(change_command(self.now_ms, kind, ids)) == self.model.change(kind, ids)

    # -- what may not change anything ---------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def move(self, count: int) -> None:
        """What the leader does so that the log can be trimmed."""
        planned = plan_move(self.jobs, count, self.log.partition.next_offset)
        if planned:
            with self.log.snapshot() as snapshot:
                batch = move_batch(snapshot, planned, 1 << 20)
            assert batch is not None
            self.log.apply(batch)

    @rule()
    def trim(self) -> None:
        command = self.log.partition.retention_command(self.now_ms)
        if command is not None:
            self.log.apply(command)

    @rule(to_offset=IDS)
    def trim_too_much(self, to_offset: int) -> None:
        self.log.apply(trim_command(to_offset))

    @rule()
    def sync(self) -> None:
        self.log.store.sync()

    @rule()
    def crash(self) -> None:
        self.log.crash()

    @precondition(lambda self: self.log.payloads)
    @rule(apart=st.integers(0, 3))
    def another_replica_begins_with_a_checkpoint(self, apart: int) -> None:
        before = self.log.checkpoint()
        twin = self.log.twin_from_checkpoint(before)
        for _ in range(apart):
            self.log.apply(pass_time_command(self.now_ms))
        twin.catch_up()
        assert twin.partition.checkpoint() == self.log.partition.checkpoint()
        self.log.crash()
        assert twin.partition.checkpoint() == self.log.partition.checkpoint()

    @precondition(lambda self: self.log.payloads)
    @rule()
    def a_replica_goes_on_from_a_checkpoint(self) -> None:
        """And applies what follows as the others do: its batches of before are gone."""
        self.twin = self.log.twin_from_checkpoint(self.log.checkpoint())

    twin: Log | None = None

    # -- what holds -----------------------------------------------------------------------------

    @invariant()
    def numbers_are_exact(self) -> None:
        counts, model = self.jobs.counts, self.model
        found = (counts.ready, counts.leased, counts.delayed, counts.dead)
        assert found == tuple(model.count(state) for state in ("ready", "leased", "delayed", "dead"))
        assert self.jobs.available == len(model.eligible())
        assert (counts.expired, counts.dropped) == (model.expired, model.dropped)
        assert counts.deduplicated == model.deduplicated

    @invariant()
    def every_job_is_where_it_should_be(self) -> None:
        jobs, model, start = self.jobs, self.model, self.log.partition.start_offset
        leased = {
            each for lease in jobs.leases.holding() for first, n, _ in lease.runs for each in range(first, first + n)
        }
        for job in model.jobs.values():
            row = jobs.rows.get(job.id)
            if row is None:
                ahead = jobs.frontier(job.lane).has(job.id)
                assert (job.id in leased, ahead) == (job.state == LEASED, job.state == "ready")
                assert job.id >= start
            else:
                assert State(row.state).name.lower() == job.state
                assert row.place >= start
                assert (row.deliveries, row.lane) == (job.deliveries, job.lane)
                assert [KIND_TEXTS[Kind(note.kind)] for note in row.notes] == job.notes[-8:]
                held = job.state == LEASED and job.transaction is None
                assert not held or job.id in jobs.leases.get(row.token).ids
                assert job.transaction is None or job.id not in leased
        for job_id in range(self.log.partition.next_offset):
            if job_id not in model.jobs:
                row = jobs.rows.get(job_id)
                assert row is None or row.state == State.CANCELLED
                assert job_id not in leased

    @invariant()
    def results_are_there(self) -> None:
        for job_id in range(self.log.partition.next_offset):
            result, expected = self.jobs.results.get(job_id), self.model.results.get(job_id)
            assert (None if result is None else (result.until_ms, result.state, result.value)) == expected

    @invariant()
    def a_restored_replica_is_the_same(self) -> None:
        if self.twin is not None:
            self.twin.catch_up()
            assert self.twin.partition.checkpoint() == self.log.partition.checkpoint()

    @invariant()
    def bytes_are_those_that_were_put(self) -> None:
        if not self.model.jobs:
            return
        with self.log.snapshot() as snapshot:
            rows = [row for row in map(self.jobs.rows.get, self.model.jobs) if row is not None]
            parts = [part_of(row) for row in rows]
            for job in jobs_of(batches_of(snapshot, parts), parts):
                assert job.value == b"%d" % job.id


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ordered_by_key": True},
        {"fair_by_key": True},
        {"ordered_by_key": True, "fair_by_key": True},
    ],
    ids=["plain", "ordered", "fair", "both"],
)
def test_a_queue_is_its_model(options: dict[str, Any]) -> None:
    machine = type("Machine", (QueueMachine,), {"options": options})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("RAYQUEUE_JOBS_EXAMPLES", "25")),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
