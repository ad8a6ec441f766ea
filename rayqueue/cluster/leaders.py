"""Leaders: leaderships shared out over brokers, or next to those who read. Pure: time is handed in.

Every replica of a partition may lead it, so leaders gather where elections end
after a restart. ``spread`` finds the transfers after which no sequence of further
ones would share them out better; from there it finds none, so it ends.

``Spreader`` adds what keeps it from doing harm: it acts on what two looks in a row
have seen, moves a few at a time, and leaves a partition alone for a while
after it has moved it, whether that succeeded or not. A broker that comes and goes
moves no leader by that: it must have stayed for two looks.

With ``prefer_leader="consumer"`` a partition should be led on the node where most of
its readers are. Such a partition counts where it is led, and is not used to even
out the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rayqueue.config import ClusterSettings


class Transfer(NamedTuple):
    group_id: str
    source: str
    """The broker that leads it."""
    target: str


class Picture(NamedTuple):
    """What is known when transfers are looked for."""

    held: Mapping[str, Collection[str]]
    """By Raft group, the brokers that are here, stay, and have a replica that may lead it."""
    leaders: Mapping[str, str]
    """By Raft group, the broker that leads it. Groups that are not named have no known leader."""
    wished: Mapping[str, str] = {}
    """By Raft group, the broker next to its readers."""


def spread(held: Mapping[str, Collection[str]], leaders: Mapping[str, str]) -> list[Transfer]:
    """Transfers that make the shares as even as they can be; at most one of each group. Who does not stay leads nothing
    that another one could."""
    leads = {group: broker for group, broker in leaders.items() if group in held}
    brokers = {broker for each in held.values() for broker in each}
    counts = Counter(dict.fromkeys(brokers, 0))
    counts.update(leads.values())
    by_broker: dict[str, set[str]] = {}
    for group, broker in leads.items():
        by_broker.setdefault(broker, set()).add(group)
    found: dict[str, str] = {}
    for group, source in sorted(leads.items()):
        if held[group] and source not in held[group]:
            found[group] = target = min(held[group], key=lambda each: (counts[each], each))
            by_broker[source].discard(group)
            by_broker.setdefault(target, set()).add(group)
            counts[source] -= 1
            counts[target] += 1
    settled: set[str] = set()
    """Those from which no path leads to one that has two less."""
    while True:
        left = counts.keys() - settled
        if not left:
            break
        heavy = max(left, key=lambda each: (counts[each], each))
        path = _path(heavy, counts, by_broker, held)
        if not path:
            settled.add(heavy)
            continue
        settled.clear()
        for group, source, target in path:
            by_broker[source].discard(group)
            by_broker.setdefault(target, set()).add(group)
            counts[source] -= 1
            counts[target] += 1
            found[group] = target
    return [Transfer(group, leads[group], target) for group, target in sorted(found.items()) if leads[group] != target]


def _path(
    start: str, counts: Mapping[str, int], by_broker: Mapping[str, Collection[str]], held: Mapping[str, Collection[str]]
) -> list[tuple[str, str, str]]:
    """The shortest chain of transfers that ends at a broker with at least two less than ``start``."""
    came: dict[str, tuple[str, str, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        source = waiting.popleft()
        for group in sorted(by_broker.get(source, ())):
            for target in sorted(held[group]):
                if target in came:
                    continue
                came[target] = (group, source, target)
                if counts[target] <= counts[start] - 2:
                    return _steps(came, target)
                waiting.append(target)
    return []


def _steps(came: Mapping[str, tuple[str, str, str] | None], end: str) -> list[tuple[str, str, str]]:
    steps: list[tuple[str, str, str]] = []
    step = came[end]
    while step is not None:
        steps.append(step)
        step = came[step[1]]
    return steps


def nearest(readers: Mapping[str, int], held: Collection[str], leader: str | None) -> str | None:
    """The broker on whose node most readers are, of those that have a replica. Who leads stays, if it is one of them.

    ``readers``: how many there are by broker. None if none of them is beside a replica.
    """
    most = max((readers.get(broker, 0) for broker in held), default=0)
    best = sorted(broker for broker in held if readers.get(broker, 0) == most) if most else []
    return leader if leader in best else (best[0] if best else None)


class Spreader:
    """Belongs to whoever leads the coordinator. Remembers the last look, and what it moved lately."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._before: Picture | None = None
        self._moved_s: dict[str, float] = {}

    def forget(self) -> None:
        """Another coordinator leads."""
        self._before = None
        self._moved_s.clear()

    def look(self, now_s: float, picture: Picture, *, eager: bool = False) -> list[Transfer]:
        """The transfers to try now. ``eager``: an operator waits for it."""
        before, self._before = self._before, picture
        rest_s = self._settings.leader_rest_ms / 1000
        self._moved_s = {group: at_s for group, at_s in self._moved_s.items() if now_s - at_s < rest_s}
        if not eager and (before is None or before.held != picture.held):
            return []
        found = [
            Transfer(group, picture.leaders[group], broker)
            for group, broker in sorted(picture.wished.items())
            if group in picture.leaders
            and picture.leaders[group] != broker
            and broker in picture.held.get(group, ())
            and (eager or (before is not None and before.wished.get(group) == broker))
        ]
        if eager or (self._settings.spread_leaders and before is not None and before.leaders == picture.leaders):
            found += spread(_without(picture.held, picture), picture.leaders)
        if not eager:
            found = [each for each in found if each.group_id not in self._moved_s]
        found = found[: self._settings.leader_moves_per_look]
        self._moved_s.update((each.group_id, now_s) for each in found)
        return found


def _without(held: Mapping[str, Collection[str]], picture: Picture) -> Mapping[str, Collection[str]]:
    """Those that stay next to their readers can only be led where they are."""
    return {
        group: (picture.leaders[group],) if group in picture.wished and group in picture.leaders else brokers
        for group, brokers in held.items()
    }
