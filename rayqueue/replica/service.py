"""What a replica does for its clients: the small interface between the engine's thread and whoever answers.

Everything here is called on the engine's thread and must not block it: what
takes disk time goes to another thread and comes back by ``Replica.run``.
"""

from __future__ import annotations

from typing import Protocol

from rayqueue.protocol.frames import Frame


class Service(Protocol):
    """Made by a function that gets the replica, before its thread starts.

    On the engine's thread it may use of the replica: ``propose(payload, answer)``, ``confirm(answer)``,
    ``send(client, kind, request, buffers)``, ``fail(client, request, error)``, ``is_leader``, ``leader``, ``term``.
    """

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` is due though nothing happens (``time.monotonic``); ``inf`` for never, the past for at once."""

    def serve(self, client: int, frame: Frame) -> None:
        """A request. Its body is valid during this call only. A ``RayQueueError`` raised here is its answer."""

    def needs(self, client: int) -> bool:
        """Whether this client's connection matters though nothing is under way on it."""

    def client_gone(self, client: int) -> None:
        """The connection is closed. Nothing can be sent to it any more; numbers are not used again."""

    def lead(self, now_s: float) -> None:
        """This replica was elected, and has applied all that was committed before."""

    def unlead(self, now_s: float) -> None:
        """It leads no more."""

    def tick(self, now_s: float) -> None:
        """Once per turn of the engine, after what was committed is applied."""

    def close(self) -> None:
        """The replica ends; after this nothing is sent. End what runs in other threads."""
