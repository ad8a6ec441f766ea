"""Requests that wait until something comes or their time is up.

Whoever waits costs nothing until then: it is found by what it waits for, by
its client, or by its deadline, and never by looking through all. Deadlines are
rounded up to slots, so that there are few of them however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import ceil
from typing import Generic, Protocol, TypeVar

_SLOT_S = 0.005
_NEVER = float("inf")


class Waiter(Protocol):
    """``keys`` are what it waits for: any of them will do."""

    @property
    def client(self) -> int: ...
    @property
    def keys(self) -> Iterable[int]: ...
    @property
    def deadline_s(self) -> float: ...


WaiterT = TypeVar("WaiterT", bound=Waiter)


class Parking(Generic[WaiterT]):
    """Waiters are told apart by identity. In each answer the one that has waited longest comes first."""

    def __init__(self) -> None:
        self._all: dict[WaiterT, int] = {}  # to its slot
        self._by_key: dict[int, dict[WaiterT, None]] = {}
        self._by_client: dict[int, dict[WaiterT, None]] = {}
        self._by_slot: dict[int, dict[WaiterT, None]] = {}
        self._slots: list[int] = []  # heap; a slot stays until its time, though all in it may be gone

    def __len__(self) -> int:
        return len(self._all)

    @property
    def next_deadline_s(self) -> float:
        return self._slots[0] * _SLOT_S if self._slots else _NEVER

    def add(self, waiter: WaiterT) -> None:
        slot = ceil(waiter.deadline_s / _SLOT_S)
        self._all[waiter] = slot
        for key in waiter.keys:
            self._by_key.setdefault(key, {})[waiter] = None
        self._by_client.setdefault(waiter.client, {})[waiter] = None
        if slot not in self._by_slot:
            self._by_slot[slot] = {}
            heapq.heappush(self._slots, slot)
        self._by_slot[slot][waiter] = None

    def take(self, keys: Iterable[int]) -> list[WaiterT]:
        """Those who wait for any of these."""
        return self.remove([waiter for key in keys for waiter in self._by_key.get(key, ())])

    def waiting(self, key: int) -> Iterable[WaiterT]:
        """Those who wait for it, and go on waiting."""
        return self._by_key.get(key, {}).keys()

    def of_client(self, client: int) -> list[WaiterT]:
        """Its, and they go on waiting."""
        return list(self._by_client.get(client, ()))

    def take_client(self, client: int) -> list[WaiterT]:
        return self.remove(self.of_client(client))

    def take_all(self) -> list[WaiterT]:
        return self.remove(list(self._all))

    def take_expired(self, now_s: float) -> list[WaiterT]:
        """Those whose time is up."""
        expired: list[WaiterT] = []
        while self._slots and self._slots[0] * _SLOT_S <= now_s:
            slot = heapq.heappop(self._slots)
            expired += self._by_slot.pop(slot)
        return self.remove(expired)

    def remove(self, waiters: list[WaiterT]) -> list[WaiterT]:
        """Those of them that waited."""
        removed: list[WaiterT] = []
        for waiter in waiters:
            slot = self._all.pop(waiter, None)
            if slot is None:
                continue  # named twice
            removed.append(waiter)
            for key in waiter.keys:
                _discard(self._by_key, key, waiter)
            _discard(self._by_client, waiter.client, waiter)
            if slot in self._by_slot:
                self._by_slot[slot].pop(waiter, None)
        return removed


def _discard(index: dict[int, dict[WaiterT, None]], key: int, waiter: WaiterT) -> None:
    found = index[key]
    del found[waiter]
    if not found:
        del index[key]
