"""Audit: who changed what, and who was refused, as records of a topic.

Written once there are keys; without them nobody could be named. It is written
beside the request, never in its way: what cannot be written is counted and told
in the log. Nothing secret is in it: keys are named by their ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import msgspec

from rayqueue.client.handle import RayQueue
from rayqueue.errors import PermissionDeniedError, RateLimitedError, RayQueueError, UnauthenticatedError
from rayqueue.gateway.limits import Buckets
from rayqueue.gateway.principals import Caller
from rayqueue.protocol.topics import GATEWAY

_log = logging.getLogger(__name__)

TOPIC = f"{GATEWAY}audit"
_MAX_WAITING = 10_000
_LAST_ENTRIES_S = 2.0
_REFUSALS_PER_S = 10
RETENTION_MS = 90 * 24 * 3_600_000
REFUSALS = (UnauthenticatedError, PermissionDeniedError)
_SHOWN = 200
"""Characters of a path or a method: a caller chooses them."""

asked_from: ContextVar[str] = ContextVar("asked_from", default="")
"""The address of the caller whose request is carried out, in the task that does it."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    at_ms: int
    gateway: str
    key: str
    verb: str
    kind: str
    name: str
    outcome: str = "done"
    source: str = ""
    needs: str = ""
    """The grant that was missing."""


def entry(by: str, key: str, verb: str, kind: str, name: str, **more: str) -> Entry:
    """As of now."""
    return Entry(int(time.time() * 1000), by, key, verb, kind, name, **more)


class Audit:
    """Of one gateway. Belongs to its event loop."""

    def __init__(self, rq: RayQueue, gateway_id: str) -> None:
        self._rq = rq
        self._gateway_id = gateway_id
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue(_MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._refusals = Buckets("refusals", _REFUSALS_PER_S, time.monotonic)
        self.dropped = 0

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write())

    def note(self, caller: Caller, verb: str, kind: str, name: str) -> None:
        """A change that was made."""
        if caller.key_id is not None:
            self._put(entry(self._gateway_id, caller.key_id, verb, kind, name, source=asked_from.get()))

    def refused_within(self, caller: Caller, what: str, error: RayQueueError) -> None:
        """As ``refused``, of a message in a stream that was let in. Other errors are nothing for the audit."""
        if caller.key_id is not None and isinstance(error, REFUSALS):
            self.refused(caller.key_id, what, error, asked_from.get())

    def refused(self, key: str, what: str, error: RayQueueError, source: str) -> None:
        """A request that was not let in, or not allowed. Who is refused all the time does not fill the disk with it."""
        try:
            self._refusals.take(source)
        except RateLimitedError:
            self.dropped += 1
            return
        told = {"outcome": error.code, "source": source, "needs": str(error.details.get("needs", ""))}
        self._put(entry(self._gateway_id, key, "request", "route", what[:_SHOWN], **told))

    def _put(self, entry: Entry) -> None:
        try:
            self._waiting.put_nowait(entry)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped in (1, 100, 10_000):
                _log.error("%d entries of the audit could not be kept: it cannot be written so fast", self.dropped)

    async def close(self) -> None:
        if self._task is None:
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._waiting.join(), _LAST_ENTRIES_S)
        self._task.cancel()

    async def _write(self) -> None:
        producer: Any = None
        made = False
        while True:
            entries = [await self._waiting.get()]
            while not self._waiting.empty() and len(entries) < 1000:
                entries.append(self._waiting.get_nowait())
            try:
                if producer is None:
                    producer = await self._rq.producer_async()
                if not made:
                    await self._rq.create_topic_async(TOPIC, if_missing=True, partitions=1)
                    await self._rq.alter_topic_async(TOPIC, retention_ms=RETENTION_MS)
                    made = True
                await producer.send_many_async(TOPIC, [msgspec.json.encode(each) for each in entries])
            except RayQueueError as error:
                self.dropped += len(entries)
                _log.error("%d entries of the audit could not be written: %s", len(entries), error)
            finally:
                for _ in entries:
                    self._waiting.task_done()
