"""The checker of the cluster's world: what must hold in every schedule.

Beside the replicas runs a reference: one machine that applies each entry once,
when it is first committed anywhere.

While it runs:
- what holds of every log: one leader per term, all agree on what is committed;
- a group's generation never goes back, and one generation of a partition is one member's;
- whatever a coordinator tells a member is what the log says of that generation; it denies no member that is one;
- nobody takes a partition that another member, who is still one, has not let go of;
- no commit succeeds after a newer owner has claimed the partition, or after its group was deleted there;
- whoever claims a partition begins where its group's last commit to this very topic was;
- nothing that was meant for a topic reaches another of the same name;
- no producer id is handed out twice, no topic is acknowledged that is not committed; no call is answered twice;
- no replica's data is deleted while it belongs to the group, and none comes back to it afterwards.

After healing:
- the members of a group are those that live; each partition is read by exactly one of them, and all know what they
  have; the shares are even;
- every replica has the state that the log gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from rayqueue.cluster.groups import Group
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.errors import UnknownMemberError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import MEMBERS
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Assignment, Grant
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.raft._pysyncobj import MEMBERSHIP
from rayqueue.raft.replica_set import ReplicaSet
from tests.sim.checker import LogChecker
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.cluster_members import Held, SimMember
    from tests.sim.cluster_node import ClusterNode
    from tests.sim.cluster_world import ClusterWorld
    from tests.sim.node import EngineNode


class ClusterChecker(LogChecker):
    def __init__(self, world: ClusterWorld) -> None:
        super().__init__()
        self.world = world
        self.reference = ClusterMachine(MemoryStore(GroupId("coordinator"), ReplicaId("reference"), COORDINATOR))
        self.reference.on_group_changed = self._group_changed
        self.applied = Index(0)
        self.generations: dict[str, int] = {}
        self.told: dict[tuple[str, int], dict[str, tuple[Grant, ...]]] = {}
        self.member_since: dict[tuple[str, str], float] = {}
        self.granted: dict[tuple[str, TopicPartition, int], str] = {}
        self.newest: dict[tuple[str, int, int], int] = {}
        self.writers: dict[tuple[str, int, int, int], str] = {}
        self.positions: dict[tuple[str, int, int], int] = {}
        self.forgotten: dict[tuple[str, int, int], int] = {}
        self.ids: dict[int, int] = {}
        self.seen_topics: set[int] = set()
        self.deleted: set[int] = set()
        self.members: tuple[Index, ReplicaSet] = Index(0), ReplicaSet.of(())
        """The membership that was committed last, and where."""
        self.gone: set[ReplicaId] = set()
        """Replicas whose data was deleted."""
        self.acks = 0
        self.commits = 0
        self.refusals = 0
        self.moves = 0

    # -- the reference ------------------------------------------------------------------------

    def watch_commit(self, node: EngineNode) -> None:
        super().watch_commit(node)
        while self.applied < self.last_committed:
            self.applied = Index(self.applied + 1)
            payload = self.committed[self.applied].payload
            if payload[0] == MEMBERSHIP:
                self.members = self.applied, ReplicaSet.decode(payload[1:])
                self._check_members()
            if payload[0] >= 4:
                self.reference.apply(self.applied, payload)
                self.seen_topics.update(info.topic_id for info in self.reference.topics.values())

    def possible_members(self, without: Collection[ReplicaId]) -> list[ReplicaSet]:
        """The membership that was committed last, and those behind it in somebody's log: any may come to count."""
        last, _ = self.members
        found = {
            key: ReplicaSet.decode(row)
            for node in self.world.nodes.values()
            if node.replica_id not in without
            for key, row in node.disk.scan(MEMBERS, start=last.to_bytes(8, "big"))
        }
        return list(found.values())

    def erased(self, node: ReplicaId) -> None:
        """The data of a replica is deleted: it must be in no membership that was committed, now or later."""
        self.gone.add(node)
        self._check_members()

    def _check_members(self) -> None:
        index, members = self.members
        if self.gone & members.everyone:
            raise BrokenError(
                Invariant.KEPT,
                f"{sorted(self.gone & members.everyone)}, whose data is deleted, belong at {index}",
            )

    def _group_changed(self, name: str) -> None:
        group = self.reference.groups.get(name)
        if group is None:
            return
        if group.generation < self.generations.get(name, 0):
            raise BrokenError(
                Invariant.GENERATIONS,
                f"group {name} went from generation {self.generations[name]} to {group.generation}",
            )
        self.generations[name] = group.generation
        told = {member: each.grants() for member, each in group.members.items()}
        if self.told.setdefault((name, group.generation), told) != told:
            raise BrokenError(
                Invariant.GENERATIONS, f"generation {group.generation} of group {name} is two different states"
            )
        for member in group.members:
            self.member_since.setdefault((name, member), self.world.clock.now)
        for member, grants in told.items():
            for grant in grants:
                if grant.topic_id != self.reference.topics[grant.topic].topic_id:
                    raise BrokenError(Invariant.IDENTITY, f"{grant} is not of the topic that has this name")
                key = (name, grant.topic_partition, grant.generation)
                if key not in self.granted:
                    self.moves += 1
                if self.granted.setdefault(key, member) != member:
                    raise BrokenError(
                        Invariant.ONE_OWNER, f"{grant} was granted to {self.granted[key]} and to {member}"
                    )

    # -- what coordinators answer -----------------------------------------------------------------

    def once(self, call: Any, reply: Callable[[Any], None]) -> Callable[[Any], None]:
        answered = False

        def only_once(result: Any) -> None:
            nonlocal answered
            if answered:
                raise BrokenError(Invariant.TRUE_ANSWERS, f"{call} was answered twice")
            answered = True
            reply(result)

        return only_once

    def answered(self, node: ClusterNode, call: Any, result: Any, asked_at: float) -> None:
        if isinstance(result, Assignment):
            told = self.told.get((call.group, result.generation), {}).get(result.member)
            if told != result.grants or result.member != call.member:
                raise BrokenError(
                    Invariant.TRUE_ANSWERS, f"{node.replica_id} answered {call} with {result}; the log says {told}"
                )
            self.acks += 1
        elif isinstance(result, UnknownMemberError) and isinstance(call, calls.Heartbeat):
            group = self.reference.groups.get(call.group)
            if (
                group is not None
                and call.member in group.members
                and self.member_since[call.group, call.member] < asked_at
            ):
                raise BrokenError(
                    Invariant.TRUE_ANSWERS, f"{node.replica_id} denied {call.member}, which is a member of {call.group}"
                )
        elif isinstance(result, TopicInfo) and isinstance(call, calls.CreateTopic):
            if result.topic_id not in self.seen_topics:
                raise BrokenError(
                    Invariant.TRUE_ANSWERS, f"topic {result.name} was acknowledged before it was committed"
                )
            self.acks += 1
        elif isinstance(call, calls.NewProducerIds) and isinstance(result, int):
            for number in range(result, result + call.count):
                if number in self.ids:
                    raise BrokenError(Invariant.UNIQUE_IDS, f"producer id {number} was handed out twice")
                self.ids[number] = 1
            self.acks += 1

    # -- what members do ----------------------------------------------------------------------------

    def said_goodbye(self, group: str, member: str) -> None:
        pass

    def _is_member(self, group: str, member: str) -> bool:
        known = self.reference.groups.get(group)
        return known is not None and member in known.members

    def took(self, who: SimMember, each: TopicPartition, held: Held) -> None:
        """``who`` takes a grant. Nobody else, as far as he is still a member, may have the partition."""
        if not self._is_member(who.group, who.member):
            return  # it was thrown out and does not know yet: fenced, not forbidden
        for other in self.world.members:
            theirs = other.held.get(each)
            if (
                other is not who
                and other.alive
                and other.group == who.group
                and theirs is not None
                and theirs.topic_id == held.topic_id
                and self._is_member(other.group, other.member)
            ):
                raise BrokenError(
                    Invariant.ONE_OWNER,
                    f"{who.member} took {each} of generation {held.generation} "
                    f"while {other.member} still had it of {theirs.generation}",
                )

    def arrived(self, who: str, meant: int, place: tuple[int, int]) -> None:
        if meant != place[0]:
            raise BrokenError(Invariant.IDENTITY, f"{who} meant topic {meant} and reached {place}")

    def forgot(self, group: str, topic_id: int, number: int, generation: int, gone: bool) -> None:
        """The group's position was deleted here: no generation up to this one may commit any more."""
        place = (group, topic_id, number)
        self.forgotten[place] = max(self.forgotten.get(place, 0), generation)
        if gone:
            self.positions.pop(place, None)

    def _check_life(self, who: str, place: tuple[str, int, int], generation: int) -> None:
        if generation <= self.forgotten.get(place, 0):
            raise BrokenError(
                Invariant.NEW_LIFE,
                f"{who} was let into {place} with generation {generation} after {self.forgotten[place]} was deleted",
            )

    def claimed(
        self, who: str, group: str, topic_id: int, number: int, generation: int, offsets: Mapping[int, int] | None
    ) -> None:
        """A member begins to read, where the last commit of this life of the group was: what is older may not commit
        any more. Without ``offsets`` it did not ask."""
        place = (group, topic_id, number)
        self._check_life(who, place, generation)
        known = self.positions.get(place, 0)
        if offsets is not None and offsets.get(0, 0) != known:
            raise BrokenError(Invariant.POSITIONS, f"{who} begins to read {place} at {offsets}, {known} was committed")
        self.newest[place] = max(self.newest.get(place, 0), generation)

    def committed_offset(self, who: str, group: str, topic_id: int, number: int, generation: int, offset: int) -> None:
        self.commits += 1
        place = (group, topic_id, number)
        self._check_life(who, place, generation)
        self.positions[place] = max(offset, self.positions.get(place, 0))
        if generation < self.newest.get(place, 0):
            raise BrokenError(
                Invariant.FENCED,
                f"{who} committed to {topic_id}-{number} with generation {generation} "
                f"after {self.newest[place]} had begun",
            )
        writer = self.writers.setdefault((*place, generation), who)
        if writer != who:
            raise BrokenError(
                Invariant.ONE_OWNER, f"{writer} and {who} both commit to {place} with generation {generation}"
            )

    # -- after healing ----------------------------------------------------------------------------------

    def finally_agree(self) -> None:
        expected = self.reference.checkpoint()
        for node in self.world.serving():
            if node.engine.applied != self.last_committed:
                raise BrokenError(
                    Invariant.PROGRESS, f"{node.replica_id} applied {node.engine.applied} of {self.last_committed}"
                )
            if node.machine.checkpoint() != expected:
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} has another state than the log gives")
            reopened = ClusterMachine(node.disk)
            if {name: group.info() for name, group in reopened.groups.items()} != {
                name: group.info() for name, group in self.reference.groups.items()
            }:
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} would start with other groups than it has")
            places = reopened.coordinators, reopened.unmade, reopened.doomed
            if places != (self.reference.coordinators, self.reference.unmade, self.reference.doomed):
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} would start with other places than it has")
        for group in self.reference.groups.values():
            self._check_shares(group)
        self._check_topics()

    def _check_shares(self, group: Group) -> None:
        wanted = {topic for member in group.members.values() for topic in member.wish.topics}
        exist = {
            TopicPartition(name, partition.number)
            for name, info in self.reference.topics.items()
            if name in wanted
            for partition in info.partitions
        }
        if set(group.owners) != exist:
            raise BrokenError(Invariant.SHARES, f"group {group.name} owns {sorted(group.owners)} of {sorted(exist)}")
        if group.assignor not in ("balanced", "sticky"):
            return  # the others do not promise that loads are even over all topics
        for giver in group.members.values():
            for taker in group.members.values():
                movable = any(each.topic in taker.wish.topics for each in giver.owned)
                if movable and len(giver.owned) - len(taker.owned) >= 2:
                    raise BrokenError(
                        Invariant.SHARES,
                        f"{giver.member} has {len(giver.owned)} partitions and {taker.member} {len(taker.owned)}",
                    )

    def _check_topics(self) -> None:
        for name, (topic_id, partitions) in self.world.admin_made.items():
            info = self.reference.topics.get(name)
            if info is None or info.topic_id < topic_id or len(info.partitions) < partitions:
                raise BrokenError(Invariant.TRUE_ANSWERS, f"topic {name}, made and never deleted, is {info}")
