"""What the Ray dashboard shows of a replica while it runs: role, term, high watermark.

Ray reads an actor's representation once, so what changes cannot be there. The
name of a task is chosen with each call: so a replica calls itself, and the name
of that call says what it is. The call lasts until something else is true. Among
an actor's tasks, the one that is RUNNING is what the replica is now; those that
have ended are what it was, and for how long.

A new role or term is shown within a second. The high watermark is as of the
moment the notice began, and follows every 15 seconds, not with each record: each
notice is a call and a row in Ray's table of tasks. One that says nothing new is
repeated after some minutes, for Ray calls all tasks of a driver failed some
seconds after that driver has ended, those that go on among them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from rayqueue.actors.names import COORDINATOR, topic_partition
from rayqueue.actors.replies import Reply, deliver
from rayqueue.replica import Replica, Status

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
FOLLOW_EVERY_S = 15.0
REPEAT_EVERY_S = 300.0

Post = Callable[[int, str], object]
"""Begin the call of this number and name. What it returns is kept until the next one."""


def who(status: Status) -> str:
    """Such as ``orders-3 r2``."""
    topic, partition = topic_partition(status.group_id)
    return f"{topic}-{partition} {status.node_id}" if partition else f"{topic} {status.node_id}"


def text_of(status: Status) -> str:
    """One line for the dashboard. The coordinator has no records, and so no high watermark."""
    told = f"{who(status)}: {status.role} of term {status.term}"
    if status.group_id != COORDINATOR:
        told += f", high watermark {status.high_watermark}"
    if status.damaged is not None:
        told += ", damaged"
    return told + ", disk full" if status.read_only else told


def is_due(shown: Status | None, now: Status, age_s: float) -> bool:
    """Whether ``now`` must be shown, where ``shown`` has been for ``age_s``."""
    if shown is None or _state(shown) != _state(now):
        return True
    return age_s >= (FOLLOW_EVERY_S if shown.high_watermark != now.high_watermark else REPEAT_EVERY_S)


def _state(status: Status) -> tuple[object, ...]:
    return status.role, status.term, status.read_only, status.damaged is not None


class Notices:
    """Those of one replica, of which the last one lasts. Posted on one event loop, they run on another."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._number = 0
        self._ended = False
        self._lasting: Reply | None = None
        self._lock = threading.Lock()
        self._kept: object = None

    def show(self, text: str) -> None:
        with self._lock:
            self._number += 1
            number = self._number
        self._kept = self._post(number, text)
        self._take_down()

    async def last(self, number: int) -> None:
        """For as long as no later one was posted."""
        reply = Reply()
        with self._lock:
            if number != self._number or self._ended:
                return
            self._lasting = reply
        await reply.future

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._take_down()

    def _take_down(self) -> None:
        with self._lock:
            lasting, self._lasting = self._lasting, None
        if lasting is not None:
            deliver([(lasting, None)])


async def keep_notice(replica: Replica, notices: Notices) -> NoReturn:
    """Until it is cancelled."""
    shown: Status | None = None
    since_s = 0.0
    try:
        while True:
            now, now_s = replica.status, time.monotonic()
            if is_due(shown, now, now_s - since_s):
                shown, since_s = now, now_s
                try:
                    notices.show(text_of(now))
                except RayError as error:
                    _log.debug("the dashboard is not told: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        notices.end()


def show_class(name: str) -> None:
    """Ray titles the process after the call that began last, and tags its figures of memory and CPU with that title.

    A notice has a name of its own each time, which would leave a new series of each figure behind."""
    ray._raylet.setproctitle(f"ray::{name}")  # type: ignore[attr-defined]


def post_by(handle: Any) -> Post:
    """By calls of the actor to itself."""
    return lambda number, text: handle.notice.options(name=text).remote(number)
