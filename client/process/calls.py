"""Calls of a processing function: again after a failure, with a back-off, and a dead letter in the end.

A call has failed if it raises, or if what it returns can be written nowhere: a
result that is too large, of a topic or partition that is not there. So one such
record does not hold up the others.

Coroutines of a batch run together, in one event loop for the life of the worker:
what a function keeps there (a session, a pool) is good for its next batch.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from threading import Event

from rayqueue.client.process.dead_letters import dead_letter
from rayqueue.client.process.results import Result, Topics, results_of
from rayqueue.client.process.settings import Function, ProcessSettings
from rayqueue.client.process.state import State
from rayqueue.client.twins import of_application, rest, run_awaiting, run_blocking
from rayqueue.client.wakeup import Wakeup
from rayqueue.net.backoff import longest_s
from rayqueue.records import Record

_log = logging.getLogger(__name__)

_MAX_BACKOFF_MS = 10_000

Place = tuple[str, int, int]
"""Of a record: topic, partition and offset."""


class Stopped(Exception):  # noqa: N818  # it is none
    """The loop is to end, and the function still fails."""


class Calls:
    """Of one worker, in its thread. ``topics`` is given by whoever has a producer."""

    topics: Topics

    def __init__(
        self,
        settings: ProcessSettings,
        function: Function,
        state_of: Callable[[Record], State | None],
        stopping: Event,
    ) -> None:
        self.dead = 0
        """Letters of the newest batch."""
        self.retries = 0
        """Calls after one that has failed, of the newest batch."""
        self.given_up: dict[Place, tuple[Exception, int]] = {}
        """Records that are dead letters without another call: why, and after how many attempts."""
        self._settings = settings
        self._function = function
        self._state_of = state_of
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # of an object
        )

    def results(self, records: Sequence[Record]) -> list[list[Result]]:
        """Of each record."""
        self.dead = self.retries = 0
        if not self._is_async:
            return [run_blocking(self._results(record)) for record in records]
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(self._together(records))

    def close(self) -> None:
        """End the event loop, and what the application has left in it."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True) if left else asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    async def _together(self, records: Sequence[Record]) -> list[list[Result]]:
        """With a state one after the other, for they share it."""
        if self._settings.state is not None:
            return [await run_awaiting(self._results(record)) for record in records]
        tasks = [asyncio.ensure_future(run_awaiting(self._results(record))) for record in records]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:  # the others are not left behind in the loop
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _results(self, record: Record) -> list[Result]:
        """Of one record. Awaits steps only (``rayqueue.client.twins``)."""
        if self.given_up:
            given_up = self.given_up.get((record.topic, record.partition, record.offset))
            if given_up is not None:
                return [await self._dead_letter(record, *given_up)]
        attempt = 0
        while True:
            state = self._state_of(record)
            error: Exception | None = None
            found: list[Result] = []
            try:
                made = self._function(record) if state is None else self._function(record, state)
                found = results_of(await of_application(made) if self._is_async else made, record, self._settings.sink)
            except Exception as raised:  # noqa: BLE001  # the application's
                error = raised
            else:
                error = await self.topics.refusal(found if state is None else [*found, *state.to_write()])
            if error is None:
                return found
            attempt += 1
            if state is not None:
                state.back()
            if self._stopping.is_set():
                raise Stopped
            if attempt > self._settings.retries:
                return [await self._dead_letter(record, error, attempt)]
            self.retries += 1
            await rest(Wakeup(), longest_s(self._settings.retry_backoff_ms, _MAX_BACKOFF_MS, attempt - 1))

    async def _dead_letter(self, record: Record, error: Exception, attempts: int) -> Result:
        """Raises the error if there is no topic for them."""
        topic = self._settings.dead_letters
        if topic is None:
            raise error
        letter = dead_letter(record, error, attempts, topic, await self.topics.most_bytes(topic))
        self.dead += 1
        _log.warning("%s-%d %d becomes a dead letter: %r", record.topic, record.partition, record.offset, error)
        return letter
