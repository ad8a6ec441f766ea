"""Checks of a history of transactions, by the names that Jepsen's kafka workload has for what can be wrong. Pure.

Each input transaction writes its number to every partition of the source, or is
aborted. A loop writes one result for each record of the source: number, source
partition and source offset, and how many of that partition it has counted, in its
state. Observers poll the sink, and note each poll.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Seen(NamedTuple):
    """A result, where it was seen."""

    partition: int
    offset: int
    number: int
    source: int
    """Its record's partition."""
    source_offset: int
    counted: int
    """Records of its record's partition, with it."""


@dataclass
class History:
    partitions: int
    committed: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    """How these have ended, nobody was told: all of it or nothing."""
    polls: list[list[Seen]] = field(default_factory=list)
    """Of each observer, all that it polled, in its order."""
    log: list[Seen] = field(default_factory=list)
    """The sink, read when all was over."""
    pipelined: int = 0
    """How many were committed without waiting for each."""
    lag: int = 0
    """Of the loop's group, at the end."""
    assignments: list[list[Seen]] = field(default_factory=list)
    """What the members of one group have polled: a list for each partition that one of them was given, of the time in
    which it had it."""
    deaths: int = 0
    """Of whoever writes, while it did."""


def anomalies(history: History) -> dict[str, list[object]]:
    """What is wrong, by its name. Nothing, if all is well."""
    found: dict[str, list[object]] = defaultdict(list)
    log = history.log
    for seen in log:
        if seen.number in history.aborted:
            found["aborted read"].append(seen)
        elif seen.number not in history.committed | history.unknown:
            found["unheard of"].append(seen)
    for (source, offset), count in Counter((each.source, each.source_offset) for each in log).items():
        if count > 1:
            found["duplicate"].append((source, offset, count))
    for source in {each.source for each in log}:
        counted = [each.counted for each in sorted(log, key=lambda each: each.source_offset) if each.source == source]
        if counted != list(range(1, len(counted) + 1)):
            found["inconsistent state"].append((source, counted))
    sources: dict[int, list[int]] = defaultdict(list)
    for each in log:
        sources[each.number].append(each.source)
    for number in history.committed | history.unknown:
        got = sorted(sources.get(number, ()))
        if got and len(set(got)) < history.partitions:
            found["torn transaction"].append((number, got))
        elif not got and number in history.committed:
            found["lost write"].append(number)
        elif len(got) > history.partitions:
            found["duplicate"].append((number, got))
    order: dict[tuple[int, int], int] = {}
    for each in sorted(log):  # of each partition by offset
        key = (each.partition, each.source)
        if each.source_offset <= order.get(key, -1):
            found["out of order"].append(each)
        order[key] = max(each.source_offset, order.get(key, -1))
    places: dict[tuple[int, int], Seen] = {}
    for each in [*log, *(seen for polls in (*history.polls, *history.assignments) for seen in polls)]:
        if places.setdefault((each.partition, each.offset), each) != each:
            found["inconsistent offsets"].append((each, places[each.partition, each.offset]))
    for polls in history.polls:
        _check_polls(polls, log, found)
    if history.assignments:
        _check_assignments(history.assignments, log, found)
    if history.lag:
        found["unseen"].append(f"{history.lag} records of the source were not processed")
    return dict(found)


def _check_polls(polls: list[Seen], log: list[Seen], found: dict[str, list[object]]) -> None:
    """An observer began at the beginning, and has seen each partition of the sink up to some offset, all of it."""
    reached: dict[int, int] = {}
    for each in polls:
        if each.offset <= reached.get(each.partition, -1):
            found["non-monotonic poll"].append(each)
        reached[each.partition] = max(each.offset, reached.get(each.partition, -1))
    seen = {(each.partition, each.offset) for each in polls}
    there = {(each.partition, each.offset) for each in log}
    for each in log:
        place = (each.partition, each.offset)
        if place not in seen:
            name = "poll-skip" if each.offset < reached.get(each.partition, -1) else "unseen"
            found[name].append(each)
    found_more = seen - there
    if found_more:
        found["aborted read"].extend(sorted(found_more))


def _check_assignments(assignments: list[list[Seen]], log: list[Seen], found: dict[str, list[object]]) -> None:
    """A member goes on where its group is. What the one before has not committed it polls again. Nothing is passed
    over, neither within an assignment nor between two of them."""
    seen = {(each.partition, each.offset) for polled in assignments for each in polled}
    reached: dict[int, int] = {}
    for polled in filter(None, assignments):
        first, last = polled[0].offset, max(each.offset for each in polled)
        partition = polled[0].partition
        reached[partition] = max(last, reached.get(partition, -1))
        for before, each in pairwise(polled):
            if each.offset <= before.offset:
                found["non-monotonic poll"].append((before, each))
        here = {each.offset for each in polled}
        within = [each for each in log if each.partition == partition and first < each.offset < last]
        found_not = [each for each in within if each.offset not in here]
        if found_not:
            found["poll-skip"].extend(found_not)
    for each in log:
        if (each.partition, each.offset) not in seen:
            found["poll-skip" if each.offset < reached.get(each.partition, -1) else "unseen"].append(each)
    more = seen - {(each.partition, each.offset) for each in log}
    if more:
        found["aborted read"].extend(sorted(more))
