"""Assignors: who reads what, as one pure function behind four strategies.

``balanced`` is the one to use: even loads, few moves and an even share of each
topic, in bounded work (``rayqueue.cluster.shares``).

``sticky`` came before it. It knows nothing of shares and has no bound on its
work, so the coordinator takes it only for small groups
(``memberships.MAX_STICKY_MEMBERS``). It promises two things, in this order:

1. Balance. If all members want the same topics, none has more than one
   partition more than another. If they do not, the assignment is as even as it
   can be: the sum of the squares of what members have is the least possible,
   so no partition, and no chain of them, can go from a member to another that
   has at least two fewer.
2. Among the assignments that are so, one that moves the fewest partitions.

``range`` gives each member a block of each topic, ``roundrobin`` deals all
partitions out in turn. Both depend on the members' names and on nothing that
was before.

The same arguments give the same assignment in every process. How the results
come about is therefore part of the replicated state machine: a release that
would compute others needs a new strategy's name for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping

from rayqueue.cluster.balance import Balance, even_quotas
from rayqueue.cluster.shares import balanced, readers_of
from rayqueue.protocol.topics import TopicPartition

Wishes = Mapping[str, Collection[str]]
"""Member to the topics that it wants."""
Assigned = dict[str, tuple[TopicPartition, ...]]


def assign(
    strategy: str, members: Wishes, partitions: Mapping[str, int], previous: Mapping[str, Iterable[TopicPartition]]
) -> Assigned:
    """For every member what it is to read. A partition of a topic that nobody wants is nobody's.

    ``partitions`` says how many each topic has; ``previous`` what each member had, as far as that still exists.
    """
    wishes: dict[tuple[str, ...], list[str]] = {}  # many have the same
    wanted: dict[str, list[str]] = {}
    for name, topics in sorted(members.items()):
        key = tuple(topics)
        if key not in wishes:
            wishes[key] = sorted(set(key))
        wanted[name] = wishes[key]
    return _STRATEGIES[strategy](wanted, partitions, previous)


# -- sticky ---------------------------------------------------------------------------------


def _sticky(
    wanted: Mapping[str, list[str]],
    partitions: Mapping[str, int],
    previous: Mapping[str, Iterable[TopicPartition]],
) -> Assigned:
    """Partitions whose topics the same members want are one class: which of them a member has does not matter."""
    readers: dict[str, list[str]] = {}
    for name, topics in wanted.items():
        for topic in topics:
            if partitions.get(topic, 0):
                readers.setdefault(topic, []).append(name)
    classes: dict[tuple[str, ...], list[str]] = {}
    for topic in sorted(readers):
        classes.setdefault(tuple(readers[topic]), []).append(topic)
    kept = _still_held(wanted, partitions, previous)
    position = {topic: at for at, topics in enumerate(classes.values()) for topic in topics}
    held: list[dict[str, list[TopicPartition]]] = [{} for _ in classes]
    for name, each in kept.items():
        for partition in each:
            held[position[partition.topic]].setdefault(name, []).append(partition)
    sizes = [sum(partitions[topic] for topic in topics) for topics in classes.values()]
    quotas = _quotas(list(wanted), list(classes), sizes, held)
    result: dict[str, list[TopicPartition]] = {name: [] for name in wanted}
    for topics, quota, had in zip(classes.values(), quotas, held, strict=True):
        _hand_out(topics, partitions, quota, had, result)
    return {name: tuple(sorted(each)) for name, each in result.items()}


def _still_held(
    wanted: Mapping[str, list[str]],
    partitions: Mapping[str, int],
    previous: Mapping[str, Iterable[TopicPartition]],
) -> dict[str, list[TopicPartition]]:
    """What members had and may keep, sorted; a partition that two claim is the first one's."""
    seen: set[TopicPartition] = set()
    kept: dict[str, list[TopicPartition]] = {}
    for name, topics in wanted.items():
        own = set(topics)
        mine = sorted(
            each
            for each in set(previous.get(name, ()))
            if each.topic in own and 0 <= each.partition < partitions.get(each.topic, 0) and each not in seen
        )
        seen.update(mine)
        kept[name] = mine
    return kept


def _quotas(
    names: list[str], classes: list[tuple[str, ...]], sizes: list[int], held: list[dict[str, list[TopicPartition]]]
) -> list[dict[str, int]]:
    """How many partitions of each class each of its members is to have."""
    if not classes:
        return []
    had = [{name: len(each) for name, each in per_class.items()} for per_class in held]
    if len(classes) == 1:
        return [even_quotas(classes[0], sizes[0], had[0])]
    return Balance(names, classes, sizes, had).solve()


def _hand_out(
    topics: list[str],
    partitions: Mapping[str, int],
    quota: Mapping[str, int],
    had: Mapping[str, list[TopicPartition]],
    result: dict[str, list[TopicPartition]],
) -> None:
    """Each keeps what it had up to its quota; the rest is dealt out in turn, so that topics are spread."""
    taken: set[TopicPartition] = set()
    hungry: list[tuple[str, int]] = []
    for name in sorted(quota):
        mine = had.get(name, [])[: quota[name]]
        taken.update(mine)
        result[name].extend(mine)
        if len(mine) < quota[name]:
            hungry.append((name, quota[name] - len(mine)))
    free = [
        each
        for topic in topics
        for number in range(partitions[topic])
        if (each := TopicPartition(topic, number)) not in taken
    ]
    turn = 0
    while turn < len(free):
        still: list[tuple[str, int]] = []
        for name, missing in hungry:
            result[name].append(free[turn])
            turn += 1
            if missing > 1:
                still.append((name, missing - 1))
        hungry = still


# -- the others -------------------------------------------------------------------------------


def _range(
    wanted: Mapping[str, list[str]], partitions: Mapping[str, int], previous: Mapping[str, Iterable[TopicPartition]]
) -> Assigned:
    result: dict[str, list[TopicPartition]] = {name: [] for name in wanted}
    for topic, names in sorted(readers_of(wanted, partitions).items()):
        least, over = divmod(partitions[topic], len(names))
        first = 0
        for at, name in enumerate(names[: partitions[topic]]):
            end = first + least + (at < over)
            result[name].extend(TopicPartition(topic, number) for number in range(first, end))
            first = end
    return {name: tuple(each) for name, each in result.items()}


def _roundrobin(
    wanted: Mapping[str, list[str]], partitions: Mapping[str, int], previous: Mapping[str, Iterable[TopicPartition]]
) -> Assigned:
    result: dict[str, list[TopicPartition]] = {name: [] for name in wanted}
    names = list(wanted)
    turn = ""  # whose turn it is: the first reader that is not before it, or the first of all
    after = dict(zip(names, names[1:] + names[:1], strict=True))
    for topic, readers in sorted(readers_of(wanted, partitions).items()):
        at = bisect_left(readers, turn)
        for number in range(partitions[topic]):
            name = readers[(at + number) % len(readers)]
            result[name].append(TopicPartition(topic, number))
        turn = after[name]
    return {name: tuple(each) for name, each in result.items()}


_STRATEGIES: dict[
    str, Callable[[Mapping[str, list[str]], Mapping[str, int], Mapping[str, Iterable[TopicPartition]]], Assigned]
] = {"balanced": balanced, "sticky": _sticky, "range": _range, "roundrobin": _roundrobin}
STRATEGIES = tuple(_STRATEGIES)
