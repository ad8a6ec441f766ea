"""Sessions of groups' members: who is alive, as the leading coordinator sees it. Memory only, no clock of its own.

A session ends when its member was silent for ``timeout_s``, or when its
connection broke and it has not come back on another within the grace. A static
member's session ends only by silence: it is meant to come back as another
process.

A heartbeat that waits for news is *parked* at its session. Timers are lazy: a
session has one entry in the heap for its end and one for what is parked, and
renewing it touches no heap, so ten thousand members that live cost nothing per
tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Reply = Callable[[Any], None]

NEVER = float("inf")


class Parked(NamedTuple):
    """A heartbeat that waits: it has taken ``generation`` and is answered at ``until_s`` at the latest."""

    reply: Reply
    generation: int
    until_s: float


class Session:
    __slots__ = (
        "_cut_s",
        "client",
        "deadline_s",
        "end_entry_s",
        "group",
        "member",
        "open",
        "park_entry_s",
        "parked",
        "static",
        "timeout_s",
    )

    def __init__(self, group: str, member: str) -> None:
        self.group = group
        self.member = member
        self.timeout_s = 0.0
        self.static = False
        self.client: int | None = None
        self.deadline_s = NEVER
        self._cut_s = NEVER
        self.parked: Parked | None = None
        self.open = True
        self.end_entry_s = NEVER
        """When its entry in the heap is due; an older, later one does not count."""
        self.park_entry_s = NEVER

    @property
    def end_s(self) -> float:
        return self.deadline_s if self.static else min(self.deadline_s, self._cut_s)

    def renew(self, now_s: float) -> None:
        self.deadline_s = now_s + self.timeout_s
        self._cut_s = NEVER

    def end_at(self, when_s: float) -> None:
        self.deadline_s = when_s
        self._cut_s = NEVER

    def cut(self, until_s: float) -> None:
        self.client = None
        self._cut_s = until_s


class Sessions:
    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._groups: dict[str, dict[str, Session]] = {}
        self._clients: dict[int, dict[tuple[str, str], Session]] = {}
        self._heap: list[tuple[float, int, bool, Session]] = []
        self._count = 0

    @property
    def next_deadline_s(self) -> float:
        return self._heap[0][0] if self._heap else NEVER

    def get(self, group: str, member: str) -> Session | None:
        return self._groups.get(group, {}).get(member)

    def of_group(self, group: str) -> list[Session]:
        return list(self._groups.get(group, {}).values())

    def __iter__(self) -> Iterator[Session]:
        for members in self._groups.values():
            yield from members.values()

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def open(self, now_s: float, group: str, member: str, timeout_s: float, static: bool) -> Session:
        """The member's session, new or not, as of now."""
        session = self.get(group, member)
        if session is None:
            session = self._groups.setdefault(group, {})[member] = Session(group, member)
        session.timeout_s, session.static = timeout_s, static
        session.renew(now_s)
        self._schedule(session)
        return session

    def heard(self, now_s: float, session: Session, client: int) -> None:
        """Its member called, on this connection. Touches the heap only if the connection is another."""
        session.renew(now_s)
        if session.client != client:
            self._unbind(session)
            session.client = client
            self._clients.setdefault(client, {})[session.group, session.member] = session

    def park(self, session: Session, parked: Parked) -> None:
        session.parked = parked
        self._schedule(session)

    def has_client(self, client: int) -> bool:
        """Whether a session was last heard of on this connection."""
        return client in self._clients

    def disconnected(self, now_s: float, client: int) -> None:
        for session in self._clients.pop(client, {}).values():
            self.lost(now_s, session)

    def lost(self, now_s: float, session: Session) -> None:
        """Its connection broke. Who waits on it hears nothing any more."""
        session.parked = None
        session.cut(now_s + self._grace_s)
        self._schedule(session)

    def close(self, session: Session) -> Parked | None:
        """Forget it. What waited at it."""
        session.open = False
        self._unbind(session)
        members = self._groups[session.group]
        del members[session.member]
        if not members:
            del self._groups[session.group]
        parked, session.parked = session.parked, None
        return parked

    def due(self, now_s: float) -> Iterable[Session]:
        """Sessions of which something is due: a parked heartbeat's answer, or its end."""
        while self._heap and self._heap[0][0] <= now_s:
            when_s, _, is_end, session = heapq.heappop(self._heap)
            if not session.open or when_s != (session.end_entry_s if is_end else session.park_entry_s):
                continue  # it was closed, or an earlier entry has taken this one's place
            if is_end:
                session.end_entry_s = NEVER
            else:
                session.park_entry_s = NEVER
            if session.end_s <= now_s or (session.parked is not None and session.parked.until_s <= now_s):
                yield session
            if session.open:
                self._schedule(session)

    def retry_end(self, session: Session, at_s: float) -> None:
        """Its end could not be written: it ends again at this time, unless its member is heard of."""
        session.end_at(at_s)
        self._schedule(session)

    def _schedule(self, session: Session) -> None:
        if session.end_s < session.end_entry_s:
            session.end_entry_s = session.end_s
            self._push(session.end_s, True, session)
        if session.parked is not None and session.parked.until_s < session.park_entry_s:
            session.park_entry_s = session.parked.until_s
            self._push(session.parked.until_s, False, session)

    def _push(self, when_s: float, is_end: bool, session: Session) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, is_end, session))

    def _unbind(self, session: Session) -> None:
        if session.client is None:
            return
        bound = self._clients.get(session.client)
        if bound is not None:
            bound.pop((session.group, session.member), None)
            if not bound:
                del self._clients[session.client]
        session.client = None
