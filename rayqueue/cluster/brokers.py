"""Brokers as operators see them: what each holds, what is being moved, and moves that they ask for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from rayqueue.cluster import commands
from rayqueue.cluster.catalog import recreated_topic, unknown_topic
from rayqueue.cluster.commands import BeginMove, RecoverGroup
from rayqueue.cluster.disks import reserve, spare_bytes
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.moves import Move, Reason
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.seen import Seen
from rayqueue.cluster.sites import Sites
from rayqueue.errors import InvalidInputError, InvariantBrokenError, MembershipError, UnknownPartitionError
from rayqueue.ids import ReplicaId
from rayqueue.protocol.calls import (
    BeginRebalance,
    Broker,
    ClusterInfo,
    LostReplica,
    MoveInfo,
    MoveReplica,
    RebalanceInfo,
    RecoverPartition,
    RecoveryInfo,
    Share,
    Waiting,
)
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, check_name

MAX_SAID = 2000
"""Characters of what an operator was told."""

MAX_PLANNED = 5_000
"""Moves of one plan: it is one entry of the coordinator's log."""


def cluster_info(
    machine: ClusterMachine,
    sites: Sites,
    coordinator: str,
    term: int,
    first_coordinators: Mapping[ReplicaId, str] | None = None,
) -> ClusterInfo:
    """``first_coordinators``: those that the cluster was made with, and their brokers. They are in nobody's log."""
    first = Counter(
        broker for replica_id, broker in (first_coordinators or {}).items() if replica_id not in machine.coordinators
    )
    counts, room, seen = machine.replica_counts(), sites.room(), sites.seen
    spare, promised = spare_bytes(sites.alive.values(), sites.settings), sites.promised_bytes()
    leaders = None if seen.leaders is None else Counter(seen.leaders.values())
    brokers: list[Broker] = []
    for name, row in sorted(machine.brokers.items()):
        alive = sites.alive.get(name)
        brokers.append(
            Broker(
                name,
                row.host,
                alive is not None,
                counts.get(name, 0),
                room.get(name),
                row.draining,
                machine.holds(name) + first[name],
                row.ray_node,
                "" if alive is None else alive.rack,
                None if leaders is None else leaders[name],
                row.memory_bytes,
                0 if alive is None else alive.disk_bytes,
                0 if alive is None else alive.disk_free_bytes,
                spare.get(name),
                alive is not None and alive.leaving,
                promised.get(name, 0),
            )
        )
    return ClusterInfo(
        machine.cluster_id,
        coordinator,
        term,
        tuple(brokers),
        len(machine.topics),
        sum(len(info.partitions) for info in machine.topics.values()),
        len(machine.groups),
        tuple(move_info(machine, move, seen) for _, move in sorted(machine.moves.items())),
        tuple(LostReplica(*key, why) for key, why in sorted(machine.lost.items())),
        tuple(recovery_info(each) for _, each in sorted(machine.recoveries.items())),
        rebalance_info(machine),
        tuple(_waiting(machine, seen)),
    )


def move_info(machine: ClusterMachine, move: Move, seen: Seen) -> MoveInfo:
    found = machine.partition(move.group_id)
    if found is None:
        raise InvariantBrokenError(f"a replica of {move.group_id} is being replaced, which is not there")
    info, partition = found
    source = next((each.broker for each in partition.replicas if each.replica_id == move.remove), "")
    add = move.add if move.adds else ""
    told = MoveInfo(info.name, partition.number, move.remove, add, move.broker, move.reason.value, move.why, source)
    pace = seen.paces.get(move.group_id)
    if pace is None:
        return told
    return msgspec.structs.replace(
        told,
        size_bytes=pace.size_bytes,
        copied_bytes=pace.copied_bytes,
        bytes_per_s=pace.bytes_per_s,
        left_ms=pace.left_ms,
    )


def rebalance_info(machine: ClusterMachine) -> RebalanceInfo | None:
    under_way = machine.rebalance
    if under_way is None:
        return None
    shares: dict[str, Share] = {}
    for each in machine.planned.values():
        known = shares.get(each.broker, Share(each.broker, 0, 0))
        shares[each.broker] = Share(each.broker, known.moves + 1, known.size_bytes + each.size_bytes)
    waiting = tuple(share for _, share in sorted(shares.items()))
    return RebalanceInfo(under_way.number, under_way.moves, under_way.size_bytes, under_way.begun_ms, waiting)


def _waiting(machine: ClusterMachine, seen: Seen) -> Iterator[Waiting]:
    for group_id, why in sorted(seen.waiting.items()):
        found = machine.partition(group_id)
        if found is not None and group_id not in machine.moves:
            yield Waiting(found[0].name, found[1].number, why)


def rebalance_command(sites: Sites, call: BeginRebalance, now_ms: int) -> commands.BeginRebalance:
    """What to write for a plan. ``CapacityError`` if it is more than a broker takes, ``InvalidInputError`` if one is
    not there."""
    if len(call.moves) > MAX_PLANNED:
        raise InvalidInputError(f"{len(call.moves)} moves are more than one plan has ({MAX_PLANNED})", key="moves")
    room, spare = sites.room(), sites.spare_bytes()
    for each in call.moves:
        if each.size_bytes < 0:
            raise InvalidInputError("a replica has no less than 0 bytes", key="size_bytes")
        _check_target(sites, each.broker)
        size_bytes = max(each.size_bytes, sites.seen.sizes.get(each.group_id, 0))
        if room.get(each.broker, 1) <= 0 or spare.get(each.broker, size_bytes) < size_bytes:
            sites.check_room(each.broker, size_bytes)
            raise InvalidInputError(f"the plan is more than broker {each.broker} takes; plan anew", broker=each.broker)
        if each.broker in room:
            room[each.broker] -= 1
        reserve(spare, sites.alive.values(), each.broker, size_bytes)
    return commands.BeginRebalance(
        tuple((each.group_id, each.remove, each.broker, each.size_bytes) for each in call.moves), now_ms
    )


def _check_target(sites: Sites, broker: str) -> None:
    target = sites.alive.get(broker)
    if target is None or not target.stays:
        why = "is not there" if target is None else "is to be emptied" if target.draining else "is drained by Ray"
        raise InvalidInputError(f"broker {broker} {why}; nothing is moved to it", broker=broker)


_MAX_BEGINNING = 2**62


def recovery_info(recovery: Recovery) -> RecoveryInfo:
    return RecoveryInfo(*msgspec.structs.astuple(recovery))


def recover_command(machine: ClusterMachine, sites: Sites, call: RecoverPartition, now_ms: int) -> RecoverGroup:
    """What to write for a recovery that an operator asks for. An error that says why, if it cannot be."""
    _, partition = _partition(machine, call.topic, call.topic_id, call.partition)
    held = {replica.replica_id: replica.broker for replica in partition.replicas}
    if (call.survivor and call.survivor not in held) or set(call.replicas) != set(held):
        raise MembershipError(
            f"{call.topic}-{call.partition} has the replicas {', '.join(held)}: one of these can go on alone, and "
            f"{', '.join(call.replicas)} were there when you looked"
        )
    abandoned = tuple((replica_id, broker) for replica_id, broker in held.items() if replica_id != call.survivor)
    said = call.said[:MAX_SAID]
    if call.survivor:
        return RecoverGroup(partition.group_id, call.survivor, abandoned, now_ms, said)
    if call.begins_at is None or not 0 <= call.begins_at <= _MAX_BEGINNING:
        raise InvalidInputError(f"an offset to begin at is 0 to {_MAX_BEGINNING}", key="begins_at")
    broker = _place_anew(sites, partition, call.broker)
    return RecoverGroup(partition.group_id, "", abandoned, now_ms, said, begins_at=call.begins_at, broker=broker)


def _place_anew(sites: Sites, partition: PartitionInfo, wanted: str) -> str:
    """Where a partition begins anew of which no copy is left: as asked, or where it was, or where there is room."""
    if not wanted:
        able = [broker for broker, each in sites.alive.items() if each.stays]
        before = [replica.broker for replica in partition.replicas]
        wanted = next((broker for broker in before if broker in able), "") or sites.place(1, 1)[0][0]
    _check_target(sites, wanted)
    sites.check_room(wanted)
    return wanted


def _partition(machine: ClusterMachine, topic: str, topic_id: int, number: int) -> tuple[TopicInfo, PartitionInfo]:
    info = machine.topics.get(check_name("topic", topic))
    if info is None:
        raise unknown_topic(topic)
    if info.topic_id != topic_id:
        raise recreated_topic(info, topic_id)
    if not 0 <= number < len(info.partitions):
        raise UnknownPartitionError(
            f"{info.name} has {len(info.partitions)} partitions; there is no {number}",
            topic=info.name,
            partition=number,
        )
    return info, info.partitions[number]


def move_command(machine: ClusterMachine, sites: Sites, call: MoveReplica) -> BeginMove:
    """What to write for a move that an operator asks for. An error that says why, if it cannot be."""
    info, partition = _partition(machine, call.topic, call.topic_id, call.partition)
    held = [replica.broker for replica in partition.replicas]
    if call.source not in held or call.target in held:
        raise InvalidInputError(
            f"{info.name}-{call.partition} has replicas on {', '.join(held)}: one of these can be moved, to a broker "
            f"that has none; not from {call.source} to {call.target}"
        )
    _check_target(sites, call.target)
    sites.check_room(call.target, max(0, call.size_bytes, sites.seen.sizes.get(partition.group_id, 0)))
    replica_id = next(replica.replica_id for replica in partition.replicas if replica.broker == call.source)
    return BeginMove(partition.group_id, replica_id, call.target, Reason.ASKED, "an operator asked for it")
