"""Parts of the cluster's tests: a machine whose log is applied as it is written, and a coordinator on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayqueue.cluster.commands import AnyCommand, encode_command
from rayqueue.cluster.coordinator import Coordinator
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.config import ClusterSettings
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.protocol.calls import CoordinatorCall, Heartbeat, JoinGroup
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import TopicPartition
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records.checksum import entry_crc
from rayqueue.replica.coordinator_service import ClusterView

SEALS = Seals(b"only for this test")
BROKERS = tuple(AliveBroker(f"b{number}", f"host{number}") for number in range(3))


class ClusterLog:
    """One replica without Raft."""

    def __init__(self) -> None:
        self.store = MemoryStore(GroupId("coordinator"), ReplicaId("c1"), COORDINATOR)
        self.machine = ClusterMachine(self.store)
        self.written: list[AnyCommand] = []

    def apply(self, command: AnyCommand) -> Any:
        self.written.append(command)
        return self.apply_payload(encode_command(command))

    def apply_payload(self, payload: bytes) -> Any:
        index = Index(self.store.last_index + 1)
        self.store.append([Entry(index, Term(1), payload, entry_crc(index, Term(1), payload))])
        answer = self.machine.apply(index, payload)
        self.store.set_applied(index)
        return answer

    def restart(self) -> None:
        self.store.sync()
        self.store = self.store.reopen()
        self.machine = ClusterMachine(self.store)


def view_of(machine: ClusterMachine, *, leads: bool = True) -> ClusterView:
    """What the keeper is told of it, by a coordinator that is alone."""
    return ClusterView(
        leads,
        ReplicaId("c1"),
        "cluster-a",
        dict(machine.topics),
        dict(machine.brokers),
        frozenset((key.group_id, key.replica_id) for key in machine.unmade),
        tuple(machine.doomed.values()),
        {ReplicaId(node): broker for node, broker in machine.coordinators.items()},
        ReplicaSet.of(("c1",)),
        None,
        {},
        {(key.group_id, key.replica_id): why for key, why in machine.lost.items()},
        dict(machine.moves),
        dict(machine.replica_counts()),
        planned=tuple(machine.planned.values()),
        rebalance=None if machine.rebalance is None else machine.rebalance.number,
        missing=frozenset((key.group_id, key.replica_id) for key in machine.missing),
    )


class Answers:
    """A reply that remembers, and may come once."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, answer: Any) -> None:
        self.given.append(answer)
        assert len(self.given) == 1, f"answered twice: {self.given}"

    @property
    def answer(self) -> Any:
        assert self.given, "not answered yet"
        return self.given[0]


class Service:
    """A leading coordinator. Proposals are applied at once, or by ``commit`` while ``held``."""

    def __init__(self, log: ClusterLog | None = None, *, wall_ms: int = 0, **settings: Any) -> None:
        """``wall_ms``: the time of day; 0: not known."""
        self.log = log or ClusterLog()
        self.now = 100.0
        self.wall_ms = wall_ms
        self.held = False
        self.refuse: Exception | None = None
        self.proposals = 0
        self._waiting: list[tuple[bytes, Callable[[Any], None]]] = []
        self.confirms: list[Callable[[Any], None]] | None = None
        self.settings = ClusterSettings(**{"join_window_ms": 0, **settings})
        self.coordinator = Coordinator(
            self.log.machine, self.settings, SEALS, self._propose, self._confirm, lambda: self.wall_ms
        )
        self.coordinator.set_brokers(self.now, BROKERS)
        self.coordinator.lead(self.now, replica_id="c1", term=1)

    def _propose(self, payload: bytes, answer: Callable[[Any], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.proposals += 1
        self._waiting.append((payload, answer))
        if not self.held:
            self.commit()

    def _confirm(self, answer: Callable[[Any], None]) -> None:
        if self.confirms is None:
            answer(None)
        else:
            self.confirms.append(answer)

    def commit(self) -> None:
        while self._waiting:
            payload, answer = self._waiting.pop(0)
            answer(self.log.apply_payload(payload))

    def fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            answer(error)

    def pass_time(self, seconds: float) -> None:
        """Tick as its deadlines ask for, and no more often."""
        end = self.now + seconds
        for _ in range(100_000):
            due = self.coordinator.next_deadline_s
            if due > end:
                break
            self.now = max(self.now, due)
            self.coordinator.tick(self.now)
        else:
            raise AssertionError("it never comes to rest")
        self.now = end

    def ask(self, call: CoordinatorCall, client: int = 1) -> Answers:
        answers = Answers()
        self.coordinator.handle(self.now, client, call, answers)
        return answers

    def join(self, member: str, *topics: str, group: str = "g", client: int = 1, **options: Any) -> Any:
        asked = self.ask(JoinGroup(group=group, member=member, topics=topics, **options), client)
        self.pass_time(0)
        return asked.answer

    def beat(
        self,
        member: str,
        generation: int,
        *reading: TopicPartition,
        group: str = "g",
        client: int = 1,
        wait_ms: int = 0,
    ) -> Answers:
        """A member that reads these, by the grants that it has."""
        there = self.log.machine.groups.get(group)
        known = None if there is None else there.members.get(member)
        grants = tuple(known.owned[each] for each in reading if each in known.owned) if known is not None else ()
        call = Heartbeat(group=group, member=member, generation=generation, reading=grants, wait_ms=wait_ms)
        return self.ask(call, client)
