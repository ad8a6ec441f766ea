"""The line before a full partition: producers wait for room in the order in which they came.

``Admission`` refuses what does not fit, and whoever wants to wait takes a place
here (``AwaitRoom``). When there is room, the first in the line is granted what
it wants of it, or what there is, then the next. Room that was granted is kept
for that producer: nobody else's batch gets it. Somebody who has not waited gets
nothing while others do, so small batches do not overtake a large one for ever.

A grant that is not used within ``hold_s`` is taken back: its producer died, or
is paused. A producer that has waited for as long as it asked for is answered
that there is no room, and keeps its place for as long if it asks again.

It belongs to one leadership, and to the thread of its engine. Time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayqueue.protocol.calls import AwaitRoom, Room

_NEVER = float("inf")
_NONE = Room(0, 0)

Answer = Callable[[Any], None]
"""Called with ``Room``, or with an error."""


class _Ticket:
    """A place in the line. ``answer`` is None once its time is up: the place is kept, and nobody asks."""

    __slots__ = ("answer", "client", "deadline_s", "wanted")

    def __init__(self, wanted: AwaitRoom, client: int, deadline_s: float, answer: Answer) -> None:
        self.wanted = wanted
        self.client = client
        self.deadline_s = deadline_s
        self.answer: Answer | None = answer


class _Grant:
    """Room that is kept for one producer."""

    __slots__ = ("client", "deadline_s", "records", "size_bytes")

    def __init__(self, room: Room, client: int, deadline_s: float) -> None:
        self.records = room.records
        self.size_bytes = room.size_bytes
        self.client = client
        self.deadline_s = deadline_s


class Line:
    def __init__(self, hold_s: float = 1.0) -> None:
        self._hold_s = hold_s
        self._waiting: dict[int, _Ticket] = {}  # by producer, the first one first
        self._granted: dict[int, _Grant] = {}
        self.next_deadline_s = _NEVER

    def __len__(self) -> int:
        """Producers that wait, or have room that they have not used."""
        return len(self._waiting) + len(self._granted)

    def join(self, wanted: AwaitRoom, client: int, deadline_s: float, answer: Answer) -> None:
        """Take a place, or keep the one that the producer has. What it was granted before is free again."""
        producer = wanted.producer_id
        self._granted.pop(producer, None)
        before = self._waiting.get(producer)
        self._waiting[producer] = _Ticket(wanted, client, deadline_s, answer)  # in its place, if it has one
        if before is not None and before.answer is not None:
            before.answer(_NONE)
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)

    def stands_before(self, producer: int, records: int, size_bytes: int) -> bool:
        """Whether others wait, and this was not granted: it must not overtake them."""
        if not any(ticket.answer is not None for ticket in self._waiting.values()):
            return False
        grant = self._granted.get(producer)
        return grant is None or records > grant.records or size_bytes > grant.size_bytes

    def reserved(self, producer: int) -> Room:
        """The room that others have been granted."""
        others = [grant for name, grant in self._granted.items() if name != producer]
        return Room(sum(grant.records for grant in others), sum(grant.size_bytes for grant in others))

    def used(self, producer: int, records: int, size_bytes: int) -> None:
        """The producer's batch was admitted."""
        grant = self._granted.get(producer)
        if grant is not None:
            grant.records -= records
            grant.size_bytes -= size_bytes
            if grant.records <= 0 or grant.size_bytes <= 0:
                del self._granted[producer]

    def advance(self, free: Room, now_s: float) -> None:
        """Grant what is free, the first one first. ``free`` is what was not taken, grants not counted."""
        expires = now_s >= self.next_deadline_s
        if expires:
            for late in [name for name, grant in self._granted.items() if grant.deadline_s <= now_s]:
                del self._granted[late]
        self._grant(free, now_s)
        if expires:
            self._expire(now_s)

    def _grant(self, free: Room, now_s: float) -> None:
        records = free.records - sum(grant.records for grant in self._granted.values())
        size_bytes = free.size_bytes - sum(grant.size_bytes for grant in self._granted.values())
        for producer, ticket in list(self._waiting.items()):
            wanted, answer = ticket.wanted, ticket.answer
            if answer is None:
                continue
            if records < wanted.least_records or size_bytes < max(1, wanted.least_bytes):
                return
            room = Room(min(wanted.records, records), min(wanted.size_bytes, size_bytes))
            records -= room.records
            size_bytes -= room.size_bytes
            del self._waiting[producer]
            until_s = now_s + self._hold_s
            self._granted[producer] = _Grant(room, ticket.client, until_s)
            self.next_deadline_s = min(self.next_deadline_s, until_s)
            answer(room)

    def client_gone(self, client: int) -> None:
        """Its producers wait no more, and use nothing."""
        self._waiting = {name: ticket for name, ticket in self._waiting.items() if ticket.client != client}
        self._granted = {name: grant for name, grant in self._granted.items() if grant.client != client}

    def clear(self) -> list[Answer]:
        """Everybody leaves; those who have not been answered."""
        left = [ticket.answer for ticket in self._waiting.values() if ticket.answer is not None]
        self._waiting.clear()
        self._granted.clear()
        self.next_deadline_s = _NEVER
        return left

    def _expire(self, now_s: float) -> None:
        for producer, ticket in list(self._waiting.items()):
            if ticket.deadline_s > now_s:
                continue
            answer, ticket.answer = ticket.answer, None
            if answer is None or not ticket.wanted.wait_ms:
                del self._waiting[producer]
            else:
                ticket.deadline_s = now_s + self._hold_s
            if answer is not None:
                answer(_NONE)
        deadlines = [ticket.deadline_s for ticket in self._waiting.values()]
        deadlines += [grant.deadline_s for grant in self._granted.values()]
        self.next_deadline_s = min(deadlines, default=_NEVER)
