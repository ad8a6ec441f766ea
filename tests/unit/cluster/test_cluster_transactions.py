"""Transactions at the coordinator: who has an id, what was decided, and what partitions are told."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.cluster import commands
from rayqueue.cluster.coordinator import EXPIRE_EVERY_S
from rayqueue.cluster.transactions import EXPIRED_AT_ONCE
from rayqueue.errors import (
    BatchConflictError,
    InvalidInputError,
    NotLeaderError,
    ProducerFencedError,
    RayQueueError,
    TooManyTransactionsError,
    TransactionAbortedError,
    TransactionError,
    TransactionTooLargeError,
    UnknownTransactionError,
)
from rayqueue.partition.settings import PartitionSettings
from rayqueue.protocol.transactions import (
    IDS_BOUND,
    MAX_EPOCH,
    MAX_WRITE_TASKS,
    AbortTransaction,
    Decided,
    EndTransaction,
    EndWrite,
    FinishTransactions,
    ForgetTransactionalId,
    InitTransactions,
    JoinWrite,
    ListTransactions,
    OpenFor,
    ResolveTransactions,
    Transaction,
    WriteEnded,
    WritePart,
)
from tests.unit.cluster.cluster_state import SEALS, ClusterLog, Service

NOW_MS = 1_700_000_000_000


@pytest.fixture
def log() -> ClusterLog:
    return ClusterLog()


def init(log: ClusterLog, attempt: str = "a", name: str = "billing", **fields: Any) -> Any:
    given: dict[str, Any] = {"timeout_ms": 1_000, "owner": "host", "resume": False, "now_ms": NOW_MS} | fields
    return log.apply(commands.InitTransactions(name, attempt, **given))


def end(
    log: ClusterLog, at: Transaction, commit: bool = True, groups: tuple[str, ...] = ("p", "q"), **fields: Any
) -> Any:
    given: dict[str, Any] = {"finished": (), "now_ms": NOW_MS} | fields
    return log.apply(
        commands.EndTransaction("billing", at.producer_id, at.epoch, commit, groups, **given),
    )


def fate(log: ClusterLog, at: Transaction, group: str = "p") -> str:
    return log.machine.transactions.fate((at.producer_id, at.epoch), group)


# -- the machine ---------------------------------------------------------------------------


def test_each_pair_is_given_once(log: ClusterLog) -> None:
    first = init(log)
    second = end(log, first)
    third = end(log, second, commit=False)
    assert [each.producer_id for each in (first, second, third)] == [first.producer_id] * 3
    assert [each.epoch for each in (first, second, third)] == [0, 1, 2]
    fourth = init(log, "b")
    assert fourth.epoch == 3
    assert init(log, name="other").producer_id != first.producer_id


def test_a_repetition_is_answered_as_the_first_time(log: ClusterLog) -> None:
    first = init(log)
    assert init(log) == first
    second = end(log, first)
    assert end(log, first) == second
    assert init(log) == second  # late; nobody listens
    assert fate(log, first) == "committed"
    assert isinstance(end(log, first, commit=False), TransactionError)
    assert isinstance(end(log, first, groups=("p",)), TransactionError)
    third = end(log, second, commit=False)
    assert end(log, second, commit=False) == third
    assert isinstance(end(log, second), TransactionAbortedError)


def test_a_newer_producer_fences_the_older(log: ClusterLog) -> None:
    first = init(log)
    other = init(log, "b")
    assert fate(log, first) == "aborted"
    assert fate(log, other) == "open"
    for commit in (True, False):
        assert isinstance(end(log, first, commit=commit), ProducerFencedError)
    assert isinstance(init(log, "a", resume=True), ProducerFencedError)
    assert init(log, "b", resume=True) == other
    assert isinstance(init(log, "c", name="never", resume=True), UnknownTransactionError)


def test_who_is_fenced_is_told_of_a_commit_as_long_as_it_is_known(log: ClusterLog) -> None:
    """Its first answer was lost, and another producer came before it asked again."""
    first = init(log)
    end(log, first)
    init(log, "b")

    def told(commit: bool) -> Any:
        error = end(log, first, commit=commit)
        assert isinstance(error, ProducerFencedError)
        return error.details.get("committed")

    assert (told(True), told(False)) == (True, None)
    log.apply(commands.FinishTransactions(((first.producer_id, first.epoch),)))
    assert told(True) is None


def test_what_somebody_else_aborts_cannot_be_committed(log: ClusterLog) -> None:
    first = init(log)
    keys = ((first.producer_id, first.epoch), (99, 0))
    assert log.apply(commands.AbortTransactions(keys, "late", NOW_MS)) == (True, False)
    assert log.apply(commands.AbortTransactions(keys, "late", NOW_MS)) == (False, False)
    refused = end(log, first)
    assert isinstance(refused, TransactionAbortedError)
    assert "late" in str(refused)
    assert init(log, resume=True) == Transaction(first.producer_id, 1)
    assert fate(log, first) == "aborted"


def test_a_commit_is_kept_until_every_participant_has_its_marker(log: ClusterLog) -> None:
    first = init(log)
    first_key = (key(first),)
    second = end(log, first)
    assert [fate(log, first, group) for group in ("p", "q", "r")] == ["committed", "committed", "aborted"]
    log.apply(commands.FinishTransactions(first_key, "p"))
    assert [fate(log, first, group) for group in ("p", "q")] == ["aborted", "committed"]
    log.restart()
    assert [fate(log, first, group) for group in ("p", "q")] == ["aborted", "committed"]
    end(log, second, finished=first_key)
    assert [row.epoch for row in log.machine.transactions.commits.values()] == [1]


def test_nobody_finishes_what_is_another_s(log: ClusterLog) -> None:
    first = init(log)
    end(log, first)
    other = init(log, name="other")
    log.apply(
        commands.EndTransaction(
            "other", other.producer_id, 0, True, ("p",), ((first.producer_id, first.epoch),), NOW_MS
        )
    )
    assert fate(log, first) == "committed"


def test_the_highest_epoch_is_followed_by_another_producer(log: ClusterLog) -> None:
    first = init(log)
    row = log.machine.transactions.ids["billing"]
    log.machine.transactions._put(type(row)("billing", first.producer_id, MAX_EPOCH, 1_000, "", "a", NOW_MS))
    last = Transaction(first.producer_id, MAX_EPOCH)
    then = end(log, last)
    assert then.producer_id != first.producer_id
    assert then.epoch == 0
    assert (fate(log, last), fate(log, then)) == ("committed", "open")
    assert end(log, last) == then
    log.restart()
    assert (fate(log, last), fate(log, then)) == ("committed", "open")


def test_unused_ids_are_forgotten_and_their_transactions_are_aborted(log: ClusterLog) -> None:
    first = init(log)
    end(log, first)
    second = init(log, name="other")
    late_ms = NOW_MS + 10_000
    assert log.apply(commands.ExpireTransactionalIds(late_ms, 9_000)) == ("other",)  # the first has a commit to tell of
    assert fate(log, second) == "aborted"
    log.apply(commands.FinishTransactions(((first.producer_id, first.epoch),)))
    assert log.apply(commands.ExpireTransactionalIds(late_ms, 9_000)) == ("billing",)
    assert isinstance(end(log, Transaction(first.producer_id, 1)), UnknownTransactionError)
    for number in range(EXPIRED_AT_ONCE + 1):
        init(log, name=f"n{number}")
    assert len(log.apply(commands.ExpireTransactionalIds(2 * late_ms, 1))) == EXPIRED_AT_ONCE


def test_who_is_the_last_of_a_run_gives_its_id_back(log: ClusterLog) -> None:
    def forget(attempt: str, name: str = "billing") -> Any:
        return log.apply(commands.ForgetTransactionalId(name, attempt, NOW_MS))

    first = init(log)
    second = end(log, first)
    assert not forget("a"), "a commit is still to be told"
    log.apply(commands.FinishTransactions((key(first),)))
    assert not forget("b"), "it is another one's"
    assert not forget("a", "never")
    assert forget("a")
    assert not forget("a"), "a repetition"
    log.restart()
    assert log.machine.transactions.ids == {}
    assert (fate(log, first), fate(log, second)) == ("aborted", "aborted")
    assert isinstance(end(log, second), UnknownTransactionError), "what is late counts for nothing"
    assert init(log, "c").producer_id > first.producer_id


def test_an_id_makes_room_unless_something_is_to_be_done_of_it(log: ClusterLog) -> None:
    first = init(log)
    end(log, first)
    (task,) = (log.apply(commands.JoinWrite("w/1", "w", 1, 1_000, "", NOW_MS, evict="billing")),)
    assert sorted(log.machine.transactions.ids) == ["billing", f"task.{task.producer_id}"], "its commit is to be told"
    log.apply(commands.FinishTransactions((key(first),)))
    init(log, name="other", evict=f"task.{task.producer_id}")
    assert fate(log, task) == "open", "a task's is not evicted"
    init(log, "b", name="other", evict="billing")
    assert "billing" in log.machine.transactions.ids, "nobody came in addition"
    init(log, name="third", evict="billing")
    log.restart()
    assert sorted(log.machine.transactions.ids) == ["other", f"task.{task.producer_id}", "third"]


def test_a_checkpoint_has_all_of_it(log: ClusterLog) -> None:
    first = init(log)
    second = end(log, first)
    twin = ClusterLog()
    twin.machine.restore(log.machine.checkpoint())
    assert fate(twin, first) == "committed"
    assert end(twin, first) == second


# -- tasks that write together ----------------------------------------------------------------


def join(log: ClusterLog, write: str = "w/1", **fields: Any) -> Any:
    given: dict[str, Any] = {"writer": "w", "batch_id": 1, "timeout_ms": 1_000, "owner": "o", "now_ms": NOW_MS} | fields
    return log.apply(commands.JoinWrite(write, **given))


def end_write(log: ClusterLog, *parts: Transaction, write: str = "w/1", **fields: Any) -> Any:
    given: dict[str, Any] = {
        "writer": "w",
        "batch_id": 1,
        "identity": b"",
        "once": False,
        "commit": True,
        "parts": tuple((each.producer_id, each.epoch, ("p", "q")) for each in parts),
        "max_writers": 10,
        "retention_ms": 1_000,
        "now_ms": NOW_MS,
    }
    return log.apply(commands.EndWrite(write, **{**given, **fields}))


def key(of: Transaction) -> tuple[int, int]:
    return of.producer_id, of.epoch


def test_a_write_ends_for_all_tasks_at_once(log: ClusterLog) -> None:
    first, second, failed, other = join(log), join(log), join(log), join(log, "x/1", writer="x")
    assert len({each.producer_id for each in (first, second, failed, other)}) == 4
    assert end_write(log, first, second) == (True, (key(failed),))
    for _ in range(2):
        fates = [fate(log, each) for each in (first, second, failed, other)]
        assert fates == ["committed", "committed", "aborted", "open"]
        assert fate(log, first, "r") == "aborted"
        assert isinstance(join(log), TransactionAbortedError)  # its batch is written
        assert end_write(log, first, second) == (False, ())
        log.restart()


def test_no_task_gets_the_transaction_of_another(log: ClusterLog) -> None:
    """Producer ids are used again, pairs never."""
    given = []
    for number in range(5):
        tasks = [join(log, f"w/{number}", batch_id=number) for _ in range(3)]
        given += tasks
        end_write(log, *tasks[:2], write=f"w/{number}", batch_id=number, commit=number % 2 == 0)
        if number == 2:
            log.restart()
    assert len(set(given)) == 15
    assert len({each.producer_id for each in given}) == 3
    assert [fate(log, each) for each in given[:4]] == ["committed", "committed", "aborted", "aborted"]


def test_a_write_is_committed_as_a_whole_or_not_at_all(log: ClusterLog) -> None:
    first, second, other = join(log), join(log), join(log, "x/1", writer="x")
    log.apply(commands.AbortTransactions((key(second),), "late", NOW_MS))
    assert isinstance(end_write(log, first, second), TransactionAbortedError)
    assert [fate(log, each) for each in (first, second, other)] == ["aborted", "aborted", "open"]
    third = join(log)
    assert isinstance(end_write(log, third, other), TransactionAbortedError)  # that is of another write
    assert [fate(log, each) for each in (third, other)] == ["aborted", "open"]
    fourth = join(log)
    assert end_write(log, fourth) == (True, ())


def test_what_is_abandoned_may_be_tried_again_unless_it_runs_once(log: ClusterLog) -> None:
    first = join(log)
    assert end_write(log, commit=False) == (False, (key(first),))
    assert isinstance(end_write(log, first), TransactionAbortedError)
    assert end_write(log, join(log)) == (True, ())
    once: dict[str, Any] = {"write": "job.1", "writer": "job.1"}
    second = join(log, **once)
    assert end_write(log, commit=False, once=True, **once) == (False, (key(second),))
    assert isinstance(join(log, **once), TransactionAbortedError)
    assert isinstance(end_write(log, second, once=True, **once), BatchConflictError)
    assert fate(log, second) == "aborted"


def test_writers_are_forgotten_when_they_are_many_and_old(log: ClusterLog) -> None:
    def write(number: int, now_ms: int, **fields: Any) -> Any:
        return end_write(log, write=f"{number}", writer=f"{number}", now_ms=now_ms, **fields)

    for number in range(10):
        assert write(number, NOW_MS + number * 10_000, once=number == 4) == (True, ())
    refused = write(10, NOW_MS + 90_500, retention_ms=100_000)
    assert isinstance(refused, TooManyTransactionsError)
    assert "max_transactional_ids" in str(refused)
    assert write(10, NOW_MS + 90_500, retention_ms=88_000) == (True, ())  # in place of the oldest
    assert write(1, NOW_MS + 90_500) == (False, ())
    assert write(0, NOW_MS + 90_500 + 3_600_000, retention_ms=10**9) == (True, ())  # in place of what ran once
    assert write(4, NOW_MS, max_writers=99) == (True, ())


# -- the service ------------------------------------------------------------------------------


def asked(service: Service, call: Any) -> Any:
    return service.ask(call).answer


def init_call(attempt: str = "a", name: str = "billing", timeout_ms: int = 1_000) -> InitTransactions:
    return InitTransactions(transactional_id=name, attempt=attempt, timeout_ms=timeout_ms, owner="host")


def end_call(at: Transaction, commit: bool = True, groups: tuple[str, ...] = ("p", "q")) -> EndTransaction:
    return EndTransaction(
        transactional_id="billing",
        producer_id=at.producer_id,
        epoch=at.epoch,
        commit=commit,
        participants=groups,
    )


def resolve(service: Service, at: Transaction, age_ms: int, group: str = "p") -> Any:
    return asked(
        service, ResolveTransactions(group_id=group, transactions=(OpenFor(at.producer_id, at.epoch, age_ms),))
    )


def test_a_decision_comes_with_what_proves_it() -> None:
    service = Service()
    first = asked(service, init_call())
    decided = asked(service, end_call(first))
    key = first.producer_id, first.epoch
    seals = tuple(SEALS.marker(group, *key, commit=True) for group in ("p", "q"))
    assert decided == Decided(True, seals, Transaction(first.producer_id, 1))
    SEALS.check_marker(decided.seals[0], "p", *key, commit=True)
    for group, commit, epoch in (("q", True, 0), ("p", False, 0), ("p", True, 1)):
        with pytest.raises(UnknownTransactionError):
            SEALS.check_marker(decided.seals[0], group, first.producer_id, epoch, commit=commit)
    assert asked(service, end_call(first)) == decided


def test_partitions_are_told_fates_and_what_is_late_is_aborted() -> None:
    service = Service()
    first = asked(service, init_call())
    assert resolve(service, first, 900) == ("open",)
    assert resolve(service, Transaction(99, 0), 5) == ("aborted",)
    (info,) = asked(service, ListTransactions())
    assert (info.state, info.age_ms, info.partitions, info.owner) == ("open", 900, ("p",), "host")
    assert resolve(service, first, 1_001) == ("aborted",)
    assert isinstance(asked(service, end_call(first)), TransactionAbortedError)
    second = asked(service, init_call("b"))
    asked(service, end_call(second))
    assert resolve(service, second, 9_999) == ("committed",)
    (info,) = asked(service, ListTransactions())
    assert (info.state, info.partitions) == ("committing", ("p", "q"))
    asked(
        service,
        FinishTransactions(transactional_id="other", finished=(second,)),
    )
    assert resolve(service, second, 9_999) == ("committed",)
    asked(service, FinishTransactions(transactional_id="billing", finished=(second,)))
    assert resolve(service, second, 9_999) == ("aborted",)  # whoever asks now has something late
    (info,) = asked(service, ListTransactions())
    assert info.state == "idle"


def test_an_operator_ends_what_he_has_seen_and_nothing_later() -> None:
    service = Service()
    first = asked(service, init_call())
    abort = AbortTransaction(transactional_id="billing", producer_id=first.producer_id, epoch=first.epoch)
    other = AbortTransaction(transactional_id="other", producer_id=first.producer_id, epoch=first.epoch)
    assert asked(service, other) is False
    assert asked(service, abort) is True
    assert asked(service, abort) is False
    assert isinstance(asked(service, end_call(first)), TransactionAbortedError)


def test_bounds() -> None:
    service = Service(max_transactional_ids=1, max_transaction_participants=2)
    assert isinstance(asked(service, init_call(timeout_ms=900_001)), InvalidInputError)
    first = asked(service, init_call())
    assert isinstance(asked(service, init_call(name="other")), TooManyTransactionsError)
    assert asked(service, init_call("b")).epoch == 1
    assert isinstance(asked(service, end_call(first, groups=("p", "q", "r"))), TransactionTooLargeError)
    assert isinstance(asked(service, end_call(first, groups=("p", "p"))), InvalidInputError)


def test_the_end_of_a_write_comes_with_what_proves_it() -> None:
    service = Service()
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    tasks = [asked(service, JoinWrite(timeout_ms=1_000, **write)) for _ in range(2)]
    counted = WritePart(*key(tasks[0]), ("p", "q"))
    call = EndWrite(parts=(counted,), others=("p", "r"), **write)
    ended = asked(service, call)
    assert ended.written
    assert [(key(part), part.committed) for part in ended.parts] == [(key(tasks[0]), True), (key(tasks[1]), False)]
    for part, groups in zip(ended.parts, (("p", "q"), ("p", "r")), strict=True):
        for group, seal in zip(groups, part.seals, strict=True):
            SEALS.check_marker(seal, group, *key(part), commit=part.committed)
    assert asked(service, call) == WriteEnded(False, ended.parts[:1])
    asked(service, FinishTransactions(transactional_id="w/1", finished=(tasks[0],)))
    assert asked(service, call) == WriteEnded(False, ())
    assert asked(service, ListTransactions()) == ()  # those that nobody has are nobody's concern
    for wrong in ((counted, counted), (WritePart(*key(tasks[0]), ("p", "p")),)):
        assert isinstance(asked(service, EndWrite(parts=wrong, **write)), InvalidInputError)


def test_a_task_whose_write_nobody_ends_is_over_when_its_time_is_up() -> None:
    service = Service()
    service.coordinator._fates._wall_ms = lambda: NOW_MS + int(service.now * 1000)
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    task = asked(service, JoinWrite(timeout_ms=1_000, owner="host", **write))
    (told,) = asked(service, ListTransactions())
    assert (told.owner, told.transactional_id) == ("host", f"task.{task.producer_id}")
    service.pass_time(2 * EXPIRE_EVERY_S)
    assert asked(service, ListTransactions()) == ()
    assert isinstance(
        asked(service, EndWrite(parts=(WritePart(*key(task), ("p",)),), **write)), TransactionAbortedError
    )


def test_who_does_not_lead_tells_no_fate() -> None:
    service = Service()
    first = asked(service, init_call())
    service.coordinator.unlead()
    assert isinstance(resolve(service, first, 5), NotLeaderError)


# -- ids that are lent -------------------------------------------------------------------------


def test_the_names_of_lent_ids_are_no_producers() -> None:
    service = Service()
    task = asked(service, JoinWrite(write="w/1", writer="w", batch_id=1, timeout_ms=1_000))
    for name in (f"task.{task.producer_id}", "task.99"):
        assert isinstance(asked(service, init_call(name=name)), InvalidInputError)
    asked(service, EndWrite(write="w/1", writer="w", batch_id=1))  # it is lent to nobody now
    assert isinstance(asked(service, init_call(name=f"task.{task.producer_id}")), InvalidInputError)
    for name in ("task.", "task.daily", "task.1.2", "a.task.1"):
        assert isinstance(asked(service, init_call(name=name)), Transaction)


def test_a_producer_that_has_such_a_name_from_before_keeps_it(log: ClusterLog) -> None:
    before = init(log, name="task.2")
    tasks = [join(log) for _ in range(3)]
    assert log.machine.transactions.ids["task.2"].attempt == "a"
    assert fate(log, before) == "open"
    assert {each.producer_id for each in tasks} == {3, 4, 5}
    service = Service(log)
    assert asked(service, init_call("b", name="task.2")).epoch == 1


def test_ids_that_could_be_lent_leave_room_for_producers() -> None:
    service = Service(max_transactional_ids=3)
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    tasks = [asked(service, JoinWrite(timeout_ms=1_000, **write)) for _ in range(3)]
    assert isinstance(asked(service, init_call()), TooManyTransactionsError)  # all are in use
    asked(service, EndWrite(parts=(WritePart(*key(tasks[0]), ("p",)),), **write))
    first = [asked(service, init_call(name=f"n{number}")) for number in range(3)]
    known = service.log.machine.transactions
    assert (sorted(known.ids), known.free) == (["n0", "n1", "n2"], set())
    assert len({each.producer_id for each in (*tasks, *first)}) == 6
    assert resolve(service, tasks[0], 0) == ("committed",)  # also of one whose id is gone
    assert isinstance(asked(service, init_call(name="n3")), TooManyTransactionsError)
    assert isinstance(asked(service, JoinWrite(timeout_ms=1, write="x", writer="x", batch_id=1)), RayQueueError)
    service.log.restart()
    assert sorted(service.log.machine.transactions.ids) == ["n0", "n1", "n2"]


def test_the_longest_unused_id_makes_room() -> None:
    service = Service(wall_ms=NOW_MS, max_transactional_ids=3)
    for number in range(3):
        asked(service, init_call(name=f"n{number}"))
        service.wall_ms += 1_000
    known = service.log.machine.transactions
    refused = asked(service, init_call(name="more"))
    assert isinstance(refused, TooManyTransactionsError)
    assert refused.details["bound"] == IDS_BOUND
    service.wall_ms += 900_000 - 2_500
    first = known.ids["n0"]
    resolve(service, Transaction(*first.key), 500)  # it is open
    assert isinstance(asked(service, init_call(name="more")), TooManyTransactionsError)
    service.wall_ms += 1_000
    asked(service, init_call(name="more"))
    assert sorted(known.ids) == ["more", "n0", "n2"]
    service.wall_ms += 1_000
    asked(service, JoinWrite(timeout_ms=1_000, write="w/1", writer="w", batch_id=1))
    assert sorted(known.ids.keys() & {"more", "n0", "n2"}) == ["more", "n0"]
    assert asked(service, ForgetTransactionalId(transactional_id="more", attempt="a")) is True
    asked(service, init_call(name="again"))


def test_more_tasks_than_a_partition_takes_are_told_so_at_once() -> None:
    service = Service()
    join_call = JoinWrite(write="w/1", writer="w", batch_id=1, timeout_ms=1_000)
    assert all(isinstance(asked(service, join_call), Transaction) for _ in range(MAX_WRITE_TASKS))
    refused = asked(service, join_call)
    assert isinstance(refused, TransactionTooLargeError)
    assert not refused.retriable
    assert "fewer" in str(refused)
    assert isinstance(asked(service, JoinWrite(write="x", writer="x", batch_id=1, timeout_ms=1)), Transaction)
    asked(service, EndWrite(write="w/1", writer="w", batch_id=1, commit=False))
    assert isinstance(asked(service, join_call), Transaction)
    assert PartitionSettings().max_transactions > MAX_WRITE_TASKS


def test_the_end_of_a_large_write_holds_up_nobody_for_long() -> None:
    service = Service()
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    tasks = [asked(service, JoinWrite(timeout_ms=1_000, **write)) for _ in range(200)]
    everywhere = tuple(f"p{number}" for number in range(400))
    parts = tuple(WritePart(*key(task), everywhere) for task in tasks[:20])
    ended = asked(service, EndWrite(parts=parts, others=everywhere, **write))
    assert sum(len(part.seals) for part in ended.parts) == 10_000
    assert [part.committed for part in ended.parts] == [True] * 20 + [False] * 5
    assert [resolve(service, task, 0, "p399") for task in tasks] == [("committed",)] * 20 + [("aborted",)] * 180


def test_the_end_of_a_write_that_is_asked_for_again_is_proven_again() -> None:
    """The first answer was lost: partitions would have to ask."""
    service = Service()
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    tasks = [asked(service, JoinWrite(timeout_ms=1_000, **write)) for _ in range(2)]
    call = EndWrite(parts=tuple(WritePart(*key(task), ("p", "q")) for task in tasks), **write)
    first, again = asked(service, call), asked(service, call)
    assert (first.written, again.written) == (True, False)
    assert first.parts == again.parts
    asked(service, FinishTransactions(transactional_id="w/1", finished=(tasks[0],)))
    assert asked(service, call).parts == first.parts[1:]
    other = EndWrite(parts=(WritePart(*key(tasks[1]), ("p", "r")),), **write)
    assert asked(service, other).parts == (), "r was never told that it has a part in it"


def test_a_write_whose_markers_are_on_their_way_is_listed() -> None:
    service = Service()
    write: dict[str, Any] = {"write": "w/1", "writer": "w", "batch_id": 1}
    tasks = [asked(service, JoinWrite(timeout_ms=1_000, **write)) for _ in range(2)]
    asked(service, EndWrite(parts=tuple(WritePart(*key(task), ("p", "q")) for task in tasks), **write))
    (info,) = asked(service, ListTransactions())
    assert (info.transactional_id, info.state, info.partitions) == ("w/1", "committing", ("p", "q"))
    asked(service, FinishTransactions(transactional_id="w/1", finished=tuple(tasks)))
    assert asked(service, ListTransactions()) == ()
