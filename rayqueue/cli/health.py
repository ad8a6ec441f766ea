"""Partitions that have fewer copies than they should: why, what is being done, and for how much longer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rayqueue.cli.brokers import duration
from rayqueue.cli.common import size
from rayqueue.cluster.moves import cannot_decide
from rayqueue.cluster.placement import partition_group_id

if TYPE_CHECKING:
    from rayqueue.client.admin.admin import PartitionDescription, TopicDescription
    from rayqueue.protocol.calls import ClusterInfo, MoveInfo


def shortfalls(info: ClusterInfo, topics: Iterable[TopicDescription]) -> Iterator[str]:
    moves = {(move.topic, move.partition): move for move in info.moves}
    waiting = {(each.topic, each.partition): each.why for each in info.waiting}
    away = {each.broker for each in info.brokers if not each.alive}
    for topic in topics:
        for partition in topic.partitions:
            if partition.healthy >= topic.settings.replication:
                continue
            key = topic.name, partition.number
            doing = _doing(moves.get(key), waiting.get(key), partition, away)
            copies = f"{partition.healthy} of {topic.settings.replication} copies are well"
            yield f"{topic.name}-{partition.number}: {copies}{_why(partition)}; {doing}"


def losses(info: ClusterInfo, topics: Iterable[TopicDescription]) -> Iterator[str]:
    """Replicas that have lost their data, and whether they are replaced: that takes copies that can decide."""
    lost = {(each.group_id, each.replica_id) for each in info.lost}
    away = {each.broker for each in info.brokers if not each.alive}
    stopped: dict[str, str] = {}
    for topic in topics:
        for partition in topic.partitions:
            replicas, group_id = partition.replicas, partition_group_id(topic.name, partition.number, topic.topic_id)
            ill = sum((group_id, each.replica_id) in lost or each.broker in away for each in replicas)
            if cannot_decide(len(replicas) - ill, len(replicas)):
                stopped[group_id] = f"rayqueue recover {topic.name} {partition.number}"
    for each in info.lost:
        command = stopped.get(each.group_id)
        fate = "is to be replaced" if command is None else f"cannot be replaced, too few copies are left ({command})"
        yield f"{each.replica_id} of {each.group_id} is lost, and {fate}: {each.why}"


def _why(partition: PartitionDescription) -> str:
    ill = [
        f"{each.replica_id} on {each.broker}: {each.problem}" for each in partition.replicas if each.problem is not None
    ]
    return f" ({'; '.join(ill)})" if ill else ""


def _doing(move: MoveInfo | None, waiting: str | None, partition: PartitionDescription, away: set[str]) -> str:
    if move is not None and move.broker:
        instead = f" instead of {move.remove}" if move.remove else ""
        return f"{move.add} is made on {move.broker}{instead}{pace_of(move)}"
    if waiting is not None:
        return waiting
    gone = sorted({each.broker for each in partition.replicas if each.problem is not None} & away)
    if gone:
        return f"waiting for {', '.join(gone)} (cluster.replace_after_ms says for how long)"
    return "nothing is being copied: it catches up, or is started again, by itself"


def pace_of(move: MoveInfo) -> str:
    if move.size_bytes is None:
        return ""
    left = f", {duration(move.left_ms)} left" if move.left_ms is not None else ""
    return f": {size(move.copied_bytes)} of {size(move.size_bytes)}, {move.bytes_per_s / 1e6:,.1f} MB/s{left}"


def drained(info: ClusterInfo) -> Iterator[str]:
    """Brokers that Ray may take away with what they hold."""
    for each in info.brokers:
        if each.leaving and each.holds:
            yield (
                f"Ray drains the node of broker {each.broker} on {each.host}, which still holds {each.holds} replicas; "
                "they move by themselves if cluster.replace_after_ms is set, else by: "
                f"rayqueue brokers decommission {each.broker}"
            )


def full_disks(info: ClusterInfo) -> Iterator[str]:
    for each in info.brokers:
        if each.alive and each.nearly_full:
            yield (
                f"the disk of broker {each.broker} on {each.host} is nearly full: {size(each.disk_free_bytes)} of "
                f"{size(each.disk_bytes)} are free; nothing is placed on it (cluster.disk_reserve_percent)"
            )
