"""Repairs: which brokers are waited for no longer, which replicas need a move, and what is known of a move.

Owns no more than how long brokers have been away. Looks at what the metadata
says, at who is here and at what replicas say of themselves; ``moves`` says which
step follows. Pure, with the time handed in: the keeper's mover acts by it, and so
do the simulated ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from rayqueue.cluster.catalog import PlacedReplica
from rayqueue.cluster.commands import ForgetBroker
from rayqueue.cluster.moves import Found, Move, Need, Planned, Reason, Wishes, cannot_decide, needs
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.recoveries import Recovery
from rayqueue.config import ClusterSettings
from rayqueue.ids import ReplicaId
from rayqueue.protocol.topics import TopicInfo
from rayqueue.raft.replica_set import ReplicaSet


class Absences:
    """Belongs to whoever leads the coordinator: another leader counts anew.

    A broker is given up once it has been away for ``replace_after_ms``; and one that was decommissioned, whatever that
    setting says, once it has been away for ``broker_wait_ms``. Not sooner: its node may just be restarting.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._since_s: dict[str, float] = {}
        self.given_up: dict[str, str] = {}
        """Brokers that are not waited for any longer, and why. As of the last look."""

    def forget(self) -> None:
        self._since_s = {}
        self.given_up = {}

    def look(self, now_s: float, brokers: Mapping[str, bool], here: Collection[str]) -> None:
        """``brokers``: all that are known, and whether each is to be emptied."""
        self._since_s = {broker: self._since_s.get(broker, now_s) for broker in brokers if broker not in here}
        told = {each: self._why((now_s - since_s) * 1000, each, brokers) for each, since_s in self._since_s.items()}
        self.given_up = {broker: why for broker, why in told.items() if why}

    def _why(self, away_ms: float, broker: str, brokers: Mapping[str, bool]) -> str:
        after_ms = self._settings.replace_after_ms
        if brokers[broker] and away_ms >= self._settings.broker_wait_ms:
            return f"broker {broker} has been decommissioned and is away"
        if after_ms is not None and away_ms >= after_ms:
            return f"broker {broker} has been away for more than {after_ms} ms"
        return ""


class Metadata(Protocol):
    """What decides of it (``ClusterView``)."""

    @property
    def topics(self) -> Mapping[str, TopicInfo]: ...
    @property
    def lost(self) -> Mapping[tuple[str, str], str]: ...
    @property
    def missing(self) -> Collection[tuple[str, str]]: ...
    @property
    def moves(self) -> Mapping[str, Move]: ...
    @property
    def unmade(self) -> Collection[tuple[str, str]]: ...
    @property
    def planned(self) -> Sequence[Planned]: ...
    @property
    def recoveries(self) -> Mapping[str, Recovery]: ...


def needs_of(
    view: Metadata,
    alive: Sequence[AliveBroker],
    given_up: Mapping[str, str],
    *,
    replaces: bool = False,
    led: Collection[str] = (),
) -> list[Need]:
    """The replicas that should be replaced, most urgent first. ``replaces``: those on nodes that Ray drains, too.
    ``led``: groups that somebody leads, as far as is known: they can decide, whatever was reported of them."""
    partitions = [partition for info in view.topics.values() for partition in info.partitions]
    draining = {each.broker for each in alive if each.draining or (each.leaving and replaces)}
    replication = {
        part.group_id: info.settings.replication
        for info in view.topics.values()
        for part in info.partitions
        if len(part.replicas) != info.settings.replication
    }
    changing = {group_id for group_id, _ in view.unmade}
    changing |= {each.group_id for each in view.recoveries.values() if not each.settled}
    wishes = Wishes(replication, view.planned, changing, alive)
    return needs(partitions, view.lost, given_up, view.moves, draining, wishes, led)


def stuck(view: Metadata, given_up: Mapping[str, str]) -> dict[str, str]:
    """Partitions of which so many copies are lost, or on brokers that are given up, that ``needs_of`` leaves them
    alone: by Raft group, what an operator should know."""
    found: dict[str, str] = {}
    for info in view.topics.values():
        for partition in info.partitions:
            ill = {
                each.replica_id: view.lost.get((partition.group_id, each.replica_id)) or given_up[each.broker]
                for each in partition.replicas
                if each.broker in given_up or (partition.group_id, each.replica_id) in view.lost
            }
            left, copies = len(partition.replicas) - len(ill), len(partition.replicas)
            if cannot_decide(left, copies):
                command = f"rayqueue recover {info.name} {partition.number} --unsafe"
                found[partition.group_id] = _stuck(ill, left, copies, command)
    return found


def _stuck(ill: Mapping[str, str], left: int, copies: int, command: str) -> str:
    names = ", ".join(ill)
    if left:
        return (
            f"{left} of {copies} copies are left, which decide nothing: bring {names} back, or give up what only they "
            f"have ({command})"
        )
    whys = "; ".join(f"{replica_id}: {why}" for replica_id, why in ill.items())
    return (
        f"no copy is left to make another one from ({whys}). Bring the data of {names} back, or give it up and begin "
        f"anew, empty ({command}, which asks first)"
    )


def only_and_lost(view: Metadata) -> list[tuple[str, str]]:
    """Replicas, by Raft group and id, that are the only ones of their partitions and were reported as lost, for more
    than a missing directory. Nobody replaces them; if their data is brought back, they serve as before: there is nobody
    whom they could contradict."""
    return [
        (partition.group_id, partition.replicas[0].replica_id)
        for info in view.topics.values()
        for partition in info.partitions
        if len(partition.replicas) == 1
        and (partition.group_id, partition.replicas[0].replica_id) in view.lost.keys() - set(view.missing)
    ]


class Said(Protocol):
    """What a replica says of itself (``Status``)."""

    @property
    def replica_id(self) -> ReplicaId: ...
    @property
    def damaged(self) -> str | None: ...
    @property
    def doubted(self) -> str | None: ...


def found_of(
    move: Move,
    leader: ReplicaId,
    members: ReplicaSet,
    said: Iterable[Said],
    places: Mapping[ReplicaId, str],
    here: Collection[str],
    given_up: Collection[str],
    *,
    lost: Collection[str] = (),
    unmade: bool = False,
    settled: bool = True,
) -> Found:
    """What is known of a move's group.

    ``members`` and ``settled``: as its leader knows them. ``said``: by those replicas that answer. ``places``: the
    replicas that are in service, and their brokers. ``lost``: replicas of the group whose data is, as the metadata has
    it. ``unmade``: the new one's data is still to be made.
    """
    known = {each.replica_id: each for each in said}
    add = known.get(ReplicaId(move.add))
    return Found(
        members,
        leader,
        unmade=unmade,
        # One that is an older copy of itself would wait for voters that it is there to replace. One that found damage
        # while it was still unmade has reported it in vain.
        lost=move.add in lost or (add is not None and not _is_well(add)),
        old_broker=places.get(ReplicaId(move.remove), ""),
        well=[node for node, each in known.items() if _is_well(each)],
        away=[node for node, broker in places.items() if broker not in here or node in lost],
        gone=[node for node, broker in places.items() if broker in given_up or node in lost],
        settled=settled,
        found_again=move.reason is Reason.LOST and move.remove not in lost,
        strangers=members.learners - places.keys() - {ReplicaId(move.add)},
    )


def _is_well(said: Said) -> bool:
    """It has what it promised. A doubted copy does not know, and decides nothing before it does."""
    return said.damaged is None and said.doubted is None


def forgettable(
    draining: Iterable[str],
    here: Collection[str],
    given_up: Collection[str],
    counts: Mapping[str, int],
    coordinators: Collection[str],
    doomed: Iterable[PlacedReplica],
) -> list[ForgetBroker]:
    """Brokers that were emptied and are gone. ``counts``: replicas in service, by broker; ``coordinators``: brokers
    with one of the coordinator's. Where something is doomed, a broker that may just be restarting is waited for."""
    leftovers = {each.broker for each in doomed}
    empty = [each for each in sorted(draining) if not (each in here or counts.get(each) or each in coordinators)]
    return [ForgetBroker(each, each in leftovers) for each in empty if each not in leftovers or each in given_up]
