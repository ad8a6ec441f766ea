"""Placement of the replicas of new partitions. Pure: the same brokers and counts give the same placement.

The first rule is to survive a rack and a node: the replicas of one partition are
in as many racks as there are, then on as many hosts, then on as many brokers. The second is to share the
work: whoever has fewest replicas, and room, gets the next one. The first replica of a
partition is the one that leads when all are well, so these are shared out on
their own. More replicas than brokers: several are on one. But no broker gets a second
one because another has no room: then nothing is placed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rayqueue.errors import InvariantBrokenError

Placement = tuple[tuple[str, ...], ...]
"""Per partition the brokers of its replicas; the first is meant to lead."""


class AliveBroker(NamedTuple):
    """A node that can take replicas now."""

    broker: str
    host: str
    ray_node: str = ""
    memory_bytes: int = 0
    """Of its host; 0 if that is not known."""
    coordinators: int = 0
    """Replicas of the coordinator that it has."""
    draining: bool = False
    """It is to be emptied, and takes none."""
    rack: str = ""
    """What fails together: of its Ray node's labels, ``rayqueue.rack`` or the zone. "" is one rack, too."""
    disk_bytes: int = 0
    """Of the file system of its data directory; 0 if that is not known."""
    disk_free_bytes: int = 0
    leaving: bool = False
    """Ray drains its node (a spot instance that is taken back, a node that is scaled away): it will be gone soon."""

    @property
    def stays(self) -> bool:
        """It may be given something."""
        return not (self.draining or self.leaving)


def crowding(brokers: Iterable[str], known: Mapping[str, AliveBroker]) -> tuple[int, int, int]:
    """How much the copies of a partition share: racks, then hosts, then brokers. Less is better.

    Brokers that are not known are taken for racks and hosts of their own.
    """
    racks: Counter[tuple[str, str]] = Counter()
    hosts: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for broker in brokers:
        each = known.get(broker)
        racks[("", broker) if each is None else ("rack", each.rack)] += 1
        hosts[broker if each is None else each.host] += 1
        held[broker] += 1
    return _squares(racks), _squares(hosts), _squares(held)


def _squares(counts: Mapping[Any, int]) -> int:
    return sum(count * count for count in counts.values())


class NoRoomError(Exception):
    """Too few brokers have room for another replica."""


def partition_group_id(topic: str, number: int, topic_id: int) -> str:
    """The Raft group of a partition. Never reused: a topic that is made again has another id."""
    return f"{topic}-{number}.{topic_id}"


def replica_id(position: int) -> str:
    """The id of a partition's replica, from 0."""
    return f"r{position + 1}"


def place(
    partitions: int,
    replication: int,
    brokers: Sequence[AliveBroker],
    replicas: Mapping[str, int],
    leaders: Mapping[str, int],
    room: Mapping[str, int] | None = None,
) -> Placement:
    """Brokers for ``partitions`` new partitions, given how many replicas and first replicas each broker has now.

    ``room``: how many more each takes; one that is not named takes any number. ``NoRoomError`` if that is too few.
    """
    if not brokers:
        raise ValueError("no broker to place a replica on")
    board = _Board(brokers, replicas, leaders, room or {})
    return tuple(board.next_partition(replication) for _ in range(partitions))


class _Board:
    """Counts as they are while replicas are placed. Heaps, so that a pick does not look at every broker."""

    def __init__(
        self,
        brokers: Sequence[AliveBroker],
        replicas: Mapping[str, int],
        leaders: Mapping[str, int],
        room: Mapping[str, int],
    ) -> None:
        self._host = {each.broker: (each.rack, each.host) for each in brokers}
        self._room = dict(room)
        self._full: set[str] = set()
        self._open = Counter(self._host.values())
        """Brokers with room, by rack and host; hosts without one are not there."""
        self._racked = len({each.rack for each in brokers}) > 1
        for broker in self._host:
            if self._room.get(broker, 1) <= 0:
                self._close(broker)
        self._replicas = {broker: replicas.get(broker, 0) for broker in self._host}
        self._leaders = {broker: leaders.get(broker, 0) for broker in self._host}
        self._by_replicas = [(count, broker) for broker, count in self._replicas.items()]
        self._by_leaders = [(self._leaders[each], self._replicas[each], each) for each in self._host]
        heapq.heapify(self._by_replicas)
        heapq.heapify(self._by_leaders)

    def next_partition(self, replication: int) -> tuple[str, ...]:
        if len(self._host) - len(self._full) < min(replication, len(self._host)):
            raise NoRoomError
        chosen = [self._leader()]
        while len(chosen) < replication:
            chosen.append(self._follower(chosen))
        return tuple(chosen)

    def _leader(self) -> str:
        heap = self._by_leaders
        while True:
            _, replicas, broker = heap[0]
            if broker in self._full:
                heapq.heappop(heap)
                continue
            if replicas == self._replicas[broker]:
                break
            heapq.heapreplace(heap, (self._leaders[broker], self._replicas[broker], broker))
        self._leaders[broker] += 1
        self._replicas[broker] += 1
        heapq.heapreplace(heap, (self._leaders[broker], self._replicas[broker], broker))
        heapq.heappush(self._by_replicas, (self._replicas[broker], broker))
        self._fill(broker)
        return broker

    def _fill(self, broker: str) -> None:
        if broker in self._room:
            self._room[broker] -= 1
            if not self._room[broker]:
                self._close(broker)

    def _close(self, broker: str) -> None:
        self._full.add(broker)
        host = self._host[broker]
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]

    def _follower(self, chosen: list[str]) -> str:
        """The broker with fewest replicas in the rack, on the host, then itself, that this partition uses least."""
        on_host: Counter[tuple[str, str]] = Counter(self._host[broker] for broker in chosen)
        in_rack: Counter[str] = Counter(self._host[broker][0] for broker in chosen)

        def used(place: tuple[str, str]) -> tuple[int, int]:
            return in_rack[place[0]] if self._racked else 0, on_host[place]

        least = (0, 0)
        if self._racked or len(self._open) <= len(on_host):
            least = min(map(used, self._open), default=least)
        passed: list[tuple[int, str]] = []
        best: tuple[int, int, str] | None = None
        heap = self._by_replicas
        while heap:
            count, broker = heapq.heappop(heap)
            if count != self._replicas[broker]:
                continue  # an entry from before it got another replica
            if broker in self._full:
                continue
            passed.append((count, broker))
            if used(self._host[broker]) > least:
                continue
            copies = chosen.count(broker)
            if best is None or (copies, count, broker) < best:
                best = (copies, count, broker)
            if best[0] == 0:
                break  # what follows in the heap has more replicas
        if best is None:
            if not self._open:
                raise NoRoomError
            raise InvariantBrokenError("no host is among those that are used least")
        _, count, broker = best
        self._replicas[broker] = count + 1
        for entry in passed:
            heapq.heappush(heap, entry if entry[1] != broker else (count + 1, broker))
        self._fill(broker)
        return broker
