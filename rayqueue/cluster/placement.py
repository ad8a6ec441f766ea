"""Where the replicas of new partitions go. Pure: the same brokers and counts give the same placement.

The first rule is to survive a node: the replicas of one partition are on as
many hosts as there are, then on as many brokers. The second is to share the
work: whoever has fewest replicas, and room, gets the next one. The first replica of a
partition is the one that leads when all are well, so these are shared out on
their own. More replicas than brokers: several are on one. But no broker gets a second
one because another has no room: then nothing is placed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        self._host = {each.broker: each.host for each in brokers}
        self._room = dict(room)
        self._full: set[str] = set()
        self._open = Counter(self._host.values())
        """Brokers with room, by host; hosts without one are not there."""
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
        """The broker with fewest replicas on the host, then itself, that this partition uses least."""
        on_host: dict[str, int] = {}
        for broker in chosen:
            on_host[self._host[broker]] = on_host.get(self._host[broker], 0) + 1
        least_on_host = 0
        if len(self._open) <= len(on_host):
            least_on_host = min((on_host.get(host, 0) for host in self._open), default=0)
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
            if on_host.get(self._host[broker], 0) > least_on_host:
                continue
            used = chosen.count(broker)
            if best is None or (used, count, broker) < best:
                best = (used, count, broker)
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
