"""The ``balanced`` strategy: even loads, few moves, an even share of each topic, in bounded work.

What is to be least, in this order:

1. the sum of the squares of the members' loads;
2. the number of partitions that move;
3. for each topic, the sum of the squares of what its readers have of it.

So of two topics that all want, a member that joins gets half of each, where
``sticky`` gave it all of one: at the same loads and the same number of moves.

Three passes. *Quotas*: topics that the same members want are one class; how
many partitions of each class each member gets is the flow of
``rayqueue.cluster.balance``, with chains of moves found by breadth-first search
instead of by cycles. *Shares*: within its quota each member gives away what it
has most of and takes what it has least of. *Polish*: the same flow once more, a
topic at a time, with all three goals as its cost.

The two exact searches, in the quotas and in the polish, are all that costs more
than a walk over partitions and wishes. Each looks at ``EDGES`` edges at most and
ends where it is when they are used up. A small group has the optimum; in a large
one loads, moves and shares are as good as the passes before have made them. Work is
O(partitions · log(members) + wishes + EDGES), whatever the wishes are.

Part of the replicated state machine: a release that would compute other
results, or count the work differently, needs another strategy's name.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rayqueue.cluster.balance import Balance, Budget, even_quotas
from rayqueue.protocol.topics import TopicPartition

EDGES = 100_000
"""Edges that each of the two exact searches looks at: less than 0.05 s."""

Counts = list[dict[str, int]]
"""By topic (or class), then by member: partitions."""


def balanced(
    wanted: Mapping[str, Sequence[str]],
    partitions: Mapping[str, int],
    previous: Mapping[str, Iterable[TopicPartition]],
) -> dict[str, tuple[TopicPartition, ...]]:
    """``wanted``: members, sorted by name, and the topics that each wants, sorted."""
    readers = readers_of(wanted, partitions)
    held = _still_held(wanted, partitions, previous)
    classes: dict[tuple[str, ...], list[str]] = {}
    for topic in sorted(readers):
        classes.setdefault(readers[topic], []).append(topic)
    had = {topic: {name: len(each) for name, each in held.get(topic, {}).items()} for topic in readers}
    quotas = _quotas(list(wanted), classes, partitions, had)
    shares: dict[str, dict[str, int]] = {}
    for topics, quota in zip(classes.values(), quotas, strict=True):
        shares |= _share_out(topics, partitions, quota, {topic: had[topic] for topic in topics})
    shares = _polish(list(wanted), readers, partitions, had, shares)
    result: dict[str, list[TopicPartition]] = {name: [] for name in wanted}
    for topic in sorted(shares):
        _hand_out(topic, partitions[topic], shares[topic], held.get(topic, {}), result)
    return {name: tuple(sorted(each)) for name, each in result.items()}


def readers_of(wanted: Mapping[str, Sequence[str]], partitions: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Who wants each topic, sorted; one tuple for topics that the same want. Many members have the same wishes."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, topics in wanted.items():
        kinds.setdefault(tuple(topics), []).append(name)
    kinds_of: dict[str, list[int]] = {}
    for kind, topics in enumerate(kinds):
        for topic in topics:
            if partitions.get(topic, 0):
                kinds_of.setdefault(topic, []).append(kind)
    names = list(kinds.values())
    merged: dict[tuple[int, ...], tuple[str, ...]] = {}
    readers: dict[str, tuple[str, ...]] = {}
    for topic, numbers in kinds_of.items():
        key = tuple(numbers)
        if key not in merged:
            merged[key] = tuple(sorted(name for number in key for name in names[number]))
        readers[topic] = merged[key]
    return readers


def _still_held(
    wanted: Mapping[str, Sequence[str]],
    partitions: Mapping[str, int],
    previous: Mapping[str, Iterable[TopicPartition]],
) -> dict[str, dict[str, list[TopicPartition]]]:
    """By topic, what members had and may keep, sorted; a partition that two claim is the first one's."""
    seen: set[TopicPartition] = set()
    kept: dict[str, dict[str, list[TopicPartition]]] = {}
    wishes: dict[tuple[str, ...], frozenset[str]] = {}
    for name, topics in wanted.items():
        key = tuple(topics)
        if key not in wishes:
            wishes[key] = frozenset(key)
        own = wishes[key]
        for each in sorted(set(previous.get(name, ()))):
            if each.topic in own and 0 <= each.partition < partitions.get(each.topic, 0) and each not in seen:
                seen.add(each)
                kept.setdefault(each.topic, {}).setdefault(name, []).append(each)
    return kept


# -- quotas: how many of each class --------------------------------------------------------------


def _quotas(
    names: list[str],
    classes: Mapping[tuple[str, ...], list[str]],
    partitions: Mapping[str, int],
    had: Mapping[str, Mapping[str, int]],
) -> Counts:
    sizes = [sum(partitions[topic] for topic in topics) for topics in classes.values()]
    had_of_class: Counts = []
    for topics in classes.values():
        counted: dict[str, int] = {}
        for topic in topics:
            for name, count in had[topic].items():
                counted[name] = counted.get(name, 0) + count
        had_of_class.append(counted)
    if len(sizes) == 1:
        (members,) = classes
        return [even_quotas(members, sizes[0], had_of_class[0])]
    return _Quotas(names, list(classes), sizes, had_of_class, Budget(EDGES)).solve()


class _Quotas(Balance):
    def solve(self) -> Counts:
        self._begin()
        self._shorten()
        while self._improve():
            pass
        return self._result()

    def _shorten(self) -> None:
        """Shift along chains of members until no chain leads from one to another that has at least two fewer.

        From the largest load downwards. What a search that failed has reached stays useless for all of that load: it
        leads nowhere else, and no chain found later passes it.
        """
        load = max(self._loads, default=0)
        least = min(self._loads, default=0)
        while load - least >= 2:
            dead: set[int] = set()
            for giver in range(len(self._names)):
                while self._loads[giver] == load and giver not in dead:
                    chain = self._chain(giver, dead)
                    if chain is None or self._budget.left < 0:
                        break
                    for member, at, taker in chain:
                        self._add(at, member, -1)
                        self._add(at, taker, 1)
            if self._budget.left < 0:
                return
            load -= 1

    def _chain(self, giver: int, dead: set[int]) -> list[tuple[int, int, int]] | None:
        """The shortest from this member to one with two fewer: each step a giver, a class and a taker."""
        enough = self._loads[giver] - 2
        before: dict[int, tuple[int, int]] = {giver: (-1, -1)}
        classes: set[int] = set()
        waiting = deque([giver])
        while waiting:
            member = waiting.popleft()
            for at in self._classes[member]:
                if at in classes or not self._has[at][member]:
                    continue
                classes.add(at)
                if not self._budget.take(len(self._members[at])):
                    return None
                for taker in self._members[at]:
                    if taker in before or taker in dead:
                        continue
                    before[taker] = (member, at)
                    if self._loads[taker] <= enough:
                        return _traced(before, taker)
                    waiting.append(taker)
        dead |= before.keys()
        return None


def _traced(before: Mapping[int, tuple[int, int]], taker: int) -> list[tuple[int, int, int]]:
    chain: list[tuple[int, int, int]] = []
    while before[taker][0] != -1:
        member, at = before[taker]
        chain.append((member, at, taker))
        taker = member
    return chain


# -- shares: how many of each topic --------------------------------------------------------------


def _share_out(
    topics: Sequence[str],
    partitions: Mapping[str, int],
    quota: Mapping[str, int],
    had: Mapping[str, Mapping[str, int]],
) -> dict[str, dict[str, int]]:
    """One class: what each member has of each of its topics, given how many it has of all."""
    shares = {topic: dict(had[topic]) for topic in topics}
    pool = {topic: partitions[topic] - sum(had[topic].values()) for topic in topics}
    topics_of: dict[str, list[str]] = {}
    for topic in topics:
        for name in had[topic]:
            topics_of.setdefault(name, []).append(topic)
    needs: dict[str, int] = {}
    for name in sorted(topics_of.keys() | quota.keys()):
        mine = topics_of.get(name, ())
        need = quota.get(name, 0) - sum(had[topic][name] for topic in mine)
        if need > 0:
            needs[name] = need
        elif need < 0:
            _give(name, -need, mine, shares, pool)
    _take(topics, partitions, len(quota), needs, shares, pool)
    return shares


def _give(
    name: str, count: int, mine: Sequence[str], shares: Mapping[str, dict[str, int]], pool: dict[str, int]
) -> None:
    """Of what it has most of; then of what the others can get least of."""
    heap = [(-shares[topic][name], pool[topic], topic) for topic in mine]
    heapq.heapify(heap)
    for _ in range(count):
        topic = heap[0][2]
        shares[topic][name] -= 1
        pool[topic] += 1
        heapq.heapreplace(heap, (-shares[topic][name], pool[topic], topic))


def _take(
    topics: Sequence[str],
    partitions: Mapping[str, int],
    readers: int,
    needs: dict[str, int],
    shares: Mapping[str, dict[str, int]],
    pool: Mapping[str, int],
) -> None:
    """Topic by topic, in turn: first to those below an even share of it, then to whoever needs something."""
    waiting = deque(sorted(needs, key=lambda name: (-needs[name], name)))
    for topic in topics:
        left, share = pool[topic], shares[topic]
        least, over = divmod(partitions[topic], readers)
        for most in (least, least + bool(over), partitions[topic]):
            passed = 0  # members in a row that took nothing
            while left and waiting and passed < len(waiting) and most:
                name = waiting.popleft()
                if share.get(name, 0) >= most:
                    passed += 1
                    waiting.append(name)
                    continue
                passed = 0
                share[name] = share.get(name, 0) + 1
                left -= 1
                needs[name] -= 1
                if needs[name]:
                    waiting.append(name)


# -- polish: all three goals at once ----------------------------------------------------------------


def _polish(
    names: list[str],
    readers: Mapping[str, tuple[str, ...]],
    partitions: Mapping[str, int],
    had: Mapping[str, Mapping[str, int]],
    shares: Mapping[str, dict[str, int]],
) -> dict[str, dict[str, int]]:
    topics = sorted(readers)
    edges = 2 * sum(len(readers[topic]) for topic in topics) + 2 * len(names)
    if len(topics) < 2 or 2 * edges > EDGES:
        return dict(shares)  # one topic's shares are its quotas; and half a search finds nothing
    sizes = [partitions[topic] for topic in topics]
    all_had = [had[topic] for topic in topics]
    search = _Shares(names, [readers[topic] for topic in topics], sizes, all_had, Budget(EDGES))
    return dict(zip(topics, search.improved([shares[topic] for topic in topics]), strict=True))


class _Shares(Balance):
    """The flow from topics to members. Its cost: loads first, then moves, then shares."""

    def improved(self, shares: Sequence[Mapping[str, int]]) -> Counts:
        number = {name: at for at, name in enumerate(self._names)}
        for at, share in enumerate(shares):
            for name, count in share.items():
                self._add(at, number[name], count)
        while self._improve():
            pass
        return self._result()

    def _edges(self) -> list[tuple[int, int, int]]:
        classes = len(self._members)
        loads = classes + len(self._names)
        partitions = sum(self._sizes)
        move = partitions * partitions + 1
        load_weight = move * (partitions + 1)
        edges: list[tuple[int, int, int]] = []
        for at, has in enumerate(self._has):
            had = self._had[at]
            for member, count in has.items():
                before = had.get(member, 0)
                edges.append((at, classes + member, (move if count >= before else 0) + 2 * count + 1))
                if count:
                    edges.append((classes + member, at, (-move if count > before else 0) - 2 * count + 1))
        for member, load in enumerate(self._loads):
            edges.append((classes + member, loads, load_weight * (2 * load + 1)))
            if load:
                edges.append((loads, classes + member, -load_weight * (2 * load - 1)))
        return edges


# -- which partitions -------------------------------------------------------------------------------


def _hand_out(
    topic: str,
    partitions: int,
    share: Mapping[str, int],
    held: Mapping[str, list[TopicPartition]],
    result: dict[str, list[TopicPartition]],
) -> None:
    """Each keeps what it had, up to its share; the rest goes to those who have less, by name."""
    taken: set[int] = set()
    hungry: list[tuple[str, int]] = []
    for name in sorted(share):
        mine = held.get(name, [])[: share[name]]
        taken.update(each.partition for each in mine)
        result[name].extend(mine)
        if len(mine) < share[name]:
            hungry.append((name, share[name] - len(mine)))
    free = (number for number in range(partitions) if number not in taken)
    for name, missing in hungry:
        result[name].extend(TopicPartition(topic, next(free)) for _ in range(missing))
