"""The service: what a replica does for its clients, and the events in its life that matter for that.

All of it is called on the engine's thread and must not block it: what takes
disk time goes to another thread and comes back by ``Replica.run``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rayqueue.ids import Offset
from rayqueue.protocol.frames import Frame
from rayqueue.replica.measures import PartitionMeasures


class Events:
    """What happens to a replica. An event that is left alone means nothing to whoever leaves it."""

    # -- the leadership --------------------------------------------------------------------

    def won(self) -> None:
        """This replica was elected, and nothing is proposed in its term yet."""

    def lead(self, now_s: float) -> None:
        """It has applied all that was committed before its election."""

    def lost(self, now_s: float) -> None:
        """It leads no more."""

    # -- turns -----------------------------------------------------------------------------

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` is due though nothing happens (``time.monotonic``); ``inf`` for never, the past for at once."""
        return float("inf")

    def tick(self, now_s: float) -> None:
        """Once per turn of the engine, after what was committed is applied."""

    def gather(self) -> None:
        """Once per turn, after the clients' requests were taken and before the engine steps: propose what was gathered
        of them."""

    def tables_synced(self) -> None:
        """Snapshots of the store show all that is applied."""

    def maintain(self, now_s: float) -> None:
        """About once per second."""


class Service(Events, ABC):
    """Made by a function that gets the replica, before its thread starts."""

    # -- clients -------------------------------------------------------------------------

    @abstractmethod
    def serve(self, client: int, frame: Frame) -> None:
        """A request. Its body is valid during this call only. A ``RayQueueError`` raised here is its answer."""

    @abstractmethod
    def needs(self, client: int) -> bool:
        """Whether this client's connection matters though nothing is under way on it."""

    @abstractmethod
    def client_gone(self, client: int) -> None:
        """The connection is closed. Nothing can be sent to it any more; numbers are not used again."""

    @abstractmethod
    def close(self) -> None:
        """The replica ends; after this nothing is sent. End what runs in other threads."""

    # -- what it tells of itself -------------------------------------------------------------

    @abstractmethod
    def bounds(self) -> tuple[Offset, Offset]:
        """The first offset that can be read, and the high watermark."""

    def measure(self) -> PartitionMeasures | None:
        """About once per second. None if this is no partition."""
        return None
