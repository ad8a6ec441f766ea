"""Shares of a group's members: the number of partitions for each when members want different topics.

A flow from classes of partitions to members. What is to be least is, in this
order, the sum of the squares of the members' loads and the number of
partitions that move. Both are convex in the flow, so an assignment is the best
exactly if no cycle of its residual graph has negative cost: as long as there
is one, partitions are shifted along it.

Almost all of the work is done before that, by moves from one member straight
to another, with a heap per class; the cycles are for what is left.

``Budget`` counts work, never time: whoever computes an assignment while a log
is applied must stop at the same place in every process. Without one the search
goes on until nothing is left to improve.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def even_quotas(names: tuple[str, ...], size: int, had: Mapping[str, int]) -> dict[str, int]:
    """All want the same. Those who have more than the others will must lose something; the others need not."""
    least, over = divmod(size, len(names))
    by_most = sorted(names, key=lambda name: (-had.get(name, 0), name))
    return {name: least + (at < over) for at, name in enumerate(by_most)}


class Budget:
    """How many edges may still be looked at."""

    __slots__ = ("left",)

    def __init__(self, edges: float = float("inf")) -> None:
        self.left = edges

    def take(self, edges: int) -> bool:
        """False once there is not enough left: then the search ends where it is."""
        self.left -= edges
        return self.left >= 0


class Balance:
    """``classes``: the members of each class of partitions; ``had``: how many of it each of them had."""

    def __init__(
        self,
        names: Sequence[str],
        classes: Sequence[Sequence[str]],
        sizes: Sequence[int],
        had: Sequence[Mapping[str, int]],
        budget: Budget | None = None,
    ) -> None:
        self._budget = Budget() if budget is None else budget
        self._names = list(names)
        number = {name: at for at, name in enumerate(self._names)}
        self._members = [[number[name] for name in members] for members in classes]
        self._sizes = list(sizes)
        self._had = [{number[name]: count for name, count in per_class.items()} for per_class in had]
        self._has = [dict.fromkeys(members, 0) for members in self._members]
        self._classes: list[list[int]] = [[] for _ in self._names]
        for at, members in enumerate(self._members):
            for member in members:
                self._classes[member].append(at)
        self._loads = [0] * len(self._names)
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in self._members]
        # One more partition moved must never be worth an uneven load.
        self._weight = sum(sizes) + 1

    def solve(self) -> list[dict[str, int]]:
        self._begin()
        while self._improve():
            pass  # each time the cost falls by at least one
        return self._result()

    def _result(self) -> list[dict[str, int]]:
        return [{self._names[member]: count for member, count in per_class.items() if count} for per_class in self._has]

    # -- the bulk --------------------------------------------------------------------------

    def _begin(self) -> None:
        """What each had and may keep, the rest to who has least, then single moves."""
        self._keep()
        self._heaps = [[(self._loads[member], member) for member in members] for members in self._members]
        for heap in self._heaps:
            heapq.heapify(heap)
        self._fill()
        self._level()

    def _add(self, at: int, member: int, count: int) -> None:
        self._has[at][member] += count
        self._loads[member] += count

    def _keep(self) -> None:
        for at, per_class in enumerate(self._had):
            for member, count in per_class.items():
                self._add(at, member, count)

    def _least(self, at: int) -> int:
        """The member of this class with the smallest load."""
        heap = self._heaps[at]
        while heap[0][0] != self._loads[heap[0][1]]:
            member = heap[0][1]
            heapq.heapreplace(heap, (self._loads[member], member))
        return heap[0][1]

    def _note(self, member: int) -> None:
        """Its load fell. (One that rose is found out when it is on top.)"""
        for at in self._classes[member]:
            heapq.heappush(self._heaps[at], (self._loads[member], member))

    def _fill(self) -> None:
        """Give what is nobody's to who has least; first where few can take it."""
        for at in sorted(range(len(self._members)), key=lambda at: (len(self._members[at]), at)):
            for _ in range(self._sizes[at] - sum(self._has[at].values())):
                self._add(at, self._least(at), 1)

    def _level(self) -> None:
        """Move single partitions from who has much to who could take them and has little."""
        heap = [(-load, member) for member, load in enumerate(self._loads)]
        heapq.heapify(heap)
        while heap:
            negative, giver = heapq.heappop(heap)
            if -negative != self._loads[giver]:
                continue
            best: tuple[int, int, int, int] | None = None
            for at in self._classes[giver]:
                if self._has[at][giver]:
                    taker = self._least(at)
                    surplus = self._has[at][giver] > self._had[at].get(giver, 0)
                    offer = (self._loads[taker], not surplus, at, taker)
                    if best is None or offer < best:
                        best = offer
            if best is None or self._loads[giver] - best[0] < 2:
                continue
            _, _, at, taker = best
            self._add(at, giver, -1)
            self._add(at, taker, 1)
            self._note(giver)
            heapq.heappush(heap, (-self._loads[giver], giver))
            heapq.heappush(heap, (-self._loads[taker], taker))

    # -- the rest --------------------------------------------------------------------------

    def _improve(self) -> bool:
        """Shift one partition along each step of a cycle of negative cost. False if there is none.

        Nodes: classes, then members, then one that stands for all loads.
        """
        cycle = self._negative_cycle()
        if cycle is None:
            return False
        classes = len(self._members)
        for start, end in cycle:
            if start < classes <= end:
                self._add(start, end - classes, 1)
            elif end < classes <= start and start != classes + len(self._names):
                self._add(end, start - classes, -1)
        return True

    def _edges(self) -> list[tuple[int, int, int]]:
        """The residual graph: what could be shifted by one, and what that would cost."""
        classes = len(self._members)
        loads = classes + len(self._names)
        edges: list[tuple[int, int, int]] = []
        for at, has in enumerate(self._has):
            had = self._had[at]
            for member, count in has.items():
                before = had.get(member, 0)
                edges.append((at, classes + member, 1 if count >= before else 0))
                if count:
                    edges.append((classes + member, at, -1 if count > before else 0))
        for member, load in enumerate(self._loads):
            edges.append((classes + member, loads, self._weight * (2 * load + 1)))
            if load:
                edges.append((loads, classes + member, -self._weight * (2 * load - 1)))
        return edges

    def _negative_cycle(self) -> list[tuple[int, int]] | None:
        """Bellman-Ford, with a look for a cycle among the predecessors after each round."""
        edges = self._edges()
        nodes = len(self._members) + len(self._names) + 1
        distance = [0] * nodes
        parent = [-1] * nodes
        for _ in range(nodes + 1):
            if not self._budget.take(len(edges)):
                return None
            relaxed = False
            for start, end, cost in edges:
                if distance[start] + cost < distance[end]:
                    distance[end] = distance[start] + cost
                    parent[end] = start
                    relaxed = True
            if not relaxed:
                return None
            cycle = _cycle_of(parent)
            if cycle is not None:
                return cycle
        return None


def _cycle_of(parent: list[int]) -> list[tuple[int, int]] | None:
    """A cycle in the graph of predecessors: with these it has negative cost."""
    seen_by = [-1] * len(parent)
    for first in range(len(parent)):
        node = first
        while node != -1 and seen_by[node] == -1:
            seen_by[node] = first
            node = parent[node]
        if node != -1 and seen_by[node] == first:
            cycle = [(parent[node], node)]
            at = parent[node]
            while at != node:
                cycle.append((parent[at], at))
                at = parent[at]
            return cycle
    return None
