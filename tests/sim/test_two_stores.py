"""A group expires on two disks, the coordinator's and a partition's: every order of the steps, and of the crashes.

Three parties take their steps side by side: the expiry (the coordinator gives the group up, the partition forgets it,
the coordinator notes that), the group's next life (join, commit) and a zombie of the former life that commits
late. Each store may lose power once, in any of its steps: before the step is durable, or after it and before anybody
was told. Either way the step is repeated. All of it is enumerated, nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

import pytest

from rayqueue.cluster.catalog import Catalog
from rayqueue.cluster.commands import (
    AnyCommand,
    ChangeGroup,
    ExpireGroups,
    GroupsForgotten,
    Join,
    Leave,
    encode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.errors import RayQueueError, StaleGenerationError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.partition import Partition, PartitionSettings, commit_command, expire_groups_command
from rayqueue.partition.groups import Groups
from rayqueue.partition.tables import PARTITION
from rayqueue.records import RecordBatch
from rayqueue.records.checksum import entry_crc
from tests.sim.invariants import BrokenError, BrokenRule, Invariant

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

GROUP = "g"
RETENTION_MS = 1_000
STEPS = {"e": 3, "n": 2, "z": 1}  # expiry, next life, zombie
COORDINATORS_STEPS = ("e0", "e2", "n0")
PARTITIONS_STEPS = ("e1", "n1", "z0")

M = TypeVar("M", ClusterMachine, Partition)


class PowerLossError(Exception):
    pass


class Kept(Generic[M]):
    """A machine on a disk of its own: every entry is persisted by itself, and so is what it changed."""

    def __init__(self, store: MemoryStore, open_machine: Callable[[MemoryStore], M]) -> None:
        self._store = store
        self._open: Callable[[MemoryStore], M] = open_machine
        self.machine: M = open_machine(store)
        store.sync()
        self.crash = ""
        """``before`` or ``after`` the next entry is durable."""

    def apply(self, payload: bytes) -> Any:
        crash, self.crash = self.crash, ""
        index, term = Index(self._store.last_index + 1), Term(1)
        self._store.append([Entry(index, term, payload, entry_crc(index, term, payload))])
        answer = self.machine.apply(index, payload)
        self._store.set_applied(index)
        if crash != "before":
            self._store.persist()
        if crash:
            self._store = self._store.reopen()
            self.machine = self._open(self._store)
            raise PowerLossError
        return answer


class Plan(NamedTuple):
    order: tuple[str, ...]
    crashes: tuple[tuple[str, str], ...]
    """In which step, and ``before`` or ``after`` it is durable."""


class Scene:
    def __init__(self) -> None:
        self.coordinator = Kept(MemoryStore(GroupId("c"), ReplicaId("c"), COORDINATOR), ClusterMachine)
        self.partition = Kept(
            MemoryStore(GroupId("p"), ReplicaId("p"), PARTITION), lambda store: Partition(store, PartitionSettings())
        )
        self.partition.apply(_records())
        self._write(ChangeGroup(GROUP, (_join("former"),), True, 1_000))
        self.former = self.coordinator.machine.groups[GROUP].generation
        self.partition.apply(commit_command(GROUP, self.former, {0: 5}))
        self._write(ChangeGroup(GROUP, (Leave("former"),), True, 2_000))
        self.given_up = False
        self.forgotten = False
        self.claimed = False

    def run(self, plan: Plan) -> None:
        crashes = dict(plan.crashes)
        for step in plan.order:
            if step in crashes:
                (self.coordinator if step in COORDINATORS_STEPS else self.partition).crash = crashes[step]
            try:
                getattr(self, step)()
            except PowerLossError:
                getattr(self, step)()  # nobody heard of it, so it is asked for again
            self.coordinator.crash = self.partition.crash = ""  # the step had nothing to write
        self.e1()
        self.e2()
        self._check()

    def _write(self, command: AnyCommand) -> Any:
        return self.coordinator.apply(encode_command(command))

    # -- the steps -----------------------------------------------------------------------------

    def e0(self) -> None:
        self._write(ExpireGroups(10_000, RETENTION_MS))
        self.given_up |= GROUP not in self.coordinator.machine.groups

    def e1(self) -> None:
        for group, generation in list(self.coordinator.machine.expired.items()):
            self.partition.apply(expire_groups_command([group], generation))
            self.forgotten = True

    def e2(self) -> None:
        """As the keeper: noted only after every partition has answered."""
        expired = dict(self.coordinator.machine.expired)
        if expired and self.forgotten:
            self._write(GroupsForgotten(tuple(expired), max(expired.values())))

    def n0(self) -> None:
        self._write(ChangeGroup(GROUP, (_join("next"),), True, 11_000))

    def n1(self) -> None:
        self._served(self.partition.apply(commit_command(GROUP, self._generation(), {0: 9})))
        self.claimed = True

    def z0(self) -> None:
        answer = self.partition.apply(commit_command(GROUP, self.former, {0: 7}))
        if (self.claimed or self.forgotten) and not isinstance(answer, StaleGenerationError):
            raise BrokenError(Invariant.NEW_LIFE, f"a member of the former life committed: {answer}")

    def _generation(self) -> int:
        return self.coordinator.machine.groups[GROUP].generation

    def _served(self, answer: Any) -> None:
        if isinstance(answer, RayQueueError):
            raise BrokenError(Invariant.NEW_LIFE, f"a member of this life was refused: {answer}")

    # -- the end ---------------------------------------------------------------------------------

    def _check(self) -> None:
        machine, position = self.coordinator.machine, self.partition.machine.position(GROUP)
        if machine.expired:
            raise BrokenError(Invariant.PROGRESS, "the coordinator still waits for somebody to forget")
        if self.given_up and self.partition.machine.groups.floor < self.former:
            raise BrokenError(Invariant.FORGOTTEN, "the partition was never told")
        if position is None or (position.generation, position.offsets) != (self._generation(), {0: 9}):
            raise BrokenError(Invariant.POSITIONS, f"the next life has lost its place: {position}")


def _join(member: str) -> Join:
    return Join(member, ("orders",), None, "a test", "balanced", 10_000)


@cache
def _records() -> bytes:
    return RecordBatch.encode([b""] * 20, timestamps=1)


def _orders(left: dict[str, int], done: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not any(left.values()):
        yield done
    for party, count in left.items():
        if count:
            step = f"{party}{STEPS[party] - count}"
            yield from _orders({**left, party: count - 1}, (*done, step))


def plans() -> Iterator[Plan]:
    def one_of(steps: tuple[str, ...]) -> list[tuple[tuple[str, str], ...]]:
        return [(), *(((step, when),) for step in steps for when in ("before", "after"))]

    for order, first, second in product(_orders(STEPS), one_of(COORDINATORS_STEPS), one_of(PARTITIONS_STEPS)):
        yield Plan(order, first + second)


def test_in_every_order_and_whoever_loses_power_nothing_of_this_life_is_lost_and_nothing_of_the_former_counts() -> None:
    count = 0
    for plan in plans():
        try:
            Scene().run(plan)
        except BrokenError as broken:
            raise AssertionError(f"{plan}: {broken}") from broken
        count += 1
    assert count == 60 * 7 * 7


def broken_in(plan: Plan) -> set[Invariant]:
    try:
        Scene().run(plan)
    except BrokenError as broken:
        return {broken.invariant}
    return set()


@pytest.mark.parametrize(
    ("target", "attribute", "replacement", "rule"),
    [
        pytest.param(
            Groups,
            "_raise_floor",
            lambda groups, floor: setattr(groups, "floor", floor),
            BrokenRule(Invariant.NEW_LIFE, frozenset({Invariant.FORGOTTEN})),
            id="floor only in memory",
        ),
        pytest.param(
            Catalog,
            "note_expired",
            lambda catalog, group: catalog.expired.update({group: catalog.deleted_generation}),
            BrokenRule(Invariant.FORGOTTEN),
            id="expiry only in memory",
        ),
        pytest.param(
            Groups,
            "expire",
            lambda groups, command: groups.delete(command.groups[0]) and (),
            BrokenRule(Invariant.NEW_LIFE, frozenset({Invariant.FORGOTTEN})),
            id="unfenced",
        ),
    ],
)
def test_without_this_rule_some_order_shows_it(target: Any, attribute: str, replacement: Any, rule: BrokenRule) -> None:
    """All orders are looked at: what is broken in any of them is this promise, or one of its consequences."""
    with patch.object(target, attribute, replacement):
        found = set().union(*map(broken_in, plans()))
    assert rule.breaks in found
    assert found <= {rule.breaks} | rule.also
