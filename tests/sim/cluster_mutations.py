"""Each rule of the groups' protocol, switched off: the simulator must notice every time.

As in ``mutations``, one method is replaced while a schedule runs, and
``faults`` narrows what goes wrong to what the rule is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from rayqueue.cluster import growth
from rayqueue.cluster.catalog import Catalog, PlacedReplica
from rayqueue.cluster.commands import Join, PlaceCoordinator, Release, RetireCoordinator
from rayqueue.cluster.groups import _GROUP, Group, Groups, Member, _encode, _GroupRow, _Step
from rayqueue.cluster.memberships import Memberships
from rayqueue.cluster.sessions import Session
from rayqueue.cluster.tables import META
from rayqueue.errors import RayQueueError
from rayqueue.ids import ReplicaId
from rayqueue.partition.groups import Groups as PartitionGroups
from rayqueue.protocol.topics import TopicPartition
from rayqueue.raft.engine import RaftEngine
from tests.sim.cluster_growth import SimKeeper
from tests.sim.cluster_members import Held, SimMember
from tests.sim.cluster_node import ClusterNode
from tests.sim.cluster_world import ClusterWorld, SimPartition
from tests.sim.frame import Mutation
from tests.sim.invariants import Invariant


class ClusterMutation(Mutation):
    make = ClusterWorld


def _read_unclaimed(member: SimMember, each: TopicPartition, held: Held) -> None:
    """Begin to read without telling the partition."""
    held.claimed = True
    member.world.checker.claimed(member.member, member.group, held.topic_id, each.partition, held.generation, None)
    member._work(each, held)


def _claim_again(member: SimMember, each: TopicPartition, held: Held, error: RayQueueError) -> None:
    """A grant that was refused is claimed again as it is, whenever the coordinator repeats it."""
    _refused(member, each, held, error)
    member.fenced.clear()


_refused = SimMember._refused


def _unfenced(world: ClusterWorld, partition: SimPartition, group: str, generation: int, offsets: Any) -> Any:
    return partition.commit(group, 1 << 40, offsets)


_finish = _Step.finish


def _grant_before_release(step: _Step, partitions: Any) -> None:
    """What is meant for another is taken away at once."""
    if step.aim:
        step._retarget(partitions)
        step.aim = False
    for member in step.group.members.values():
        for each in member.surplus():
            del member.owned[each], step.group.owners[each]
            step._changed = True
    _finish(step, partitions)


def _release_whenever(member: Member, reading: Any, generation: int) -> tuple[TopicPartition, ...]:
    kept = set(reading)
    return tuple(each for each in member.surplus() if member.owned[each] not in kept)


def _apply_release_whenever(step: _Step, release: Release) -> None:
    step.answers.append(None)
    member = step.group.members.get(release.member)
    for each in release.partitions if member is not None else ():
        if member is not None and each in member.owned and each not in member.meant:
            del member.owned[each], step.group.owners[each]
            step._changed = True


def _same_generation(step: _Step, partitions: Any) -> None:
    """A step that moves partitions and does not make the generation grow."""
    _finish(step, partitions)
    if step.changed and step.group.generation > 1:
        step.group.generation -= 1


_join = _Step.join


def _inherit_grants(step: _Step, wish: Join) -> None:
    """A static member's successor has its predecessor's grants, with their generation."""
    group = step.group
    former = group.instances.get(wish.instance) if wish.instance is not None else None
    owned = dict(group.members[former].owned) if former is not None and former != wish.member else {}
    _join(step, wish)
    successor = group.members.get(wish.member)
    if successor is not None:
        for each, grant in owned.items():
            if each not in group.owners:
                successor.owned[each] = grant
                group.owners[each] = wish.member


def _never_renew(session: Session, now_s: float) -> None:
    session.deadline_s = min(session.deadline_s, now_s + session.timeout_s)


def _late_joiners_starve(step: _Step, topics: Any) -> None:
    """Who came first keeps all."""
    group = step.group
    first = min(group.members, default=None)
    for name, member in group.members.items():
        target = tuple(
            TopicPartition(topic, number)
            for topic in member.wish.topics
            for number in range(len(topics[topic].partitions) if topic in topics else 0)
            if name == first
        )
        if member.target != target:
            member.set_target(target)
            step._changed = True


def _write_head_only(groups: Groups, group: Group, step: _Step) -> None:
    row = _GroupRow(group.name, group.generation, group.assignor)
    groups._store.put(META, _GROUP + group.name.encode(), _encode(row))


def _place_in_memory(catalog: Catalog, command: PlaceCoordinator) -> None:
    if command.replica_id not in catalog.coordinators and command.broker not in catalog.coordinators.values():
        placed = PlacedReplica(command.group_id, command.replica_id, command.broker, "", 0)
        catalog.coordinators[command.replica_id] = command.broker
        catalog.unmade[placed.key] = placed


def _place_as_made(catalog: Catalog, command: PlaceCoordinator) -> None:
    _place_coordinator(catalog, command)
    catalog.replicas_made([(command.group_id, command.replica_id)])


_place_coordinator = Catalog.place_coordinator


def _retire_in_memory(catalog: Catalog, command: RetireCoordinator) -> None:
    _retire_coordinator(catalog, command)
    catalog._store.delete(META, b"k" + command.replica_id.encode())


_retire_coordinator = Catalog.retire_coordinator


def _retire_voters(target: int, sound: Mapping[ReplicaId, str], picture: growth.Picture) -> growth.Step | None:
    step = _leave(target, sound, picture)
    return growth.Retire(step.replica_id) if isinstance(step, growth.Remove) else step


def _wait_for_learners(target: int, picture: growth.Picture) -> dict[ReplicaId, str]:
    """One that never voted is kept, whatever became of its broker."""
    voters = {picture.coordinators.get(node) for node in picture.members.voters}
    return _staying(target, picture._replace(given_up=[each for each in picture.given_up if each in voters]))


def _dead_last(target: int, sound: Mapping[ReplicaId, str], picture: growth.Picture) -> growth.Step | None:
    leaving = picture.members.voters - sound.keys() - {picture.leader}
    here = {each.broker for each in picture.alive}
    well = sorted(node for node in leaving if picture.coordinators[node] in here and node not in picture.lost)
    return growth.Remove(well[0]) if well else _leave(target, sound, picture)


def _made_again(keeper: SimKeeper, node: ReplicaId) -> None:
    """A disk that was lost is replaced by an empty one, under the same id."""
    if keeper.may_run(node) and keeper._decide_without({node}):
        old = keeper._world.nodes[node]
        old.kill()
        keeper._world.nodes[node] = ClusterNode(keeper._world, node, old.engine.replica_set)


_staying = growth._staying
_leave = growth._leave

_mutation = ClusterMutation.of

_ZOMBIES = ("member_pause", "member_cut", "client_slow")

CLUSTER_MUTATIONS = (
    _mutation(
        "no_claim",
        "a new owner does not fence the old one",
        Invariant.FENCED,
        SimMember,
        "claim",
        _read_unclaimed,
        *_ZOMBIES,
    ),
    _mutation(
        "no_fencing", "a partition takes any generation", Invariant.FENCED, ClusterWorld, "write", _unfenced, *_ZOMBIES
    ),
    _mutation(
        "grant_before_release",
        "a partition is granted before its owner let go",
        Invariant.ONE_OWNER,
        _Step,
        "finish",
        _grant_before_release,
        *("member_leave", "slow_release", "wishes"),
    ),
    _mutation(
        "generation_stands_still",
        "a change without a new generation",
        Invariant.GENERATIONS,
        _Step,
        "finish",
        _same_generation,
        *_ZOMBIES,
    ),
    _mutation(
        "static_keeps_generation",
        "a static member's successor commits with its predecessor's generation",
        Invariant.ONE_OWNER,
        _Step,
        "join",
        _inherit_grants,
        *("member_kill",),
    ),
    _mutation(
        "generation_reset",
        "a group that is made again begins at generation 0",
        Invariant.GENERATIONS,
        Catalog,
        "keep_generation",
        lambda catalog, generation: None,
        *("delete_groups",),
    ),
    _mutation(
        "no_fresh_sessions",
        "a new leader does not know the members",
        Invariant.TRUE_ANSWERS,
        Memberships,
        "_open_missing",
        lambda memberships, group: None,
        ending="failover",
    ),
    _mutation(
        "names_not_ids",
        "whatever has the topic's name takes what was meant for the one before",
        Invariant.IDENTITY,
        ClusterWorld,
        "is_meant",
        lambda world, wanted, found: True,
        *("delete_topics", "client_slow"),
    ),
    _mutation(
        "deleted_generation_forgotten",
        "a partition that forgot a group lets its earlier members in",
        Invariant.NEW_LIFE,
        PartitionGroups,
        "_raise_floor",
        lambda groups, floor: None,
        *("delete_groups", "client_slow"),
    ),
    _mutation(
        "refused_for_good",
        "a member does not join again where a deleted group's generation keeps it out",
        Invariant.PROGRESS,
        SimMember,
        "_refused",
        _claim_again,
        *("delete_groups", "topics"),
        first_seed=70,
    ),
    _mutation(
        "sessions_not_renewed",
        "heartbeats do not count",
        Invariant.UNDISTURBED,
        Session,
        "renew",
        _never_renew,
        ending="quiet",
    ),
    _mutation(
        "late_joiners_starve", "who came first keeps all", Invariant.SHARES, _Step, "_retarget", _late_joiners_starve
    ),
    _mutation(
        "ids_in_memory",
        "counters are not written",
        Invariant.UNIQUE_IDS,
        Catalog,
        "_write_counters",
        lambda catalog: None,
        *("kill", "producer_ids", "power_loss"),
    ),
    _mutation(
        "places_in_memory",
        "where a new coordinator is to be is not written",
        Invariant.SAME_STATE,
        Catalog,
        "place_coordinator",
        _place_in_memory,
        *("growth", "kill", "power_loss"),
        size=1,
    ),
    _mutation(
        "made_before_placed",
        "a replica counts as made before its data is there",
        Invariant.SAME_STATE,
        Catalog,
        "place_coordinator",
        _place_as_made,
        *("growth", "kill"),
        size=1,
    ),
    _mutation(
        "retired_in_memory",
        "that a coordinator has no place any more is not written",
        Invariant.SAME_STATE,
        Catalog,
        "retire_coordinator",
        _retire_in_memory,
        *("brokers", "kill"),
        size=3,
    ),
    _mutation(
        "retired_before_removed",
        "a replica is deleted that has not left the group",
        Invariant.KEPT,
        growth,
        "_leave",
        _retire_voters,
        "brokers",
        size=3,
    ),
    _mutation(
        "lost_learner_waited_for",
        "a new coordinator whose broker is gone for good is waited for",
        Invariant.PROGRESS,
        growth,
        "_staying",
        _wait_for_learners,
        "brokers",
        size=3,
    ),
    _mutation(
        "dead_leave_last",
        "of those who are to leave the living go first",
        Invariant.PROGRESS,
        growth,
        "_leave",
        _dead_last,
        "brokers",
        size=3,
    ),
    _mutation(
        "removal_without_majority",
        "a voter may leave although too few of the others answer",
        Invariant.PROGRESS,
        RaftEngine,
        "_answers",
        lambda engine, node: True,
        *("brokers", "drop", "slow"),
        size=3,
    ),
    _mutation(
        "lost_made_again",
        "a coordinator whose disk was lost begins anew under its id",
        Invariant.LEADER_COMPLETENESS,
        SimKeeper,
        "_wipe",
        _made_again,
        *("brokers", "partition", "kill", "pause"),
        also=(Invariant.ONE_LEADER, Invariant.ONE_LOG, Invariant.NO_SELF_STOP, Invariant.PROGRESS),
        size=3,
    ),
    _mutation(
        "growth_unmarked",
        "a copy from before others joined the only coordinator leads alone",
        Invariant.ONE_LOG,
        RaftEngine,
        "_mark_growth",
        lambda engine: setattr(engine, "_unmarked", None),
        *("growth", "restore", "kill"),
        also=(Invariant.LEADER_COMPLETENESS, Invariant.ONE_LEADER),
        size=1,
    ),
    _mutation(
        "unwritten_members",
        "who was granted what is not written",
        Invariant.SAME_STATE,
        Groups,
        "_write",
        _write_head_only,
        *("kill", "power_loss", "member_leave"),
        # Before its state is compared, a replica that has started again may answer from it.
        also=(Invariant.TRUE_ANSWERS,),
    ),
)


@contextmanager
def releases_unchecked() -> Iterator[None]:
    """Neither the leader nor the log asks what a member knew when it let go."""
    with (
        patch.object(Member, "releases", _release_whenever),
        patch.object(_Step, "release", _apply_release_whenever),
    ):
        yield
