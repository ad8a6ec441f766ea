"""The backlog: how much the groups have still to read.

A group's lag is what was appended less what it is done with: the records that
it committed or that were trimmed. Only commits and trims change the second
number, so it is kept per group, and an append costs nothing here. The backlog
is the lag of the slowest group, in records and in bytes each; without any group
it is all that is retained.

Measured when it is asked for, and again only for the groups that moved since.
Derived from the partition's tables, and no part of its replicated state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rayqueue.ids import Offset
from rayqueue.partition.groups import Groups


class Backlog(NamedTuple):
    records: int
    size_bytes: int
    """Of batches. One that is committed in part counts as a whole."""


Done = tuple[int, int]
"""Records and bytes that a group needs no more."""

Measure = Callable[[Mapping[int, Offset]], Done]


class Progress:
    """The records that each group is done with, and the least of that."""

    def __init__(self, groups: Groups, measure: Measure) -> None:
        self._groups = groups
        self._measure = measure
        self.forget()

    def forget(self) -> None:
        """The log begins elsewhere, or everything is new."""
        self._done: dict[str, Done] = {}
        self._moved = set(self._groups)
        self._least: Done | None = None

    def moved(self, group: str) -> None:
        """The group committed, came or went."""
        self._moved.add(group)

    def records(self) -> list[tuple[str, int]]:
        """The number of records that each group is done with."""
        self.least()
        return [(name, records) for name, (records, _) in self._done.items()]

    def least(self) -> Done:
        """The part that even the slowest group is done with. Costs nothing while no group moves."""
        if self._moved or self._least is None:
            self._least = self._find_least()
        return self._least

    def _find_least(self) -> Done:
        done, least = self._done, self._least
        if not done:
            least = None  # it was that of no group at all
        for name in self._moved:
            group, before = self._groups.get(name), done.pop(name, None)
            if before is not None and least is not None and (before[0] == least[0] or before[1] == least[1]):
                least = None  # this was the slowest; look at all
            if group is not None:
                now = done[name] = self._measure(group.offsets)
                if least is not None:
                    least = (min(least[0], now[0]), min(least[1], now[1]))
        self._moved.clear()
        if least is not None:
            return least
        if not done:
            return self._measure({})
        return min(records for records, _ in done.values()), min(size_bytes for _, size_bytes in done.values())
