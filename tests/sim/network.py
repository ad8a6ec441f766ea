"""Virtual time and a network that does its worst, both driven by one seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rayqueue.ids import ReplicaId
from tests.sim.invariants import BrokenError, Invariant


class Clock:
    """A heap of things to happen. Time is whatever the next of them says."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def run_until(self, end: float, stop: Callable[[], bool] | None = None, max_events: int = 150_000) -> bool:
        """Let everything up to ``end`` happen, or until ``stop`` says so. True if it did."""
        for _ in range(max_events):
            if not self._heap or self._heap[0][0] > end:
                self.now = max(self.now, end)
                return stop is not None and stop()
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if stop is not None and stop():
                return True
        raise BrokenError(Invariant.PROGRESS, f"more than {max_events} events before {end:.1f} s: something spins")


@dataclass(slots=True)
class Weather:
    """How bad the network is. All zero is a quiet local network."""

    drop: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    """Share of messages that take up to ``slow_s`` instead of a few milliseconds."""
    slow_s: float = 0.5
    reorder: bool = False


class Network:
    """Directed links between nodes. FIFO unless the weather reorders."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self.weather = Weather()
        self._clock = clock
        self._rng = rng
        self._cut: set[tuple[ReplicaId, ReplicaId]] = set()
        self._last_arrival: dict[tuple[ReplicaId, ReplicaId], float] = {}

    def cut(self, links: set[tuple[ReplicaId, ReplicaId]]) -> None:
        self._cut = links

    def is_cut(self, a: ReplicaId, b: ReplicaId) -> bool:
        return (a, b) in self._cut

    def send(self, a: ReplicaId, b: ReplicaId, deliver: Callable[[], None]) -> None:
        rng, weather = self._rng, self.weather
        if (a, b) in self._cut or (weather.drop and rng.random() < weather.drop):
            return
        copies = 2 if weather.duplicate and rng.random() < weather.duplicate else 1
        for _ in range(copies):
            delay = rng.uniform(0.0002, 0.003)
            if weather.slow and rng.random() < weather.slow:
                delay += rng.uniform(0, weather.slow_s)
            arrival = self._clock.now + delay
            if not weather.reorder:
                arrival = max(arrival, self._last_arrival.get((a, b), 0.0))
                self._last_arrival[a, b] = arrival
            self._clock.at(arrival, deliver)
