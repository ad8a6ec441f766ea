"""Transactions of a producer, in front of scripted partitions and a scripted coordinator, in real threads.

The partitions are the real ones as far as batches and their numbers go; what the
coordinator decides is the test's. Whether all of it fits together with real
replicas is told by ``tests/integration/test_transactions.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from rayqueue.client.io import IoThread
from rayqueue.client.producer.delivery import failed_outcome
from rayqueue.client.producer.encoding import EncodingProducer
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.transactions.life import State
from rayqueue.client.producer.transactions.tasks import TransactionTasks
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    DeliveryFailedError,
    ForkedError,
    InvalidInputError,
    NotLeaderError,
    OutcomeUnknownError,
    ProducerFencedError,
    QueueFullError,
    RayQueueError,
    TransactionAbortedError,
    UnknownTopicError,
)
from rayqueue.protocol.transactions import (
    Decided,
    EndTransaction,
    FinishTransactions,
    InitTransactions,
    MarkTransaction,
    Transaction,
)
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from tests.unit.client.forks import in_child
from tests.unit.client.producer import scripted
from tests.unit.client.producer.scripted import ScriptedPartition, ScriptedRoutes


class Coordinator:
    """Decides as it is asked, unless the script says otherwise: an error, or an error after it has decided."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.script: list[RayQueueError | tuple[RayQueueError]] = []
        self.epoch = 0
        self.decisions: dict[Transaction, bool] = {}

    async def call(self, call: Any, *, timeout_ms: int | None = None, idempotent: bool = True) -> Any:
        await asyncio.sleep(0.001)
        self.calls.append(call)
        problem = self.script.pop(0) if self.script and isinstance(call, EndTransaction | InitTransactions) else None
        if isinstance(problem, RayQueueError):
            if isinstance(problem, TransactionAbortedError) and isinstance(call, EndTransaction):
                self.epoch = max(self.epoch, call.epoch + 1)  # it has aborted it by itself
            raise problem
        answer = self._answer(call)
        if problem is not None:
            raise problem[0]
        return answer

    def _answer(self, call: Any) -> Any:
        if isinstance(call, InitTransactions):
            return Transaction(7, self.epoch)
        if isinstance(call, EndTransaction):
            pair = Transaction(call.producer_id, call.epoch)
            if pair not in self.decisions:
                assert pair.epoch == self.epoch
                self.decisions[pair] = call.commit
                self.epoch += 1
            seals = tuple(group.encode() for group in call.participants)
            return Decided(self.decisions[pair], seals, Transaction(7, pair.epoch + 1))
        assert isinstance(call, FinishTransactions)
        return None

    def of(self, kind: type) -> list[Any]:
        return [call for call in self.calls if isinstance(call, kind)]


class MarkedPartition(ScriptedPartition):
    """One that takes markers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.marks: list[MarkTransaction] = []
        self.marking = asyncio.Event()
        self.marking.set()
        self.mark_error: RayQueueError | None = None

    async def call(self, call: Any, **_: Any) -> Any:
        await self.marking.wait()
        if self.mark_error is not None:
            raise self.mark_error
        self.marks.append(call)
        return True


class Routes(ScriptedRoutes):
    def __init__(self, partitions: list[Any]) -> None:
        super().__init__(partitions)
        self.coordinator = Coordinator()  # type: ignore[assignment]


class Cluster:
    def __init__(self, partitions: int = 1, script: Any = ()) -> None:
        self.io = IoThread.shared()
        self.settings = Settings()
        self.partitions = [MarkedPartition(self.io.loop, iter(script)) for _ in range(partitions)]
        self.routes = Routes(self.partitions)
        self.coordinator: Coordinator = self.routes.coordinator  # type: ignore[assignment]

    def batches(self, partition: int = 0) -> list[tuple[int, int, int, bool, list[bytes | None]]]:
        """Producer id, epoch, sequence, flag and values of each."""
        found = [RecordBatch.decode(payload) for payload in self.partitions[partition].log.payloads]
        return [
            (each.header.producer_id, each.header.epoch, each.header.sequence, each.header.transactional, each.values())
            for each in found
        ]


Make = Callable[..., Producer[Any, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Producer[Any, Any]] = []

    def producer(cluster: Cluster, **options: Any) -> Producer[Any, Any]:
        kind = EncodingProducer if "value_serializer" in options else Producer
        made.append(kind(cluster, **{"transactional_id": "billing-1", **options}))
        return made[-1]

    yield producer
    for each in made:
        with contextlib.suppress(DeliveryFailedError, OutcomeUnknownError):
            each.close(timeout_ms=0)


def test_a_block_commits_what_it_has_sent(make: Make) -> None:
    cluster = Cluster(partitions=2)
    producer = make(cluster, transaction_timeout_ms=5000)
    with producer.transaction() as tx:
        tx.send("orders", b"a", partition=0)
        tx.send_many("orders", [b"b", b"c"], partition=1)
    (init,) = cluster.coordinator.of(InitTransactions)
    assert (init.transactional_id, init.timeout_ms, init.resume) == ("billing-1", 5000, False)
    (end,) = cluster.coordinator.of(EndTransaction)
    assert (end.commit, end.participants) == (True, ("orders-0.1", "orders-1.1"))
    for number in (0, 1):
        (mark,) = cluster.partitions[number].marks
        assert (mark.producer_id, mark.epoch, mark.commit, mark.seal) == (7, 0, True, b"orders-%d.1" % number)
    assert cluster.batches(0) == [(7, 0, 0, True, [b"a"])]
    assert cluster.batches(1) == [(7, 0, 0, True, [b"b", b"c"])]


def test_each_transaction_has_its_own_pair_and_begins_at_sequence_0(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    for number in range(3):
        with producer.transaction() as tx:
            tx.send("orders", b"%d" % number).result(timeout_ms=5000)
            tx.send("orders", b"%d again" % number)
    sequences = [(epoch, sequence) for _, epoch, sequence, _, _ in cluster.batches()]
    assert sequences == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [end.finished for end in cluster.coordinator.of(EndTransaction)] == [
        (),
        (Transaction(7, 0),),
        (Transaction(7, 1),),
    ]
    producer.close()
    assert cluster.coordinator.of(FinishTransactions)[0].finished == (Transaction(7, 2),)


def test_arrow_columns_and_values_of_a_form_go_the_same_way(make: Make) -> None:
    import pyarrow as pa

    cluster = Cluster()
    with make(cluster).transaction() as tx:
        tx.send_many("orders", pa.array([b"x", b"y"]))
    with make(cluster, value_serializer="json", transactional_id="other").transaction() as tx:
        tx.send("orders", {"a": 1})
    assert [(flag, values) for _, _, _, flag, values in cluster.batches()] == [
        (True, [b"x", b"y"]),
        (True, [b'{"a":1}']),
    ]


def test_an_exception_aborts_and_goes_on(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
        delivery = tx.send("orders", b"a")
        delivery.result(timeout_ms=5000)
        raise ZeroDivisionError
    (end,) = cluster.coordinator.of(EndTransaction)
    assert (end.commit, end.participants) == (False, ("orders-0.1",))
    wait_for(lambda: cluster.partitions[0].marks, "the marker")
    assert not cluster.partitions[0].marks[0].commit
    producer.close()  # and nothing of it is told as failed


def test_what_was_not_sent_yet_is_dropped_by_an_abort(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster, linger_ms=60_000)
    tx = producer.transaction()
    tx.begin()
    delivery = tx.send("orders", b"a")
    tx.abort()
    assert isinstance(delivery.exception(timeout_ms=5000), TransactionAbortedError)
    assert not cluster.coordinator.of(EndTransaction), "nobody has anything of it"
    with producer.transaction() as tx:
        tx.send("orders", b"b")
    assert cluster.batches() == [(7, 0, 0, True, [b"b"])]


def test_what_could_not_be_sent_dooms_it(make: Make) -> None:
    cluster = Cluster(script=[scripted.OK, scripted.INVALID])
    producer = make(cluster)
    with pytest.raises(TransactionAbortedError, match="bad batch"), producer.transaction() as tx:  # noqa: PT012
        tx.send("orders", b"a").result(timeout_ms=5000)
        failed = tx.send("orders", b"b")
        assert isinstance(failed.exception(timeout_ms=5000), InvalidInputError)
        wait_for(lambda: isinstance(refusal(lambda: tx.send("orders", b"c")), TransactionAbortedError), "a refusal")
    assert [end.commit for end in cluster.coordinator.of(EndTransaction)] == [False]
    with producer.transaction() as tx:
        tx.send("orders", b"d")
    assert cluster.batches()[-1] == (7, 1, 0, True, [b"d"])


def test_a_topic_that_is_gone_dooms_it_too(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    with producer.transaction() as tx:
        tx.send("orders", b"a")
    cluster.partitions[0].leaderless = UnknownTopicError("gone", topic="orders")
    for channel in cluster.partitions[0].channels:
        channel.closed = True
    with pytest.raises(TransactionAbortedError, match="gone"), producer.transaction() as tx:
        tx.send("orders", b"b")


def refusal(call: Callable[[], Any]) -> RayQueueError | None:
    try:
        call()
    except RayQueueError as error:
        return error
    return None


def test_outside_of_a_transaction_nothing_is_taken(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    for send in (producer.send, producer.send_many):
        with pytest.raises(InvalidInputError, match="no transaction is open"):
            send("orders", [b"a"] if send is producer.send_many else b"a")
    with pytest.raises(InvalidInputError, match="no transaction is open"):
        asyncio.run(producer.send_async("orders", b"a"))
    tx = producer.transaction()
    with pytest.raises(InvalidInputError, match="has not begun"):
        tx.send("orders", b"a")
    with tx:
        producer.send("orders", b"a")  # the same as tx.send: there is one transaction
    for call in (lambda: tx.send("orders", b"a"), tx.commit, tx.abort):
        with pytest.raises(InvalidInputError, match="is over"):
            call()
    with pytest.raises(InvalidInputError, match="used once"):
        tx.begin()
    with pytest.raises(InvalidInputError, match="transactional_id"):
        make(cluster, transactional_id=None).transaction()
    for wrong in ({"transactional_id": ""}, {"transactional_id": 5}, {"acks": "leader"}):
        with pytest.raises(InvalidInputError):
            make(cluster, **wrong)


def test_two_at_once_are_refused(make: Make) -> None:
    producer = make(Cluster())
    with producer.transaction() as tx:
        with pytest.raises(InvalidInputError, match="one at a time"):
            producer.transaction().begin()
        tx.send("orders", b"a")


def test_no_answer_to_the_end_is_unknown_and_asking_again_tells(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    tx = producer.transaction()
    tx.begin()
    tx.send("orders", b"a")
    cluster.coordinator.script = [(OutcomeUnknownError("the connection broke"),)] * 2
    with pytest.raises(OutcomeUnknownError, match="is not known"):
        tx.commit()
    with pytest.raises(OutcomeUnknownError):
        tx.abort()
    tx.commit()
    assert cluster.coordinator.decisions == {Transaction(7, 0): True}
    assert [mark.commit for mark in cluster.partitions[0].marks] == [True]


def test_a_lost_answer_is_asked_for_again_and_is_no_abort_if_somebody_else_came(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    with producer.transaction() as tx:
        tx.send("orders", b"a")
        cluster.coordinator.script = [(OutcomeUnknownError("the connection broke"),)]
    assert cluster.coordinator.decisions == {Transaction(7, 0): True}
    tx = producer.transaction()
    tx.begin()
    tx.send("orders", b"b")
    cluster.coordinator.script = [(OutcomeUnknownError("the connection broke"),), ProducerFencedError("newer")]
    with pytest.raises(OutcomeUnknownError, match="all of it, or nothing"):
        tx.commit()
    with pytest.raises(ProducerFencedError, match="must stop"):
        producer.transaction().begin()


def test_aborted_by_its_timeout_and_fenced_are_told_apart(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)

    def one(value: bytes) -> None:
        with producer.transaction() as tx:
            tx.send("orders", value)

    producer.transaction()  # made, never begun: holds up nobody
    one(b"a")
    cluster.coordinator.script = [TransactionAbortedError("it took too long")]
    with pytest.raises(TransactionAbortedError, match="too long"):
        one(b"b")
    cluster.coordinator.epoch = 5
    one(b"c")
    first, resumed = cluster.coordinator.of(InitTransactions)
    assert (first.attempt, resumed.resume) == (resumed.attempt, True)
    cluster.coordinator.script = [ProducerFencedError("newer")]
    with pytest.raises(ProducerFencedError, match="must stop"):
        one(b"d")
    with pytest.raises(ProducerFencedError, match="must stop"):
        one(b"e")


def test_the_next_one_begins_while_markers_are_on_their_way(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    cluster.partitions[0].marking.clear()
    with producer.transaction(wait_visible=False) as tx:
        tx.send("orders", b"a")
    second = producer.transaction()
    second.begin()
    second.send("orders", b"b").result(timeout_ms=5000)
    assert not cluster.partitions[0].marks
    cluster.io.loop.call_soon_threadsafe(cluster.partitions[0].marking.set)
    second.commit()
    assert [mark.epoch for mark in cluster.partitions[0].marks] == [0, 1], "and in their order"


def test_a_send_lands_in_the_transaction_that_it_was_made_in_or_in_none(make: Make) -> None:
    """Also if it comes so late that the next one has begun: a thread has it under way, say."""
    cluster = Cluster()
    producer = make(cluster)
    with producer.transaction() as tx:
        send, send_many, send_async = tx.send, tx.send_many, tx.send_async
        send("orders", b"a")
    with producer.transaction() as tx:
        for late in (send, lambda *given: send_many(given[0], [given[1]])):
            with pytest.raises(InvalidInputError, match="over"):
                late("orders", b"late")
        with pytest.raises(InvalidInputError, match="over"):
            asyncio.run(send_async("orders", b"late"))
        tx.send("orders", b"b")
    assert [(epoch, values) for _, epoch, _, _, values in cluster.batches()] == [(0, [b"a"]), (1, [b"b"])]


def test_records_of_a_transaction_that_may_go_anywhere_stay_together(make: Make) -> None:
    cluster = Cluster(partitions=4)
    producer = make(cluster)
    for _ in range(4):
        with producer.transaction() as tx:
            tx.send_many("orders", [b"x" * 100] * 1000)
            for _ in range(100):
                tx.send("orders", b"y")
    ends = cluster.coordinator.of(EndTransaction)
    assert [len(end.participants) for end in ends] == [1, 1, 1, 1], "each costs a marker"
    assert {end.participants for end in ends} == {(f"orders-{number}.1",) for number in range(4)}, "in turn"


def test_a_commit_whose_markers_cannot_be_carried_is_a_commit(make: Make) -> None:
    cluster = Cluster(partitions=2)
    producer = make(cluster)
    cluster.partitions[0].mark_error = NotLeaderError("nobody leads", leader=None)
    cluster.partitions[1].mark_error = UnknownTopicError("deleted", topic="orders")
    with producer.transaction() as tx:
        tx.send("orders", b"a", partition=0)
        tx.send("orders", b"b", partition=1)
    cluster.partitions[0].mark_error = cluster.partitions[1].mark_error = None
    with producer.transaction() as tx:
        tx.send("orders", b"c", partition=0)
    assert cluster.coordinator.of(EndTransaction)[1].finished == (), "the coordinator must see to the first"


def test_async_twins(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)

    async def main() -> None:
        async with producer.transaction() as tx:
            assert (await tx.send_async("orders", b"a")).offset == 0
            await tx.send_many_async("orders", [b"b"])
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction() as tx:
                await tx.send_async("orders", b"c")
                raise ZeroDivisionError

        async def waits() -> None:
            async with producer.transaction() as tx:
                await tx.send_async("orders", b"d")
                await asyncio.sleep(60)

        task = asyncio.ensure_future(waits())
        while len(cluster.batches()) < 4:  # noqa: ASYNC110  # a real thread does it
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [end.commit for end in cluster.coordinator.of(EndTransaction)] == [True, False, False]


def test_whoever_is_cancelled_while_it_begins_leaves_nothing_open(make: Make) -> None:
    producer = make(Cluster())

    async def main() -> None:
        begins = asyncio.ensure_future(producer.transaction().begin_async())
        await asyncio.sleep(0)
        begins.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begins

    asyncio.run(main())
    with producer.transaction() as tx:
        tx.send("orders", b"a")


@pytest.mark.slow
def test_what_found_no_space_dooms_it_though_a_flush_has_told_so(make: Make) -> None:
    cluster = Cluster(script=[scripted.SILENT] * 3)
    producer = make(cluster, buffer_bytes=3000, batch_bytes=1000, delivery_timeout_ms=400)
    with pytest.raises(TransactionAbortedError), producer.transaction() as tx:  # noqa: PT012
        tx.send_many("orders", [bytes(900)] * 10)
        with pytest.raises(DeliveryFailedError):
            producer.flush()


def test_close_aborts_what_is_open(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    producer = make(cluster)
    tx = producer.transaction()
    tx.begin()
    tx.send("orders", b"a").result(timeout_ms=5000)
    producer.close()
    assert [end.commit for end in cluster.coordinator.of(EndTransaction)] == [False]
    assert "is aborted" in caplog.text
    with pytest.raises(ClosedError):
        producer.transaction().begin()
    with pytest.raises((ClosedError, InvalidInputError)):
        tx.commit()


def test_it_stays_in_its_process(make: Make) -> None:
    producer = make(Cluster())
    with pytest.raises(InvalidInputError, match="stays in its process"):
        producer.__reduce__()
    with producer.transaction() as tx:
        tx.send("orders", b"a")
        with pytest.raises(InvalidInputError, match="stays in its process"):
            tx.__reduce__()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_can_neither_send_nor_end_it(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    tx = producer.transaction()
    tx.begin()

    def child() -> None:
        for call in (lambda: tx.send("orders", b"x"), tx.commit, tx.abort, producer.transaction):
            assert isinstance(refusal(call), ForkedError)
        tx.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # what the block has raised goes on
        producer.close()

    in_child(child)
    tx.send("orders", b"a")
    tx.commit()
    assert cluster.coordinator.decisions == {Transaction(7, 0): True}


def test_sends_of_other_threads_are_in_it_or_refused(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    taken: list[int] = []
    refused = threading.Event()
    tx = producer.transaction()
    tx.begin()

    def sends() -> None:
        for number in range(1_000_000):
            try:
                producer.send("orders", b"%d" % number)
            except InvalidInputError:
                refused.set()
                return
            taken.append(number)

    thread = threading.Thread(target=sends)
    thread.start()
    wait_for(lambda: len(taken) > 100, "some sends")
    tx.commit()
    thread.join()
    assert refused.is_set()
    written = [int(value or b"") for *_, values in cluster.batches() for value in values]
    assert written == taken, "every send that returned is in the transaction, and nothing else is"


# -- ends that nobody waits for ------------------------------------------------------------


def epochs(cluster: Cluster, partition: int = 0) -> dict[int, list[bytes | None]]:
    """The values of each pair."""
    found: dict[int, list[bytes | None]] = {}
    for _, epoch, _, _, values in cluster.batches(partition):
        found.setdefault(epoch, []).extend(values)
    return found


def committed(cluster: Cluster) -> list[bytes | None]:
    decided = cluster.coordinator.decisions
    return [each for epoch, values in epochs(cluster).items() if decided.get(Transaction(7, epoch)) for each in values]


def held_up(cluster: Cluster) -> tuple[asyncio.Event, threading.Event]:
    """Ends are answered once the first of these is set; the second says that one was asked for."""
    gate, asked_for = cluster.io.call(_event()), threading.Event()
    call = cluster.coordinator.call

    async def slow(asked: Any, **options: Any) -> Any:
        if isinstance(asked, EndTransaction):
            asked_for.set()
            await gate.wait()
        return await call(asked, **options)

    cluster.coordinator.call = slow  # type: ignore[method-assign, assignment]
    return gate, asked_for


def test_transactions_that_end_while_one_is_decided_are_decided_together(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    made = []
    for number in range(300):
        with producer.transaction(wait=False) as tx:
            tx.send("orders", b"%d" % number)
            tx.send_many("orders", [b"%d again" % number])
        made.append(tx)
    producer.flush(timeout_ms=10_000)
    for tx in made:
        tx.wait_committed()
    sent = [value for number in range(300) for value in (b"%d" % number, b"%d again" % number)]
    assert committed(cluster) == sent, "all, once, in their order"
    ends = cluster.coordinator.of(EndTransaction)
    assert len(ends) < 100, "the coordinator takes 1 ms for each"
    with producer.transaction() as tx:
        tx.send("orders", b"last")
    assert committed(cluster) == [*sent, b"last"]
    producer.close()
    assert len({mark.epoch for mark in cluster.partitions[0].marks}) == len(ends) + 1


def test_if_one_is_not_committed_none_after_it_is_and_that_is_told(make: Make) -> None:
    cluster = Cluster()
    producer, coordinator = make(cluster), cluster.coordinator
    gate, asked_for = held_up(cluster)
    made = []
    for number in range(3):
        with producer.transaction(wait=False) as tx:
            tx.send("orders", b"%d" % number)
        made.append(tx)
        assert asked_for.wait(5)
    open_one = producer.transaction(wait=False)
    open_one.begin()
    open_one.send("orders", b"open")
    coordinator.script = [TransactionAbortedError("it took too long")]
    cluster.io.loop.call_soon_threadsafe(gate.set)
    with pytest.raises(TransactionAbortedError, match="too long"):
        made[0].wait_committed()
    for tx in made[1:]:
        with pytest.raises(TransactionAbortedError, match="one before it"):
            tx.wait_committed()
    with pytest.raises(RayQueueError):
        open_one.send("orders", b"more")
    with pytest.raises(TransactionAbortedError, match="one before it"):
        open_one.commit()
    coordinator.epoch = 5
    with producer.transaction(wait=False) as tx:
        tx.send("orders", b"again")
    producer.flush(timeout_ms=5000)
    assert committed(cluster) == [b"again"]
    assert epochs(cluster) == {0: [b"0"], 5: [b"again"]}, "what was held back was never sent"


def test_what_is_held_back_for_too_long_is_lost_and_what_was_decided_is_not(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster, delivery_timeout_ms=300)
    gate, asked_for = held_up(cluster)
    with producer.transaction(wait=False) as first:
        first.send("orders", b"first")
    assert asked_for.wait(5)
    with producer.transaction(wait=False) as second:
        delivery = second.send("orders", b"second")
    third = producer.transaction(wait=False)
    third.begin()
    with pytest.raises(RayQueueError):
        delivery.result(timeout_ms=5000)
    with pytest.raises(TransactionAbortedError):
        third.send("orders", b"third")
    assert producer._transactions is not None
    assert producer._transactions.behind.begin() is None, "none begins behind it before that was told"
    with pytest.raises(TransactionAbortedError):
        second.wait_committed()
    cluster.io.loop.call_soon_threadsafe(gate.set)
    first.wait_committed()
    with pytest.raises(TransactionAbortedError):
        third.commit()
    with producer.transaction() as tx:
        tx.send("orders", b"last")
    assert committed(cluster) == [b"first", b"last"]


@pytest.mark.parametrize("who", ["begin", "flush", "close"])
def test_what_nobody_has_asked_for_is_told_once(make: Make, who: str) -> None:
    cluster = Cluster()
    producer = make(cluster)
    with producer.transaction(wait=False) as tx:
        tx.send("orders", b"a")
        cluster.coordinator.script = [TransactionAbortedError("it took too long")]
        cluster.coordinator.epoch = 5
    wait_for(lambda: tx._deferred is not None and tx._deferred.decided.done(), "the decision")
    with pytest.raises(TransactionAbortedError, match="too long"):
        {"begin": producer.transaction(wait=False).begin, "flush": producer.flush, "close": producer.close}[who]()
    if who != "close":
        with producer.transaction() as tx:
            tx.send("orders", b"b")
    producer.close()


def test_a_block_that_fails_takes_none_with_it(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    for number in range(20):
        with contextlib.suppress(ZeroDivisionError), producer.transaction(wait=False) as tx:
            tx.send("orders", b"%d" % number)
            if number % 5 == 3:
                raise ZeroDivisionError
    producer.flush(timeout_ms=5000)
    assert committed(cluster) == [b"%d" % number for number in range(20) if number % 5 != 3]


def test_a_batch_that_is_refused_is_told_and_nothing_after_it_is_committed(make: Make) -> None:
    cluster = Cluster(script=[scripted.OK, scripted.INVALID])
    producer = make(cluster)
    sent: list[bytes] = []

    def send_all() -> None:
        for number in range(1000):
            with producer.transaction(wait=False) as tx:
                tx.send("orders", b"%d" % number)
            sent.append(b"%d" % number)
        producer.flush(timeout_ms=5000)

    with pytest.raises(TransactionAbortedError):
        send_all()
    done = committed(cluster)
    assert done == sent[: len(done)], "what is committed is what was sent first"
    assert len(done) < len(sent)
    with producer.transaction(wait=False) as tx:
        tx.send("orders", b"again")
    producer.flush(timeout_ms=5000)
    assert committed(cluster) == [*done, b"again"]


def test_more_than_the_buffer_goes_while_its_block_lasts(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster, buffer_bytes=2000)
    for number in range(5):
        with producer.transaction(wait=False) as tx:
            for _ in range(10):
                tx.send("orders", b"%d" % number * 500)
            tx.send("orders", b"%d" % number * 500).result(timeout_ms=5000)
    producer.flush(timeout_ms=5000)
    assert len(committed(cluster)) == 55


def test_what_a_transaction_without_waiting_cannot_do_says_so(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    with producer.transaction(wait=False) as tx:
        with pytest.raises(InvalidInputError, match="waited for"):
            tx.ack()
        with pytest.raises(InvalidInputError, match="waited for"):
            tx.commit_offsets(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="has not ended"):
            tx.wait_committed()
        with pytest.raises(InvalidInputError, match="is open"):
            producer.transaction(wait=False).begin()
        with pytest.raises(InvalidInputError, match="is open"):
            producer.transaction().begin()
        tx.send("orders", b"a")
    with pytest.raises(InvalidInputError, match="no transaction"):
        producer.send("orders", b"between")
    left = producer.transaction(wait=False)
    left.begin()
    left.send("orders", b"left")
    producer.close()
    with pytest.raises(RayQueueError):
        left.commit()
    assert committed(cluster) == [b"a"]


def test_they_can_be_awaited(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)

    async def main() -> None:
        for number in range(150):
            async with producer.transaction(wait=False) as tx:
                tx.send("orders", b"%d" % number)
        await tx.wait_committed_async()

    asyncio.run(main())
    assert committed(cluster) == [b"%d" % number for number in range(150)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_what_is_told_is_what_readers_see(make: Make, seed: int) -> None:
    """Blocks that fail, batches that are refused, aborts by the coordinator, lost answers; waited for or not."""
    rng, fates = Random(seed), Random(seed)
    actions = rng.choices((scripted.OK, scripted.NOT_LEADER, scripted.INVALID), (60, 2, 1), k=400)
    cluster = Cluster(script=actions)
    coordinator = cluster.coordinator
    decide = coordinator._answer

    def answer(call: Any) -> Any:
        if not isinstance(call, EndTransaction) or call.epoch != coordinator.epoch:
            return decide(call)
        chance = fates.random()
        if chance < 0.05 and call.commit:
            coordinator.decisions[Transaction(7, call.epoch)] = False
            coordinator.epoch += 1
            raise TransactionAbortedError("an operator ended it")
        answered = decide(call)
        if chance > 0.9:
            raise OutcomeUnknownError("the answer was lost")
        return answered

    coordinator._answer = answer  # type: ignore[method-assign]
    producer = make(cluster)
    made: list[tuple[bytes, Any]] = []
    told: dict[bytes, bool] = {}
    for number in range(120):
        value = b"%d" % number
        tx = producer.transaction(wait=rng.random() < 0.1)
        try:
            with tx:
                tx.send("orders", value)
                if rng.random() < 0.1:
                    raise ZeroDivisionError
                if not tx._waits:
                    made.append((value, tx))
            if tx._waits:
                told[value] = True
        except (ZeroDivisionError, TransactionAbortedError):
            told[value] = False
    with contextlib.suppress(TransactionAbortedError):
        producer.flush(timeout_ms=20_000)
    for value, tx in made:
        if value not in told:
            try:
                tx.wait_committed()
                told[value] = True
            except TransactionAbortedError:
                told[value] = False
    assert committed(cluster) == [b"%d" % number for number in range(120) if told[b"%d" % number]]


# -- failures, and who is told of them ---------------------------------------------------------


def tasks_of(producer: Producer[Any, Any]) -> TransactionTasks:
    assert producer._transactions is not None
    return producer._transactions


def unreachable(cluster: Cluster) -> asyncio.Event:
    """The partition has no leader until this is set."""
    partition, gate = cluster.partitions[0], cluster.io.call(_event())
    leader = partition.leader

    async def late() -> Any:
        await gate.wait()
        return await leader()

    partition.leader = late  # type: ignore[method-assign]
    return gate


def test_what_is_refused_before_anybody_begins_to_decide_holds_up_nobody(make: Make) -> None:
    """Its end is asked for, and a batch of it is refused before the I/O thread gets to it."""
    cluster = Cluster(script=[scripted.INVALID])
    producer = make(cluster, linger_ms=60_000)  # its batches go with its end
    tasks = tasks_of(producer)
    tx = producer.transaction(wait=False)
    tx.begin()
    tx.send("orders", b"refused")
    cluster.io.call(tasks._turn.acquire())
    tx.commit()
    wait_for(lambda: tasks.life.state is State.DOOMED, "the refusal")
    cluster.io.loop.call_soon_threadsafe(tasks._turn.release)
    with pytest.raises(TransactionAbortedError, match="bad batch"):
        tx.wait_committed()
    with producer.transaction() as after:
        after.send("orders", b"after")
    assert committed(cluster) == [b"after"]


def test_what_begins_behind_a_refused_one_that_nobody_was_told_of_is_lost_with_it(make: Make) -> None:
    """Whoever begins it was told of another failure meanwhile."""
    cluster = Cluster(script=[scripted.INVALID])
    producer = make(cluster, linger_ms=60_000)
    tasks = tasks_of(producer)
    tx = producer.transaction(wait=False)
    tx.begin()
    tx.send("orders", b"refused")
    cluster.io.call(tasks._turn.acquire())
    tx.commit()
    wait_for(lambda: tasks.life.state is State.DOOMED, "the refusal")
    tasks.behind.error = None
    begun = tasks.behind.begin()
    assert begun is not None
    cluster.io.loop.call_soon_threadsafe(tasks._turn.release)
    assert isinstance(begun.decided.exception(5), TransactionAbortedError)
    with pytest.raises(TransactionAbortedError):
        producer.flush(timeout_ms=5000)
    with producer.transaction() as after:
        after.send("orders", b"after")
    assert committed(cluster) == [b"after"]


def test_what_fails_while_it_is_held_back_takes_nothing_before_it_with_it(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    tasks, gate = tasks_of(producer), unreachable(cluster)
    made = []
    for number in range(4):
        with producer.transaction(wait=False) as tx:
            tx.send("orders", b"%d" % number)
        made.append(tx)
        wait_for(lambda: tasks.life.state is State.FLUSHING, "the first one's flush")
    tasks.lost(QueueFullError("no space"), made[2]._number)
    for tx in made[2:]:
        with pytest.raises(TransactionAbortedError, match="no space"):
            tx.wait_committed()
    with producer.transaction(wait=False) as tx:  # that was told
        tx.send("orders", b"again")
    cluster.io.loop.call_soon_threadsafe(gate.set)
    producer.flush(timeout_ms=5000)
    for each in (*made[:2], tx):
        each.wait_committed()
    assert committed(cluster) == [b"0", b"1", b"again"]


def test_what_was_never_accepted_of_a_later_one_is_none_of_an_earlier_one(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    tasks, gate = tasks_of(producer), unreachable(cluster)
    with producer.transaction(wait=False) as first:
        first.send("orders", b"first")
    wait_for(lambda: tasks.life.state is State.FLUSHING, "its flush")
    with producer.transaction(wait=False) as second:
        second.send("orders", b"second")
        full = QueueFullError("no space")
        producer._accumulator.note_failure(failed_outcome("orders", 0, full), 1)
    cluster.io.loop.call_soon_threadsafe(gate.set)
    first.wait_committed()
    with pytest.raises(TransactionAbortedError, match="no space"):
        second.wait_committed()
    with producer.transaction() as tx:
        tx.send("orders", b"last")
    assert committed(cluster) == [b"first", b"last"]


@pytest.mark.parametrize("refused", [False, True])
def test_whoever_is_told_of_a_failure_may_begin_the_next_one_at_once(make: Make, refused: bool) -> None:
    """In the moment in which it is told: nothing of the failure is left then."""
    cluster = Cluster(script=[scripted.INVALID] if refused else ())
    producer = make(cluster)
    tasks, gate = tasks_of(producer), unreachable(cluster)
    with producer.transaction(wait=False) as first:
        first.send("orders", b"first")
    wait_for(lambda: tasks.life.state is State.FLUSHING, "its flush")
    open_one = producer.transaction(wait=False)
    open_one.begin()
    open_one.send("orders", b"open")
    assert first._deferred is not None
    seen: list[Any] = []

    def told(_: Any) -> None:
        seen.append(refusal(lambda: open_one.send("orders", b"late")))
        tasks.behind.error = None  # as ``wait_committed`` does
        seen.append(tasks.behind.begin())

    first._deferred.decided.add_done_callback(told)
    if not refused:
        cluster.coordinator.script = [TransactionAbortedError("it took too long")]
    cluster.io.loop.call_soon_threadsafe(gate.set)
    with pytest.raises(TransactionAbortedError):
        first.wait_committed()
    wait_for(lambda: len(seen) == 2, "who is told")
    assert isinstance(seen[0], TransactionAbortedError), "what is behind it is lost by then"
    begun = seen[1]
    assert begun is not None
    wait_for(lambda: refusal(lambda: producer.send("orders", b"next")) is None, "and the next one takes records")
    assert tasks.behind.end(begun, lambda: cluster.io.run(tasks.commit_behind()))
    begun.decided.result(5)
    assert set(committed(cluster)) == {b"next"}


@pytest.mark.parametrize("ended", [False, True])
def test_close_keeps_its_time_though_the_coordinator_does_not_answer(make: Make, ended: bool) -> None:
    cluster = Cluster()
    producer = make(cluster)
    gate, asked_for = held_up(cluster)
    tx = producer.transaction(wait=False)
    tx.begin()
    tx.send("orders", b"a").result(timeout_ms=5000)
    if ended:
        tx.commit()
        assert asked_for.wait(5)
    told: list[RayQueueError | None] = []
    closing = threading.Thread(target=lambda: told.append(refusal(lambda: producer.close(timeout_ms=200))))
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    assert isinstance(told[0], OutcomeUnknownError if ended else type(None)), "whether it is committed is not known"
    assert asked_for.wait(5), "it goes on"
    cluster.io.loop.call_soon_threadsafe(gate.set)
    wait_for(lambda: cluster.coordinator.decisions == {Transaction(7, 0): ended}, "the decision")
    with pytest.raises(ClosedError):
        producer.transaction().begin()


async def _event() -> asyncio.Event:
    return asyncio.Event()
