"""The core of a replica: what waits for a point in a turn, and when the next one is due."""

from __future__ import annotations

from random import Random
from typing import Any

from rayqueue.config import CallSettings, RaftSettings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.partition import Partition, PartitionSettings
from rayqueue.partition.tables import PARTITION
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import call_each
from rayqueue.replica.clients import Clients
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.inbox import Inbox
from rayqueue.replica.loop import Written
from rayqueue.replica.service import Events


class Asking(Events):
    """Asks, after the engine's step, whether it still leads, as a coordinator's timer may."""

    def __init__(self, core: ReplicaCore[Asking]) -> None:
        self.core = core
        self.asks = False
        self.answers: list[Any] = []

    def tick(self, now_s: float) -> None:
        if self.asks:
            self.asks = False
            self.core.confirm(self.answers.append)


class Alone:
    """The only voter of its group, which leads."""

    def __init__(self) -> None:
        self.now = 0.0
        store = MemoryStore(GroupId("g"), ReplicaId("a"), PARTITION)
        RaftEngine.bootstrap(store, ReplicaSet.of("a"))
        self.core: ReplicaCore[Asking] = ReplicaCore(
            store,
            Partition(store, PartitionSettings()),
            RaftSettings(),
            Random(1),
            Asking,
            inbox=Inbox("a", lambda: None, call_each),
            clients=Clients(CallSettings(), 1 << 20, damaged=lambda why: None),
            send=lambda peer, message: None,
            deliver=call_each,
            clock=lambda: self.now,
        )
        while not self.core.engine.is_leader or self.core.busy:
            self.now += 0.1
            self.turn()

    def turn(self) -> None:
        core = self.core
        core.first_half(())
        if not core.must_write or core.write() is Written.ALL:
            core.promise()
        core.publish()


def test_a_question_that_is_asked_after_the_step_is_not_left_until_something_happens() -> None:
    alone = Alone()
    alone.core.service.asks = True
    alone.turn()
    assert alone.core.service.answers == []
    assert alone.core.busy
    alone.turn()
    assert alone.core.service.answers == [None]
    assert not alone.core.busy


def test_all_questions_of_a_turn_are_one_question() -> None:
    alone = Alone()
    asked: list[Any] = []
    confirm = alone.core.engine.confirm_leadership
    alone.core.engine.confirm_leadership = lambda pending: (asked.append(pending), confirm(pending))  # type: ignore[method-assign, assignment, func-returns-value]
    answers: list[Any] = []
    for _ in range(3):
        alone.core.confirm(answers.append)
    alone.turn()
    assert answers == [None] * 3
    assert len(asked) == 1
