"""A queue's workers and its leader: the real service and machine, in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayqueue.errors import InvalidInputError, NotLeaderError, QueueFullError, TopicKindError
from rayqueue.partition.jobs import leases
from rayqueue.partition.jobs.commands import settle
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.jobs import (
    JOB_HEADER,
    AckAll,
    AckedAll,
    CancelJobs,
    EndWorker,
    FindJobs,
    GetJobs,
    GetQueueSizes,
    GetResult,
    JobOptions,
    JobResult,
    Leased,
    LeaseJobs,
    ListDead,
    PeekJobs,
    PurgeDead,
    QueueSizes,
    RedriveDead,
    Settled,
    SettleJobs,
    Settlement,
    WithdrawRequest,
    encode_options,
    worker_name,
)
from rayqueue.testing import memory, wait_for


class Worker:
    """A connection with one partition, and a worker's name."""

    def __init__(self, rq: memory.MemoryQueue, topic: str = "q", name: str = "w1") -> None:
        self.rq = rq
        self.name = name
        self.attempt = 0
        (self.group,) = rq._queue.cluster.partitions(topic, 0)
        assert self.group.leader is not None
        self.channel = rq.io.call(self.group.connect(self.group.endpoint(self.group.leader), rq.settings))

    def __call__(self, call: Call) -> Any:
        async def ask() -> Any:
            return await self.channel.call(call)

        return self.rq.io.call(ask())

    def get(self, max_jobs: int = 1, *, wait_ms: int = 0, **more: Any) -> Leased:
        self.attempt += 1
        leased: Leased = self(
            LeaseJobs(worker=self.name, attempt=self.attempt, max_jobs=max_jobs, wait_ms=wait_ms, **more)
        )
        return leased

    def settle(self, kind: Any, token: int, *ids: int, **more: Any) -> list[int]:
        """Those that it did not reach."""
        told = Settlement(kind=kind, token=token, jobs=tuple([(each, 1) for each in ids]), **more)
        (settled,) = self(SettleJobs(worker=self.name, settlements=(told,)))
        return [each for first, count in settled.lost for each in range(first, first + count)]

    def sizes(self) -> QueueSizes:
        sizes: QueueSizes = self(GetQueueSizes())
        return sizes

    def hang_up(self) -> None:
        async def close() -> None:
            self.channel.close()

        self.rq.io.call(close())


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as rq:
        yield rq


def make(rq: memory.MemoryQueue, count: int = 0, **settings: Any) -> Worker:
    rq.create_topic("q", queue=True, **settings)
    put(rq, *[b"%d" % number for number in range(count)])
    return Worker(rq)


def put(rq: memory.MemoryQueue, *values: bytes, key: bytes | None = None, priority: int = 0, **options: Any) -> None:
    headers = [(JOB_HEADER, encode_options(JobOptions(**options)))] if options else None
    with rq.producer() as producer:
        for value in values:
            producer.send("q", value, key=key, priority=priority, headers=headers)


def values(leased: Leased) -> list[bytes | None]:
    return [job.value for job in leased.jobs]


def test_jobs_are_given_out_in_order_and_acknowledged(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 5)
    leased = worker.get(3)
    assert (values(leased), [job.deliveries for job in leased.jobs]) == ([b"0", b"1", b"2"], [1, 1, 1])
    assert 0 < leased.lease_ms <= 30_000
    assert worker.settle("ack", leased.token, 0, 2) == []
    assert worker.sizes() == QueueSizes(2, 1, 0, 0)
    assert values(worker.get(10)) == [b"3", b"4"]
    assert worker.get(10) == Leased()
    assert worker.settle("ack", leased.token, 1) == []
    assert worker.settle("ack", leased.token, 1, 7) == [7]  # repeated, and never had


def test_all_are_acknowledged_or_none(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 8, retry_backoff_ms=0), Worker(rq, name="w2")
    first, second = worker.get(3), worker.get(3)
    both = AckAll(leases=((first.token, ((0, 3),)), (second.token, ((3, 3),))))
    assert worker.settle("release", second.token, 4) == []
    taken = other.get()
    assert worker(both) == AckedAll(done=False)
    assert worker(AckAll(leases=((first.token, ((0, 3), (7, 1))),))) == AckedAll(done=False)  # one that it never had
    assert worker.sizes() == QueueSizes(2, 6, 0, 0)  # nothing has changed
    assert other.settle("release", taken.token, 4) == []
    rest = AckAll(leases=((first.token, ((0, 3),)), (second.token, ((3, 1), (5, 1)))))
    assert [worker(rest) for _ in range(2)] == [AckedAll(done=True)] * 2
    assert worker.sizes() == QueueSizes(3, 0, 0, 0)
    with pytest.raises(InvalidInputError, match="at most 50000 jobs"):
        worker(AckAll(leases=((first.token, tuple([(0, 10_000)] * 6)),)))


def test_a_late_ack_of_all_counts_if_nobody_has_got_any_since(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 3, retry_backoff_ms=0), Worker(rq, name="w2")
    leased = worker.get(3)
    other(EndWorker(worker="w1"))
    one = other.get()
    assert worker(AckAll(leases=((leased.token, ((0, 3),)),))) == AckedAll(done=False)
    other.settle("release", one.token, 0)  # from then on the first lease is not good for it
    assert worker(AckAll(leases=((leased.token, ((0, 3),)),))) == AckedAll(done=False)
    assert worker(AckAll(leases=((leased.token, ((1, 2),)),))) == AckedAll(done=True)
    assert worker.sizes() == QueueSizes(1, 0, 0, 0)


def test_an_ack_of_all_that_is_repeated_too_late_is_not_called_lost(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "REMEMBERED", 2)
    worker = make(rq, 5, retry_backoff_ms=0)
    ack = AckAll(leases=((worker.get().token, ((0, 1),)),))
    assert worker(ack) == AckedAll(done=True)
    for _ in range(3):
        leased = worker.get()
        worker.settle("ack", leased.token, leased.jobs[0].id)
    assert worker(ack) == AckedAll(done=False, forgotten=True)
    assert worker(AckAll(leases=((1, ((4, 1),)), (99, ((4, 1),))))) == AckedAll(done=False)  # no such lease yet


def test_an_ack_of_many_runs_that_is_repeated_is_not_called_lost(rq: memory.MemoryQueue) -> None:
    """More of them than a lease that has ended remembers."""
    count = leases.REMEMBERED_RUNS + 10
    worker, other = make(rq, 2 * count, retry_backoff_ms=0), Worker(rq, name="w2")
    taken = other.get(2 * count)
    other.settle("ack", taken.token, *range(0, 2 * count, 2))
    other(EndWorker(worker="w2"))
    leased = worker.get(count)
    ack = AckAll(leases=((leased.token, tuple([(job.id, 1) for job in leased.jobs])),))
    assert (len(leased.jobs), worker(ack), worker(ack)) == (count, AckedAll(True), AckedAll(False, forgotten=True))


def test_what_a_request_was_answered_with_is_given_back_if_the_answer_was_not_heard(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 4, max_deliveries=1)
    worker.get(2)
    assert worker(WithdrawRequest(worker="w1", attempt=1)) == 0
    assert worker.sizes().leased == 2
    assert worker(WithdrawRequest(worker="w1", attempt=1, give_back=True)) == 0
    assert worker.sizes() == QueueSizes(4, 0, 0, 0)
    assert [job.deliveries for job in worker.get(4).jobs] == [1, 1, 1, 1]


def test_a_failed_job_waits_and_comes_back_and_dies_in_the_end(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1, max_deliveries=2, retry_backoff_ms=10)
    worker.settle("nack", worker.get().token, 0, reason="no", traceback="line 1")
    assert worker.sizes().delayed == 1
    again = worker.get(wait_ms=10_000)
    assert [job.deliveries for job in again.jobs] == [2]
    worker.settle("nack", again.token, 0, reason="still no")
    assert worker.sizes() == QueueSizes(0, 0, 0, 1)
    (dead,) = worker(ListDead())
    assert (dead.job.value, dead.job.deliveries) == (b"0", 2)
    told = [(each.kind, each.worker, each.reason, each.traceback) for each in dead.history]
    assert told == [("nack", "w1", "no", "line 1"), ("nack", "w1", "still no", "")]
    assert worker(RedriveDead()).jobs == 1
    redriven = worker.get()
    assert [job.deliveries for job in redriven.jobs] == [3]
    worker.settle("reject", redriven.token, 0, reason="never")
    (dead,) = worker(ListDead())
    assert [each.kind for each in dead.history] == ["nack", "nack", "redriven", "reject"]
    assert worker(PurgeDead(ids=(0,))).jobs == 1
    assert worker.sizes() == QueueSizes(0, 0, 0, 0)


def test_a_lease_that_nobody_extends_ends(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 2, lease_ms=100), Worker(rq, name="w2")
    lost, kept = worker.get(), worker.get()
    worker.settle("extend", kept.token, 1, lease_ms=60_000)
    again = other.get(wait_ms=10_000)
    assert [(job.id, job.deliveries) for job in again.jobs] == [(0, 2)]
    assert worker.settle("ack", lost.token, 0) == [0]
    assert worker.settle("extend", lost.token, 0) == [0]
    assert other.settle("ack", again.token, 0) == worker.settle("ack", kept.token, 1) == []


def test_a_late_ack_counts_if_nobody_has_got_the_job_since(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1, lease_ms=10)
    leased = worker.get()
    wait_for(lambda: worker.sizes().ready == 1, "the queue to get there")
    assert worker.settle("ack", leased.token, 0) == []
    assert worker.sizes() == QueueSizes(0, 0, 0, 0)


def test_the_leases_of_a_worker_end_with_its_connection(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 3), Worker(rq, name="w2")
    worker.get(2)
    worker.hang_up()
    assert sorted(job.id for job in other.get(3, least_jobs=3, wait_ms=10_000).jobs) == [0, 1, 2]


def test_a_worker_that_has_connected_again_keeps_its_leases(rq: memory.MemoryQueue) -> None:
    worker, same = make(rq, 2), Worker(rq)
    leased = worker.get()
    same.attempt = 1
    assert len(same.get().jobs) == 1
    worker.hang_up()
    wait_for(lambda: len(same.group._connections) == 2, "the queue to get there")
    assert same.sizes().leased == 2
    assert same.settle("ack", leased.token, 0) == []


def _new_leader(worker: Worker) -> None:
    """Of another process: no worker has a connection with it."""
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]

    def change(_: Any) -> None:
        jobs._leads = False
        for client in list(jobs._workers):
            jobs.client_gone(client)
        jobs.lead()

    worker.rq._do(change)


@pytest.mark.parametrize("kind", ["extend", "release"])
def test_a_new_leader_learns_of_a_worker_by_what_it_says(rq: memory.MemoryQueue, kind: Any) -> None:
    worker, other = make(rq, 2, lease_ms=60_000), Worker(rq, name="w2")
    leased = worker.get(2)
    _new_leader(worker)
    told = Settlement(kind=kind, token=leased.token, jobs=((0, 1),))
    worker(SettleJobs(worker="w1", settlements=(told,), attached=True))
    worker.hang_up()
    wait_for(lambda: other.sizes().leased == 0, "its leases to end with its connection")


def test_what_a_gateway_says_ties_no_lease_to_it(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 2, lease_ms=60_000), Worker(rq, name="w2")
    leased = worker.get(2, detached=True)
    _new_leader(worker)
    assert worker.settle("ack", leased.token, 0) == []
    worker.hang_up()
    assert other.get(wait_ms=200) == Leased()
    assert other.sizes().leased == 1


def test_what_is_said_on_another_connection_moves_no_worker(rq: memory.MemoryQueue) -> None:
    worker, same, other = make(rq, 2, lease_ms=60_000), Worker(rq), Worker(rq, name="w2")
    leased = worker.get(2)
    told = Settlement(kind="extend", token=leased.token, jobs=((0, 1),))
    same(SettleJobs(worker="w1", settlements=(told,), attached=True))
    same.hang_up()
    assert other.get(wait_ms=200) == Leased()
    worker.hang_up()
    wait_for(lambda: other.sizes().leased == 0, "its leases to end with its connection")


def test_a_worker_that_was_just_reported_dead_is_not_taken_in_by_what_it_had_sent(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 2, lease_ms=60_000)
    worker.name = worker_name("w1", "node1")
    leased = worker.get(2)
    told = Settlement(kind="extend", token=leased.token, jobs=((0, 1),))
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]

    def gone(_: Any) -> None:
        jobs.nodes_gone(["node1"])
        (client,) = jobs._workers
        jobs.call(client, 1000, SettleJobs(worker=worker.name, settlements=(told,), attached=True))

    rq._do(gone)
    wait_for(lambda: worker.sizes().leased == 0, "the leases on that node to end")


def test_a_worker_that_somebody_says_is_dead(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 3), Worker(rq, name="w2")
    leased = worker.get(3)
    assert other(EndWorker(worker="w1")) == 3
    assert other(EndWorker(worker="w1")) == 0
    assert other.sizes() == QueueSizes(3, 0, 0, 0)
    assert len(other.get().jobs) == 1
    assert worker.settle("ack", leased.token, 0, 1, 2) == [0]


def _gone(worker: Worker, *ray_nodes: str) -> None:
    worker.rq._do(lambda _: worker.group._service.jobs.nodes_gone(ray_nodes))  # type: ignore[attr-defined]


def test_leases_end_where_ray_reports_the_workers_node_dead(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 3, retry_backoff_ms=0), Worker(rq, name="w2@n2")
    worker.name = "w1@n1"
    lost, kept = worker.get(2), other.get()
    waiting = _parked(worker, "w3@n1", 1)
    _gone(other, "n1", "n7")
    assert waiting.result(10) == Leased()
    wait_for(lambda: other.sizes() == QueueSizes(2, 1, 0, 0), "its leases to end, though it is connected")
    assert other.settle("ack", kept.token, 2) == []
    again = other.get(2)
    assert [(job.id, job.deliveries) for job in again.jobs] == [(0, 2), (1, 2)]
    assert worker.settle("ack", lost.token, 0) == [0]


def test_a_worker_that_outlives_its_ray_node_works_on(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 2, retry_backoff_ms=0)
    worker.name = "w1@n1"
    first = worker.get()
    _gone(worker, "n1")
    wait_for(lambda: worker.sizes().leased == 0, "its lease to end")
    assert worker.settle("ack", first.token, 0) == []  # nobody else was given it
    second = worker.get()
    _gone(worker, "n1")  # told again
    assert worker.sizes().leased == 1
    assert worker.settle("ack", second.token, 1) == []


def test_a_new_leader_ends_leases_on_nodes_that_were_dead_before(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1, retry_backoff_ms=0)
    worker.name = "w1@n1"
    worker.get()
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    rq._do(lambda _: setattr(jobs, "_leads", False))  # as a follower hears it
    _gone(worker, "n1")
    assert worker.group.partition.jobs.counts.leased == 1  # type: ignore[union-attr]
    rq._do(lambda _: jobs.client_gone(next(iter(jobs._workers))))
    rq._do(lambda _: jobs.lead())
    other = Worker(rq, name="w2")
    wait_for(lambda: other.sizes() == QueueSizes(1, 0, 0, 0), "the lease to end")


def test_a_new_leader_knows_everything(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 4)
    leased = worker.get(2)
    worker.settle("nack", leased.token, 1, delay_ms=60_000)
    rq.change_leader("q")
    with pytest.raises(NotLeaderError):
        worker.sizes()
    worker = Worker(rq)
    assert worker.sizes() == QueueSizes(2, 1, 1, 0)
    assert worker.settle("ack", leased.token, 0) == []


def test_workers_wait_in_the_order_in_which_they_came(rq: memory.MemoryQueue) -> None:
    worker = make(rq)

    async def ask(number: int) -> Leased:
        leased: Leased = await worker.channel.call(LeaseJobs(worker=f"w{number}", attempt=1, wait_ms=10_000))
        return leased

    waiting = [asyncio.run_coroutine_threadsafe(ask(number), rq.io.loop) for number in range(3)]
    wait_for(lambda: len(worker.group._service.jobs._waiting) == 3, "the queue to get there")  # type: ignore[attr-defined]
    put(rq, b"a", b"b", b"c")
    assert [values(each.result(10)) for each in waiting] == [[b"a"], [b"b"], [b"c"]]


def _parked(worker: Worker, name: str, attempt: int, **more: Any) -> Any:
    async def ask() -> Leased:
        leased: Leased = await worker.channel.call(LeaseJobs(worker=name, attempt=attempt, wait_ms=60_000, **more))
        return leased

    asked = asyncio.run_coroutine_threadsafe(ask(), worker.rq.io.loop)
    waiting = worker.group._service.jobs._waiting  # type: ignore[attr-defined]
    wait_for(lambda: (name, attempt) in [(each.call.worker, each.call.attempt) for each in list(waiting._all)], "it")
    return asked


def test_a_request_that_is_withdrawn_gets_nothing_and_others_do(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    first, second, other = _parked(worker, "w1", 1), _parked(worker, "w1", 2), _parked(worker, "w2", 1)
    assert worker(WithdrawRequest(worker="w1", attempt=1)) == 1
    assert first.result(10) == Leased()
    assert worker(WithdrawRequest(worker="w1", attempt=1)) == 0
    assert worker(WithdrawRequest(worker="nobody", attempt=1)) == 0
    put(rq, b"a", b"b")
    assert [values(each.result(10)) for each in (second, other)] == [[b"a"], [b"b"]]


def test_the_requests_of_a_worker_that_ends_are_withdrawn(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    waiting = [_parked(worker, "w1", attempt) for attempt in (1, 2)]
    worker(EndWorker(worker="w1"))
    assert [each.result(10) for each in waiting] == [Leased(), Leased()]
    put(rq, b"a")
    assert worker.sizes() == QueueSizes(1, 0, 0, 0)
    assert values(worker.get()) == [b"a"]  # the name may come again


def _on_its_way(worker: Worker, **more: Any) -> tuple[Any, Callable[[], None]]:
    """A request of this worker whose jobs are being read: its answer, and what lets the disk go on."""
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    read, held = jobs._reader.read, []
    jobs._reader.read = lambda *arguments: held.append(arguments)  # a disk that takes its time

    def go_on() -> None:
        jobs._reader.read = read
        worker.rq._do(lambda _: [read(*each) for each in held])
        worker.rq._do(lambda _: worker.group._turn())

    asked = _first_request(worker, **more)
    wait_for(lambda: bool(held), "the grant")
    return asked, go_on


def _first_request(worker: Worker, **more: Any) -> Any:
    async def ask() -> Leased:
        leased: Leased = await worker.channel.call(LeaseJobs(worker=worker.name, attempt=1, **more))
        return leased

    return asyncio.run_coroutine_threadsafe(ask(), worker.rq.io.loop)


def test_jobs_that_are_just_being_given_to_a_withdrawn_request_go_back(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1)
    asked, go_on = _on_its_way(worker)
    assert worker(WithdrawRequest(worker="w1", attempt=1)) == 1
    go_on()
    assert asked.result(10) == Leased()
    assert worker.sizes() == QueueSizes(1, 0, 0, 0)  # the answer comes once they are back
    assert [job.deliveries for job in worker.get().jobs] == [1]


def test_a_withdrawn_request_whose_jobs_are_not_back_is_not_answered_with_none(rq: memory.MemoryQueue) -> None:
    """Else they would be with nobody until the lease ends."""
    worker = make(rq, 1)
    asked, go_on = _on_its_way(worker)
    assert worker(WithdrawRequest(worker="w1", attempt=1)) == 1
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    rq._do(lambda _: jobs.lost(NotLeaderError("another one leads")))
    go_on()
    with pytest.raises(NotLeaderError):
        asked.result(10)
    rq._do(lambda _: jobs.lead())
    again = Worker(rq).get()  # as a client does: the same attempt
    assert [(job.id, job.deliveries) for job in again.jobs] == [(0, 1)]


def test_a_handle_that_is_closed_takes_no_delivery_with_it(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1, max_deliveries=1)
    asked, go_on = _on_its_way(worker)
    ended = asyncio.run_coroutine_threadsafe(_ended(worker), rq.io.loop)
    wait_for(lambda: bool(worker.group._service.jobs._ended), "it to stop")  # type: ignore[attr-defined]
    go_on()
    assert (asked.result(10), ended.result(10)) == (Leased(), 0)
    assert worker.sizes() == QueueSizes(1, 0, 0, 0)  # not dead: nobody has had it
    assert [job.deliveries for job in Worker(rq, name="w2").get().jobs] == [1]


@pytest.mark.parametrize("gives_up", ["withdraws", "closes", "breaks"])
def test_an_answer_that_was_cut_is_given_back_too_if_nobody_wants_it_by_then(
    rq: memory.MemoryQueue, gives_up: str
) -> None:
    """The rest of its jobs is on its way back, and nobody has had the others either."""
    worker, other = make(rq, max_deliveries=1), Worker(rq, name="w2")
    put(rq, *[bytes([number]) * 1_000 for number in range(4)])
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    propose, jobs._propose_settles = jobs._propose_settles, lambda: None  # a majority that takes its time
    asked = _first_request(worker, max_jobs=4, max_bytes=2_500)
    wait_for(lambda: bool(jobs._settles), "the answer to be cut")
    ended: Any = None
    if gives_up == "withdraws":
        assert worker(WithdrawRequest(worker="w1", attempt=1)) == 1
    elif gives_up == "closes":
        ended = asyncio.run_coroutine_threadsafe(_ended(worker), rq.io.loop)
        wait_for(lambda: bool(jobs._ended), "it to stop")
    else:
        worker.hang_up()
        wait_for(lambda: len(other.group._connections) == 2, "the leader to notice")
    jobs._propose_settles = propose
    wait_for(lambda: other.sizes() == QueueSizes(4, 0, 0, 0), "all to be there again")
    assert gives_up == "breaks" or asked.result(10) == Leased()
    assert ended is None or ended.result(10) == 0
    assert [job.deliveries for job in other.get(4).jobs] == [1, 1, 1, 1]


async def _ended(worker: Worker) -> int:
    jobs: int = await worker.channel.call(EndWorker(worker=worker.name))
    return jobs


def test_a_replica_that_has_won_and_does_not_lead_yet_rests(rq: memory.MemoryQueue) -> None:
    """Until it leads it can do nothing for a worker that ends."""
    worker = make(rq, 1)
    worker.get()
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    rq._do(lambda _: setattr(jobs, "_leads", False))
    ended = asyncio.run_coroutine_threadsafe(_ended(worker), rq.io.loop)
    wait_for(lambda: bool(jobs._ended), "it to stop")
    assert rq._do(lambda _: jobs.next_deadline_s) > time.monotonic()
    rq._do(lambda _: jobs.lead())
    rq._do(lambda _: worker.group._turn())
    assert ended.result(10) == 1


def test_what_is_on_its_way_to_a_connection_that_breaks_is_not_counted(rq: memory.MemoryQueue) -> None:
    worker, other = make(rq, 1, max_deliveries=1), Worker(rq, name="w2")
    _, go_on = _on_its_way(worker)
    worker.hang_up()
    wait_for(lambda: len(other.group._connections) == 2, "the leader to notice")
    other.sizes()
    go_on()
    wait_for(lambda: other.sizes() == QueueSizes(1, 0, 0, 0), "it to be given back")
    assert [job.deliveries for job in other.get().jobs] == [1]


def test_a_request_that_is_repeated_on_another_connection_goes_on_there(rq: memory.MemoryQueue) -> None:
    """What it is being given is not released because the first connection broke."""
    worker = make(rq, 1)
    _, go_on = _on_its_way(worker)
    worker.hang_up()
    same = Worker(rq)
    again = _first_request(same)
    wait_for(lambda: len(worker.group._connections) == 2, "the leader to notice")
    same.sizes()
    go_on()
    leased = again.result(10)
    assert [(job.id, job.deliveries) for job in leased.jobs] == [(0, 1)]
    assert same.sizes() == QueueSizes(0, 1, 0, 0)
    assert same.settle("ack", leased.token, 0) == []


def test_a_detached_request_that_is_repeated_on_another_connection_goes_on_there(rq: memory.MemoryQueue) -> None:
    """Its lease outlives the connection, so nobody may give it back because that broke."""
    worker = make(rq, 1)
    _, go_on = _on_its_way(worker, detached=True)
    worker.hang_up()
    wait_for(lambda: len(worker.group._connections) == 1, "the leader to notice")
    same = Worker(rq)
    again = _first_request(same, detached=True)
    same.sizes()
    go_on()
    leased = again.result(10)
    assert [(job.id, job.deliveries) for job in leased.jobs] == [(0, 1)]
    assert same.sizes() == QueueSizes(0, 1, 0, 0)
    assert same.settle("ack", leased.token, 0) == []


def test_a_detached_request_that_waits_is_one_though_it_is_repeated_on_another_connection(
    rq: memory.MemoryQueue,
) -> None:
    worker = make(rq)
    same, other = Worker(rq), Worker(rq, name="w2")
    left, waiting = _parked(worker, "w1", 1, detached=True), _parked(same, "w1", 1, detached=True)
    assert left.result(10) == Leased()
    another = _parked(other, "w1", 2, detached=True)  # of the same gateway, for another caller
    put(rq, b"a", b"b")
    assert [values(each.result(10)) for each in (waiting, another)] == [[b"a"], [b"b"]]


def test_what_waits_on_a_connection_that_its_worker_has_left_gets_nothing(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    left = _parked(worker, "w1", 1)
    same = Worker(rq)  # the first connection does not look broken yet
    waiting = _parked(same, "w1", 2)
    assert left.result(10) == Leased()
    put(rq, b"a")
    assert values(waiting.result(10)) == [b"a"]


def test_what_waits_too_long_is_answered(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 2)
    began_s = time.monotonic()
    assert worker.get(3, least_jobs=3, wait_ms=200) == Leased()
    assert time.monotonic() - began_s >= 0.19
    assert len(worker.get(2, least_jobs=2).jobs) == 2


@pytest.mark.slow
def test_delays_times_to_live_and_dedupe_ids(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    put(rq, b"late", delay_ms=1_500)
    put(rq, b"short", ttl_ms=700)
    put(rq, b"once", dedupe_id="d")
    put(rq, b"twice", dedupe_id="d")
    assert worker(FindJobs(dedupe_ids=("d", "e"))) == (2, None)
    assert worker.sizes() == QueueSizes(2, 0, 1, 0, deduplicated=1)
    wait_for(lambda: worker.sizes().dead == 1, "the queue to get there")
    assert values(worker.get(5)) == [b"once"]
    assert values(worker.get(5, wait_ms=10_000)) == [b"late"]
    (dead,) = worker(ListDead())
    assert (dead.job.value, dead.history[0].kind) == (b"short", "time to live")


def test_results(rq: memory.MemoryQueue) -> None:
    worker = make(rq, max_deliveries=1)
    put(rq, b"a", b"b", want_result=True)
    assert worker(GetResult(id=0)) == worker(GetResult(id=0, wait_ms=20)) == JobResult("pending")
    leased = worker.get(2)
    assert [job.want_result for job in leased.jobs] == [True, True]
    assert [job.headers for job in leased.jobs] == [(), ()]

    async def result() -> JobResult:
        found: JobResult = await worker.channel.call(GetResult(id=0, wait_ms=10_000))
        return found

    awaited = asyncio.run_coroutine_threadsafe(result(), rq.io.loop)
    worker.settle("ack", leased.token, 0, result=b"42")
    assert awaited.result(10) == JobResult("done", b"42")
    worker.settle("nack", leased.token, 1, reason="why", traceback="where")
    assert worker(GetResult(id=1, wait_ms=1000)) == JobResult("dead", None, "why", "where")
    assert worker(GetResult(id=7, wait_ms=1000)) == JobResult("gone")


def test_states_cancelling_and_looking(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 4)
    leased = worker.get()
    put(rq, b"late", delay_ms=60_000)
    assert [job.value for job in worker(PeekJobs(max_jobs=10))] == [b"1", b"2", b"3"]
    ids = (0, 1, 4, 9)
    assert [each.state for each in worker(GetJobs(ids=ids))] == ["leased", "ready", "delayed", "gone"]
    assert worker(CancelJobs(ids=ids)) == 2
    assert worker(CancelJobs(ids=ids)) == 0
    assert worker.sizes() == QueueSizes(2, 1, 0, 0)
    assert values(worker.get(9)) == [b"2", b"3"]
    assert worker.settle("ack", leased.token, 0) == []


def test_answers_are_cut_where_they_become_too_large(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    put(rq, *[b"x" * 1000] * 5)
    first = worker.get(5, max_bytes=2500)
    assert len(first.jobs) == 2
    wait_for(lambda: worker.sizes() == QueueSizes(3, 2, 0, 0), "the queue to get there")
    assert [job.deliveries for job in worker.get(5).jobs] == [1, 1, 1]


def test_headers_count_where_an_answer_is_cut(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    with rq.producer() as producer:
        for _ in range(3):
            producer.send("q", b"x", headers={"h": b"y" * 1000})
    assert len(worker.get(3, max_bytes=2500).jobs) == 2


def test_a_call_for_the_other_kind_is_refused_before_anything_is_written(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1)
    rq.create_topic("log")
    log = Worker(rq, "log")
    for call in (LeaseJobs(worker="w", attempt=1), GetQueueSizes(), PurgeDead()):
        with pytest.raises(TopicKindError):
            log(call)
    for other in (calls.Commit(group="g", generation=0, offsets={0: 1}), calls.Pin(group="g"), calls.Trim(before=1)):
        with pytest.raises(TopicKindError):
            worker(other)
    with pytest.raises(TopicKindError):
        rq.io.call(fetch(worker))
    assert worker.sizes() == QueueSizes(1, 0, 0, 0)


async def fetch(worker: Worker) -> Any:
    return await worker.channel.fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1000))


def test_options_that_cannot_be_read_are_refused(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    with rq.producer() as producer, pytest.raises(InvalidInputError):
        producer.send("q", b"v", headers=[(JOB_HEADER, b"\xc1")]).result(10)
    assert worker.sizes() == QueueSizes(0, 0, 0, 0)


def test_numbers_that_no_lease_has(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 1)
    leased = worker.get()
    most = 2**63 - 1
    assert worker.settle("ack", most, 0, most) == [0, most]
    for kind in ("nack", "reject", "release", "extend"):
        assert worker.settle(kind, leased.token, 5) == [5]
    with pytest.raises(InvalidInputError):
        worker(LeaseJobs(worker="w", attempt=1, max_jobs=1, least_jobs=2))
    told = Settlement(kind="ack", token=1, jobs=((0, 10_000), (20_000, 1)))
    with pytest.raises(InvalidInputError):
        worker(SettleJobs(worker="w", settlements=(told,)))
    assert worker.sizes() == QueueSizes(0, 1, 0, 0)


def test_many_large_settlements_of_one_turn_are_several_entries(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 30, max_deliveries=1)
    leased = worker.get(30)
    jobs = worker.group._service.jobs  # type: ignore[attr-defined]
    told: list[Any] = []
    settlements = [
        Settlement(kind="nack", token=leased.token, jobs=((job.id, 1),), reason="x" * 16_000, traceback="y" * 16_000)
        for job in leased.jobs
    ]

    async def settle_all() -> int:
        before = worker.group.applied
        jobs._settles = [(told.append, [settle("w1", each)]) for each in settlements]
        jobs.gather()
        return worker.group.applied - before

    assert 5 < rq.io.call(settle_all()) < 30
    assert told == [(Settled(),)] * 30
    assert worker.sizes() == QueueSizes(0, 0, 0, 30)
    dead = worker(ListDead(max_jobs=5))
    assert [each.history[0].reason for each in dead] == ["x" * 16_000] * 5


def test_one_connection_has_a_bounded_number_of_workers(rq: memory.MemoryQueue) -> None:
    worker = make(rq)
    for number in range(1000):
        worker.name = f"w{number}"
        assert worker.get() == Leased()
    worker.name = "one more"
    with pytest.raises(QueueFullError):
        worker.get()
    worker.name = "w7"
    assert worker.get() == Leased()
    worker(EndWorker(worker="w8"))  # one that has ended does not count
    worker.name = "one more"
    assert worker.get() == Leased()


def test_a_repeated_request_whose_lease_has_ended_gets_another_one(rq: memory.MemoryQueue) -> None:
    worker = make(rq, 2)
    first = worker.get()
    worker(EndWorker(worker="w1"))
    worker.attempt -= 1
    before = worker.group.applied
    again = worker.get(wait_ms=10_000)
    assert ([job.deliveries for job in again.jobs], worker.group.applied - before) == ([2], 1)
    assert again.token != first.token
