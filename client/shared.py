"""The connections of this process: one set per queue, shared by all handles that mean it.

A handle takes them when it is first used and lets them go when it is closed;
the last one closes them, and so does the end of the process.

A forked child of a process that is connected is not, and cannot be: whatever
it asks raises ``ForkedError`` (``rayqueue.client.forks``).
"""

from __future__ import annotations

import atexit
import os
import threading

import ray

from rayqueue.actors.directory import RayDirectory, wait_for_answers
from rayqueue.client.forks import forked, leave_ray_alone
from rayqueue.client.io import IoThread
from rayqueue.client.joining import current_ray, leave_joined_ray
from rayqueue.client.routes import ClusterRoutes
from rayqueue.config import Settings

_ANSWERS_S = 5.0


class SharedConnections:
    """The connections of this process to one queue, for all handles that mean the same."""

    _all: dict[tuple[str, Settings], SharedConnections] = {}  # noqa: RUF012  # the process's own
    _all_lock = threading.Lock()

    def __init__(self, key: tuple[str, Settings]) -> None:
        self._key = key
        self._users = 0
        self._ended = False
        self._pid = os.getpid()
        self.io = IoThread.shared()
        settings = key[1]
        self.routes: ClusterRoutes = self.io.call(_make(settings))

    @classmethod
    def of(cls, settings: Settings) -> SharedConnections:
        key = (current_ray() or "", settings)
        with cls._all_lock:
            shared = cls._all.get(key)
            if shared is None or not shared.usable:
                shared = cls._all[key] = cls(key)
            shared._users += 1
            return shared

    def let_go(self) -> None:
        with self._all_lock:
            self._users -= 1
            if self._users or self._all.get(self._key) is not self:
                return
            del self._all[self._key]
        self._end()

    @property
    def usable(self) -> bool:
        return not self._ended and self.io.usable and self._pid == os.getpid()

    @classmethod
    def end_all(cls, namespace: str | None = None) -> None:
        """Close what all handles of this process share, of one queue or of all. A handle connects again when used.

        Nothing of it may ask Ray for anything when Ray is shut down: Ray would end the process.
        """
        with cls._all_lock:
            ending = [each for key, each in cls._all.items() if namespace in (None, key[1].namespace)]
            for each in ending:
                del cls._all[each._key]
        for each in ending:
            each._end()

    def _end(self) -> None:
        if self.usable:
            self._ended = True
            self.io.call(self.routes.close())
            wait_for_answers(_ANSWERS_S)


def leave_ray() -> None:
    """This process is done: close its connections, and let go of the Ray if it was joined for them."""
    SharedConnections.end_all()
    leave_joined_ray()


async def _make(settings: Settings) -> ClusterRoutes:
    return ClusterRoutes(RayDirectory(settings.namespace), settings)  # in the thread that it belongs to


_in_child = False


def in_child() -> bool:
    """Whether this process was forked from one that was connected with Ray."""
    return _in_child


def refuse_in_child() -> None:
    """``ForkedError`` there."""
    if _in_child:
        raise forked("the connection with Ray")


def _after_fork() -> None:
    global _in_child
    # Another thread may have held the lock.
    SharedConnections._all_lock = threading.Lock()
    SharedConnections._all = {}
    if ray.is_initialized():
        _in_child = True
        leave_ray_alone()


os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    SharedConnections.end_all()
    IoThread.end_all()


atexit.register(_at_exit)  # the last registered runs first: before Ray ends, whose were registered at its import
