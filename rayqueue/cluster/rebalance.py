"""A rebalance: the moves after which replicas are shared out evenly over brokers. Pure: looks at one picture.

Two goals, the first one first:

1. The copies of a partition share as few racks, hosts and brokers as they can.
2. No broker has two replicas more than another one that could take one of them.

Each move of a plan makes one of the two better and the first one never worse, so a
plan ends, and a plan for what it has made is empty. Nothing is moved to a broker
that has no room, is nearly full or is to be emptied; nothing is moved from one
that is away: that is not a matter of balance (``rayqueue.cluster.moves``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayqueue.cluster.disks import reserve
from rayqueue.cluster.placement import AliveBroker, crowding
from rayqueue.protocol.topics import TopicInfo


@dataclass(frozen=True, slots=True)
class PlannedMove:
    topic: str
    partition: int
    group_id: str
    remove: str
    """The replica's id."""
    source: str
    target: str
    size_bytes: int


class _Copies:
    """A partition while it is planned."""

    def __init__(self, topic: TopicInfo, number: int, size_bytes: int) -> None:
        partition = topic.partitions[number]
        self.topic = topic.name
        self.number = number
        self.group_id = partition.group_id
        self.size_bytes = size_bytes
        self.brokers = {replica.replica_id: replica.broker for replica in partition.replicas}
        """By replica, where it will be."""
        self.first = dict(self.brokers)

    def after(self, replica_id: str, target: str) -> Iterable[str]:
        return (target if each == replica_id else broker for each, broker in self.brokers.items())


class _Board:
    def __init__(
        self,
        topics: Iterable[TopicInfo],
        alive: Sequence[AliveBroker],
        sizes: Mapping[str, int],
        room: Mapping[str, int],
        spare: Mapping[str, int],
        skip: Collection[str],
    ) -> None:
        self.known = {each.broker: each for each in alive}
        self.open = sorted(each.broker for each in alive if each.stays)
        self.room = dict(room)
        self.spare = dict(spare)
        self.counts = dict.fromkeys(self.open, 0)
        self.copies: list[_Copies] = []
        self.on: dict[str, list[tuple[_Copies, str]]] = {}
        for topic in topics:
            for partition in topic.partitions:
                copies = _Copies(topic, partition.number, sizes.get(partition.group_id, 0))
                for replica_id, broker in copies.brokers.items():
                    self.counts[broker] = self.counts.get(broker, 0) + 1
                    if partition.group_id not in skip:
                        self.on.setdefault(broker, []).append((copies, replica_id))
                if partition.group_id not in skip:
                    self.copies.append(copies)

    def takes(self, target: str, copies: _Copies) -> bool:
        return (
            target not in copies.brokers.values()
            and self.room.get(target, 1) > 0
            and self.spare.get(target, copies.size_bytes) >= copies.size_bytes
        )

    def move(self, copies: _Copies, replica_id: str, target: str) -> None:
        source = copies.brokers[replica_id]
        copies.brokers[replica_id] = target
        self.on[source].remove((copies, replica_id))
        self.on.setdefault(target, []).append((copies, replica_id))
        for broker, more in ((source, -1), (target, 1)):
            self.counts[broker] += more
            if broker in self.room:
                self.room[broker] -= more
            reserve(self.spare, self.known.values(), broker, more * copies.size_bytes)

    # -- copies that share what they need not ---------------------------------------------------

    def part(self, copies: _Copies) -> None:
        while True:
            now = crowding(copies.brokers.values(), self.known)
            better = [
                (
                    crowding(copies.after(replica_id, target), self.known),
                    self.counts[target] - self.counts[source],
                    target,
                    replica_id,
                )
                for replica_id, source in copies.brokers.items()
                for target in self.open
                if source in self.known and self.takes(target, copies)
            ]
            best = min(better, default=None)
            if best is None or best[0] >= now:
                return
            self.move(copies, best[3], best[2])

    # -- brokers that have more than others -------------------------------------------------------

    def even_out(self) -> bool:
        """One move from a broker that has more to one that has at least two less. False if there is none."""
        full = [each for each in self.known if self.on.get(each)]
        sources = sorted(full, key=lambda each: (-self.counts[each], each))
        for source in sources:
            for target in sorted(self.open, key=lambda each: (self.counts[each], each)):
                if self.counts[source] - self.counts[target] < 2:
                    break
                found = self._movable(source, target)
                if found is not None:
                    self.move(*found, target)
                    return True
        return False

    def _movable(self, source: str, target: str) -> tuple[_Copies, str] | None:
        """The smallest replica for which the move makes its partition's copies share no more than now."""
        best: tuple[tuple[object, ...], _Copies, str] | None = None
        for copies, replica_id in self.on[source]:
            if not self.takes(target, copies):
                continue
            after = crowding(copies.after(replica_id, target), self.known)
            if after > crowding(copies.brokers.values(), self.known):
                continue
            # A replica that is moved anyway costs nothing more.
            key = (after, copies.first[replica_id] == source, copies.size_bytes, copies.group_id, replica_id)
            if best is None or key < best[0]:
                best = key, copies, replica_id
        return None if best is None else best[1:]


def plan(
    topics: Iterable[TopicInfo],
    alive: Sequence[AliveBroker],
    *,
    sizes: Mapping[str, int] | None = None,
    room: Mapping[str, int] | None = None,
    spare_bytes: Mapping[str, int] | None = None,
    skip: Collection[str] = (),
    most: int = 1_000,
) -> list[PlannedMove]:
    """The moves of a rebalance, ``most`` of them: another rebalance goes on from there.

    ``sizes``: bytes by Raft group. ``room`` and ``spare_bytes``: how many more replicas, and bytes, each broker takes;
    one that is not named takes any number. ``skip``: groups that are being changed already.
    """
    board = _Board(topics, alive, sizes or {}, room or {}, spare_bytes or {}, skip)
    for copies in board.copies:
        board.part(copies)
    for _ in range(most):
        if not board.even_out():
            break
    found = [
        PlannedMove(
            copies.topic,
            copies.number,
            copies.group_id,
            replica_id,
            first,
            copies.brokers[replica_id],
            copies.size_bytes,
        )
        for copies in board.copies
        for replica_id, first in copies.first.items()
        if copies.brokers[replica_id] != first
    ]
    return found[:most]
