"""Consumer groups of the simulated partition: owners, those that lost it without noticing, and retention.

A group's generation grows whenever another member takes the partition over;
the one before goes on committing for a while; now and then the group is
deleted, and begins a new life. What a group has committed, and
nothing else, is trimmed by the leader, as retention by consumption does.

While it runs: a commit that was sent after a newer generation's claim was
acknowledged is refused; a claim answers with everything that was acknowledged
before it was sent. Afterwards, from the committed log: every position is the
one that a few dictionaries give, and no trim ever passed a record that a group
had not committed, or had pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.errors import InvalidInputError, StaleGenerationError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.partition import (
    Appended,
    Committed,
    Partition,
    PartitionSettings,
    commit_command,
    forget_group_command,
    pin_command,
)
from rayqueue.partition.answers import Deleted
from rayqueue.partition.commands import CommitOffsets, ForgetGroup, PinGroup, Trim, decode
from rayqueue.partition.tables import LANES, PARTITION
from rayqueue.records import BATCH_TAG, BatchHeader
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

SETTINGS = PartitionSettings(lanes=2, retention_consumed=True)
ACTIONS = 10
"""Of each group, per schedule."""


class SimGroup:
    def __init__(self, world: World, name: str, rng: Random) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self.generation = 0
        self.claimed = 0
        """The newest generation whose commit was acknowledged."""
        self.acked: dict[int, int] = {}
        """What was acknowledged, lane by lane, since somebody last went back on purpose."""
        self.rewinds = 0
        self.deleted = 0
        """The newest generation whose life is over: the group was deleted, and that was acknowledged."""
        self._lives = 0

    def act(self) -> None:
        node = self._node()
        if node is not None:
            getattr(self, f"_{self.rng.choice(_CHOICES)}")(node)

    def _node(self) -> SimNode | None:
        """Who seems to lead; now and then somebody else."""
        nodes = [node for node in self.world.nodes.values() if node.alive and not node.removed]
        leaders = [node for node in nodes if node.engine.is_leader]
        if not nodes:
            return None
        return self.rng.choice(leaders if leaders and self.rng.random() < 0.9 else nodes)

    def _take_over(self, node: SimNode) -> None:
        self.generation += 1
        self._commit(node, self.generation, {})

    def _advance(self, node: SimNode) -> None:
        self._commit(node, self.generation, self._somewhere(node))

    def _catch_up(self, node: SimNode) -> None:
        end = node.machine.next_offset
        self._commit(node, self.generation, dict.fromkeys(range(SETTINGS.lanes), end))

    def _commit_late(self, node: SimNode) -> None:
        """A member that lost the partition, and says it is far ahead."""
        older = self.rng.randint(0, max(0, self.generation - 1))
        self._commit(node, older, dict.fromkeys(range(SETTINGS.lanes), node.machine.next_offset))

    def _rewind(self, node: SimNode) -> None:
        self.rewinds += 1
        self.acked = {}
        self._commit(node, self.generation, self._somewhere(node), rewind=True)

    def _forget(self, node: SimNode) -> None:
        """The group is deleted here, as it is seen now. Its next life has later generations."""
        position = node.machine.position(self.name)
        seen = None if position is None else (position.generation, position.offsets)
        over = self.generation
        self.rewinds += 1
        self.acked = {}
        self.claimed = 0  # who commits without a generation may begin anew
        self._lives += 1
        self.generation += 1

        def answer(result: Any) -> None:
            if isinstance(result, Deleted) and result.existed:
                self.deleted = max(self.deleted, over)

        node.propose(forget_group_command(self.name, over, seen), answer)

    def _pin(self, node: SimNode) -> None:
        node.propose(pin_command(self.name, self.rng.random() < 0.6), _nothing)

    def _retain(self, node: SimNode) -> None:
        retain(node, self.rng.uniform(0, 0.5) if self.rng.random() < 0.3 else 0.0)

    def _somewhere(self, node: SimNode) -> dict[int, int]:
        end = node.machine.next_offset
        return {lane: self.rng.randint(0, end) for lane in range(SETTINGS.lanes) if self.rng.random() < 0.7}

    def _commit(self, node: SimNode, generation: int, offsets: Mapping[int, int], *, rewind: bool = False) -> None:
        claimed, acked, rewinds, deleted = self.claimed, dict(self.acked), self.rewinds, self.deleted
        life = self._lives

        def answer(result: Any) -> None:
            if not isinstance(result, Committed):
                return
            if 0 < generation <= deleted:
                raise BrokenError(
                    Invariant.NEW_LIFE, f"{self.name}: generation {generation} committed after {deleted} was deleted"
                )
            if generation < claimed:
                raise BrokenError(
                    Invariant.FENCED, f"{self.name}: generation {generation} committed after {claimed} had claimed"
                )
            if rewinds == self.rewinds and not rewind:
                for lane, offset in acked.items():
                    if result.offsets.get(lane, 0) < offset:
                        raise BrokenError(
                            Invariant.POSITIONS, f"{self.name}: lane {lane} is at {result.offsets}, {offset} was acked"
                        )
                for lane, offset in result.offsets.items():
                    self.acked[lane] = max(offset, self.acked.get(lane, 0))
            if life == self._lives:  # else it is about a life that may be over by now
                self.claimed = max(self.claimed, generation)

        node.propose(commit_command(self.name, generation, offsets, rewind=rewind), answer)


_CHOICES = (
    ("take_over",) * 3
    + ("advance",) * 3
    + ("catch_up",) * 4
    + ("commit_late",) * 2
    + ("rewind",)
    + ("pin",) * 2
    + ("forget",) * 2
    + ("retain",) * 5
)


def retain(node: SimNode, delay_s: float) -> None:
    """Decide what retention takes; propose it now, or after groups have had time to change their minds."""

    def decide() -> None:
        command = node.machine.retention_command(0)
        if command is not None:
            node.world.clock.after(delay_s, lambda: node.propose(command, _nothing))

    node.noting_damage(decide)


def _nothing(_: Any) -> None:
    pass


# -- after healing -----------------------------------------------------------------------------


@dataclass
class _Group:
    generation: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    pinned: bool = False


class _Replay:
    """The committed log once more: the real machine's answers beside a model's."""

    def __init__(self) -> None:
        self.store = MemoryStore(GroupId("sim-0"), ReplicaId("groups"), PARTITION)
        self.machine = Partition(self.store, SETTINGS)
        self.groups: dict[str, _Group] = {}
        self.lanes: list[int] = []  # of each record
        self.start = 0
        self.floor = 0

    def apply(self, entry: Entry) -> None:
        self.store.append([entry])
        if entry.payload[0] < 4:
            return
        answer = self.machine.apply(entry.index, entry.payload)
        if entry.payload[0] == BATCH_TAG:
            if isinstance(answer, Appended) and not answer.duplicate:
                header = BatchHeader.parse(entry.payload)
                self.lanes += [header.lane] * header.count
            return
        match decode(entry.payload):
            case CommitOffsets() as commit:
                self._committed(commit, answer)
            case ForgetGroup() as forget:
                self._forgotten(forget, answer)
            case PinGroup(name, pinned):
                if pinned or name in self.groups:
                    self.groups.setdefault(name, _Group()).pinned = pinned
            case Trim():
                self._trimmed(answer)

    def _forgotten(self, forget: ForgetGroup, answer: Any) -> None:
        self.floor = max(self.floor, forget.generation)
        group = self.groups.get(forget.group)
        as_seen = group is not None and (
            group.generation <= forget.generation
            if forget.seen is None
            else (group.generation, group.offsets) == forget.seen
        )
        if answer.existed != as_seen:
            raise BrokenError(Invariant.NEW_LIFE, f"{forget} was answered with {answer}, the group was {group}")
        if as_seen:
            del self.groups[forget.group]

    def _committed(self, commit: CommitOffsets, answer: Any) -> None:
        group = self.groups.get(commit.group, _Group())
        if group.generation == 0 and 0 < commit.generation <= self.floor:
            if not isinstance(answer, StaleGenerationError):
                raise BrokenError(Invariant.NEW_LIFE, f"{commit} was let in, {self.floor} is over")
            return
        if commit.generation < group.generation:
            if not isinstance(answer, StaleGenerationError):
                raise BrokenError(
                    Invariant.FENCED, f"generation {commit.generation} was let in after {group.generation}"
                )
            return
        if isinstance(answer, InvalidInputError):
            return  # it names an offset that a deposed leader had and nobody else
        for lane, offset in commit.offsets.items():
            if commit.rewind or offset >= group.offsets.get(lane, 0):
                group.offsets[lane] = offset
        group.generation = commit.generation
        self.groups[commit.group] = group
        if (answer.generation, answer.offsets) != (group.generation, group.offsets):
            raise BrokenError(Invariant.POSITIONS, f"{commit} was answered with {answer} instead of {group}")

    def _trimmed(self, answer: Any) -> None:
        if answer.start_offset > self.start:
            pinned = [group for group in self.groups.values() if group.pinned]
            for holders in (pinned, self.groups.values()):
                held = self._prefix(holders)
                if answer.start_offset > held:
                    raise BrokenError(
                        Invariant.RETAINED, f"trimmed to {answer.start_offset}, but {held} was held: {self.groups}"
                    )
        self.start = answer.start_offset

    def _prefix(self, groups: Collection[_Group]) -> int:
        for offset in range(self.start, len(self.lanes)):
            if any(group.offsets.get(self.lanes[offset], 0) <= offset for group in groups):
                return offset
        return len(self.lanes)


def check_groups(committed: Mapping[Index, Entry], last: Index, nodes: Collection[SimNode]) -> int:
    """``BrokenError`` unless the groups are what the log says. Answers where the log starts."""
    replay = _Replay()
    for index in range(1, last + 1):
        replay.apply(committed[Index(index)])
    for node in nodes:
        found = {name: _Group(group.generation, dict(group.offsets), group.pinned) for name, group in _groups(node)}
        if found != replay.groups:
            raise BrokenError(
                Invariant.POSITIONS, f"{node.replica_id} has groups {found}, the log gives {replay.groups}"
            )
        first = node.machine.readable_from
        for lane in range(SETTINGS.lanes):
            # From the first batch that all are sure to have: what is before it is swept a few rows at a time.
            begin, end = bytes((lane,)) + first.to_bytes(8, "big"), bytes((lane + 1,))
            if list(node.disk.scan(LANES, begin, end)) != list(replay.store.scan(LANES, begin, end)):
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} has another lane {lane} than the log gives")
        if (node.machine.backlog(), node.machine.lane_ends()) != (replay.machine.backlog(), replay.machine.lane_ends()):
            raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} counts another backlog than the log gives")
    return replay.start


def _groups(node: SimNode) -> list[tuple[str, Any]]:
    return node.machine.groups.items()
