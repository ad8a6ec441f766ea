"""One worker of a read-process-write loop: poll, call the function, and write its results with the positions.

A batch is one transaction: its results, the state that it has changed and the
positions behind it are seen together, or it is done again. Whatever dies at
whatever point, every record has its results once. The function may be called
more than once for a record, so what it does beside returning results may happen
more than once.

A function that raises is called again, ``retries`` times, with a back-off; then
the record goes to the dead letters, in the same transaction, or ends the loop if
there is no topic for them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rayqueue.client.process.results import Result, dead_letter, results_of, send_all
from rayqueue.client.process.state import State, restored
from rayqueue.errors import (
    OutcomeUnknownError,
    ProducerFencedError,
    RayQueueError,
    StaleGenerationError,
    TransactionAbortedError,
)
from rayqueue.net.backoff import Backoff, longest_s
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record

_log = logging.getLogger(__name__)

POLL_MS = 200
"""How soon a loop without records notices that it is to stop."""
_MAX_BACKOFF_MS = 10_000
_JOIN_S = 10.0
"""A worker that has no partition by then is counted as idle: there may be more workers than partitions."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a worker does. It is sent to where the worker runs."""

    sources: tuple[str, ...]
    sink: str | None
    group: str
    batch: int
    retries: int
    retry_backoff_ms: int
    dead_letters: str | None
    state: str | None
    transaction_timeout_ms: int
    idle_ms: int | None
    run: str
    """Drawn for each ``rq.process``: its workers' transactional ids are of it, so that a worker that was restarted
    fences the one that it replaces, and two runs do not fence each other."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one worker since it was started, or of all together."""

    records: int = 0
    results: int = 0
    dead_letters: int = 0
    transactions: int = 0
    """Committed."""
    aborted: int = 0
    """Batches that were begun and done again."""
    retries: int = 0
    """Calls of the function after it had failed."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, name) + getattr(other, name) for name in Figures.__slots__))


Function = Callable[..., Any]


class _Stopped(Exception):  # noqa: N818  # it is none
    """The loop is to end, and the function still fails."""


class ProcessLoop:
    """Runs in a thread of its own: ``run`` until ``stop``. Any thread may ask for ``figures``."""

    def __init__(self, rq: Any, settings: ProcessSettings, function: Function, number: int) -> None:
        self.figures = Figures()
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self._rq = rq
        self._settings = settings
        self._function = function
        self._number = number
        self._stopping = threading.Event()
        self._states: dict[TopicPartition, State] = {}
        self._dead = 0  # letters of the batch
        self._backoff = Backoff(rq.settings.client, Random())  # noqa: S311  # jitter
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # of an object
        )

    def stop(self) -> None:
        """After the batch that is under way."""
        self._stopping.set()

    def run(self) -> None:
        """Until it is stopped, idle for ``idle_ms``, or cannot go on: then ``error`` says why."""
        try:
            while not self._connected():
                self._stopping.wait(self._backoff.pause_s())
        except BaseException as error:  # noqa: BLE001  # whoever has the handle is told
            self.error = error
            _log.error("worker %d of group %s has ended: %r", self._number, self._settings.group, error)
        finally:
            self.finished.set()

    def _connected(self) -> bool:
        """Whether there is nothing more to do; False if the queue cannot be reached at the moment."""
        settings = self._settings
        try:
            with (
                self._rq.consumer(
                    *settings.sources,
                    group=settings.group,
                    delivery="exactly_once",
                    max_poll_records=settings.batch,
                    listener=self if settings.state is not None else None,
                ) as consumer,
                self._rq.producer(
                    transactional_id=f"{settings.group}.{settings.run}.{self._number}",
                    transaction_timeout_ms=settings.transaction_timeout_ms,
                ) as producer,
            ):
                self._loop(consumer, producer)
        except RayQueueError as error:
            if not error.retriable or self._stopping.is_set():
                raise
            _log.warning("group %s cannot be processed at the moment: %s", settings.group, error)
            return False
        return True

    def _loop(self, consumer: Any, producer: Any) -> None:
        settings = self._settings
        began_s = heard_s = time.monotonic()
        joined = False
        while not self._stopping.is_set():
            if not joined:  # until then there is nothing to be idle at
                joined = bool(consumer.assignment()) or time.monotonic() - began_s > _JOIN_S
                heard_s = time.monotonic()
            try:
                records = consumer.poll(timeout_ms=POLL_MS)
                if records:
                    self._batch(consumer, producer, records)
                    self._backoff.reset()
                    heard_s = time.monotonic()
            except _Stopped:  # in the middle of a batch, of which nothing is written
                return
            except ProducerFencedError:  # this worker was replaced
                raise
            except (TransactionAbortedError, StaleGenerationError, OutcomeUnknownError) as error:
                self._again(consumer, error)
            except RayQueueError as error:
                if not error.retriable:
                    raise
                self._again(consumer, error)
            if settings.idle_ms is not None and (time.monotonic() - heard_s) * 1000 > settings.idle_ms:
                return

    def _again(self, consumer: Any, error: RayQueueError) -> None:
        self._count(aborted=1)
        for state in self._states.values():
            state.aborted()
        consumer.rewind()
        _log.info("group %s: a batch is done again: %s", self._settings.group, error)
        self._stopping.wait(self._backoff.pause_s())

    # -- a batch ---------------------------------------------------------------------------------

    def _batch(self, consumer: Any, producer: Any, records: Sequence[Record]) -> None:
        settings = self._settings
        if settings.state is not None:
            self._restore(records, settings.state)
        self._dead = 0
        results = [result for each in self._returned(records) for result in each]
        made = len(results) - self._dead
        tx = producer.transaction(wait_visible=False)
        with tx:
            send_all(tx, results, settings.sink)
            for state in self._states.values():
                state.send(tx)
            tx.commit_offsets(consumer)
            self._commit(tx)
        for state in self._states.values():
            state.committed()
            before = state.to_trim()
            if before is not None:
                self._rq.io.call(state.trim(self._rq.routes, before))
        self._count(records=len(records), results=made, dead_letters=self._dead, transactions=1)

    def _commit(self, tx: Any) -> None:
        """Until it is known how it ended: without that, nobody knows where to go on."""
        while True:
            try:
                tx.commit()
            except OutcomeUnknownError as error:
                _log.warning("group %s: %s", self._settings.group, error)
                if self._stopping.is_set():
                    raise
                time.sleep(self._backoff.pause_s())
            else:
                return

    def _returned(self, records: Sequence[Record]) -> list[list[Result]]:
        """The results of each record."""
        if self._is_async:
            return asyncio.run(self._together(records))
        found = []
        for record in records:
            attempt = 0
            while True:
                state = self._state_of(record)
                try:
                    made = self._function(record) if state is None else self._function(record, state)
                    found.append(results_of(made, record, self._settings.sink))
                    break
                except Exception as error:  # noqa: BLE001  # the application's
                    attempt += 1
                    given_up = self._failed(record, state, error, attempt)
                    if given_up is not None:
                        found.append([given_up])
                        break
                    time.sleep(self._pause_s(attempt))
        return found

    async def _together(self, records: Sequence[Record]) -> list[list[Result]]:
        """Coroutines of a batch run together; with a state one after the other, for they share it."""

        async def one(record: Record) -> list[Result]:
            attempt = 0
            while True:
                state = self._state_of(record)
                try:
                    work: Awaitable[Any] = self._function(record) if state is None else self._function(record, state)
                    return results_of(await work, record, self._settings.sink)
                except Exception as error:  # noqa: BLE001  # the application's
                    attempt += 1
                    given_up = self._failed(record, state, error, attempt)
                    if given_up is not None:
                        return [given_up]
                    await asyncio.sleep(self._pause_s(attempt))

        if self._settings.state is not None:
            return [await one(record) for record in records]
        return list(await asyncio.gather(*map(one, records)))

    def _failed(self, record: Record, state: State | None, error: Exception, attempt: int) -> Result | None:
        """The dead letter of a record that was tried often enough; None if it is to be tried again."""
        if state is not None:
            state.back()
        if self._stopping.is_set():
            raise _Stopped
        if attempt <= self._settings.retries:
            self._count(retries=1)
            return None
        if self._settings.dead_letters is None:
            raise error
        _log.warning("%s-%d %d becomes a dead letter: %r", record.topic, record.partition, record.offset, error)
        self._dead += 1
        return dead_letter(record, error, attempt, self._settings.dead_letters)

    def _pause_s(self, attempt: int) -> float:
        return longest_s(self._settings.retry_backoff_ms, _MAX_BACKOFF_MS, attempt - 1)

    def _count(self, **more: int) -> None:
        self.figures = replace(
            self.figures, **{name: getattr(self.figures, name) + count for name, count in more.items()}
        )

    # -- states: a listener of the consumer --------------------------------------------------------

    def _state_of(self, record: Record) -> State | None:
        """Marked: what a call changes can be taken back."""
        if self._settings.state is None:
            return None
        state = self._states[TopicPartition(record.topic, record.partition)]
        state.mark()
        return state

    def _restore(self, records: Sequence[Record], topic: str) -> None:
        """What is not known here. The partitions are claimed by now: nobody else can commit a change."""
        for each in {TopicPartition(record.topic, record.partition) for record in records} - self._states.keys():
            self._states[each] = self._rq.io.call(restored(self._rq, topic, each.partition))

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Somebody else may have changed what is known here of these."""
        for each in partitions:
            self._states.pop(each, None)

    revoked = lost = assigned
