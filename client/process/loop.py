"""One worker of a read-process-write loop: poll, call the function, and write its results with the positions.

A batch is one transaction: its results, the state that it has changed and the
positions behind it are seen together, or it is done again. Whatever dies at
whatever point, every record has its results once. The function may be called
more than once for a record, so what it does beside returning results may happen
more than once.

A function that fails is called again, ``retries`` times, with a back-off; then
the record goes to the dead letters, in the same transaction, or ends the loop if
there is no topic for them (``calls.py``). A batch that only its partitions refuse
is done again in halves, until it is known which record that is for; it goes the
same way. What is wrong with the queue, and not with a record, is tried for ever,
and told by ``figures`` and the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from rayqueue.client.process.calls import Calls, Place, Stopped
from rayqueue.client.process.results import UNWRITABLE, Result, Topics, send_all
from rayqueue.client.process.settings import Figures, Function, ProcessSettings
from rayqueue.client.process.state import State, restored
from rayqueue.errors import (
    OutcomeUnknownError,
    ProducerFencedError,
    RayQueueError,
    StaleGenerationError,
    TooManyTransactionsError,
    TransactionAbortedError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import IDS_BOUND
from rayqueue.records import Record

_log = logging.getLogger(__name__)

POLL_MS = 200
"""How soon a loop without records notices that it is to stop."""
_JOIN_S = 10.0
"""A worker that has no partition by then is counted as idle: there may be more workers than partitions."""
_QUIET_S = 10.0
"""A worker that was given nothing to do for so long after a failure is through with it."""
_USUAL_FAILURES = 3
"""So many in a row are what a new leader, or a member that comes or goes, costs."""


class _Refused(Exception):  # noqa: N818
    """A batch that will not be written, however often it is tried."""

    def __init__(self, cause: RayQueueError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ProcessLoop:
    """Runs in a thread of its own: ``run`` until ``stop``. Any thread may ask for ``figures``."""

    def __init__(self, rq: Any, settings: ProcessSettings, function: Function, number: int) -> None:
        self.figures = Figures()
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self._rq = rq
        self._settings = settings
        self._number = number
        self._stopping = threading.Event()
        self._states: dict[TopicPartition, State] = {}
        self._calls = Calls(settings, function, self._state_of, self._stopping)
        self._most = settings.batch
        """Records of the next batch: less than ``batch`` while it is found out which one is refused."""
        self._suspect: tuple[Place | None, int] = (None, 0)
        """A record that was refused alone, and how often."""
        self._failures = 0
        """In a row, of batches and connections; the last at ``_failed_s``."""
        self._failed_s = 0.0
        self._backoff = Backoff(rq.settings.client, Random())  # noqa: S311  # jitter

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
            try:
                self._calls.close()
            except Exception:  # noqa: BLE001  # the application's, on its way out
                _log.exception("the event loop of worker %d of group %s", self._number, self._settings.group)
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
                producer._give_back_id()
                self._calls.topics = Topics(producer, settings.sink, settings.named)
                self._loop(consumer, producer)
        except RayQueueError as error:
            if not error.retriable or self._stopping.is_set() or _got_no_id(error):
                raise
            self._note("the queue cannot be used at the moment", error)
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
            records: Sequence[Record] = ()
            failures = self._failures
            try:
                records = consumer.poll(max_records=self._most, timeout_ms=POLL_MS)
                if records:
                    self._batch(consumer, producer, records)
                    self._went_well()
                    heard_s = time.monotonic()
                elif failures and time.monotonic() - self._failed_s > _QUIET_S:
                    self._went_well()  # somebody else has done what was to be done again
            except Stopped:  # in the middle of a batch, of which nothing is written
                return
            except _Refused as refused:
                self._isolate(records, refused.cause)
                self._again(consumer, refused.cause)
            except ProducerFencedError:  # this worker was replaced
                raise
            except (TransactionAbortedError, StaleGenerationError, OutcomeUnknownError) as error:
                self._again(consumer, error)
            except RayQueueError as error:
                if not error.retriable or _got_no_id(error):
                    raise
                self._again(consumer, error)
            if self._failures > failures:  # so there is something to do
                heard_s = time.monotonic()
            if settings.idle_ms is not None and (time.monotonic() - heard_s) * 1000 > settings.idle_ms:
                return

    def _again(self, consumer: Any, error: RayQueueError) -> None:
        self._count(aborted=1)
        for state in self._states.values():
            state.aborted()
        consumer.rewind()
        self._note("a batch is done again", error)
        self._stopping.wait(self._backoff.pause_s())

    def _note(self, what: str, error: RayQueueError) -> None:
        """Something will be tried again. Often in a row is worth a warning; each time is not."""
        self._failures += 1
        self._failed_s = time.monotonic()
        self.figures = replace(self.figures, trouble=f"{what}, {self._failures} times in a row by now: {error}")
        often = self._failures > _USUAL_FAILURES and self._failures & (self._failures - 1) == 0
        level = logging.WARNING if often else logging.INFO
        _log.log(level, "group %s: %s (%d in a row): %s", self._settings.group, what, self._failures, error)

    def _went_well(self) -> None:
        self._most = min(self._settings.batch, 2 * self._most)
        self._suspect = (None, 0)
        self._calls.given_up.clear()
        self._failures = 0
        self._backoff.reset()
        if self.figures.trouble:
            self.figures = replace(self.figures, trouble="")

    def _isolate(self, records: Sequence[Record], cause: RayQueueError) -> None:
        """Find out which record cannot be written, and give it up. Raises the cause if there is no way to."""
        if len(records) > 1:
            self._most = len(records) // 2
            return
        (record,) = records
        place = (record.topic, record.partition, record.offset)
        if place in self._calls.given_up:  # so it is the dead letter that cannot be written
            raise cause
        attempts = self._suspect[1] + 1 if self._suspect[0] == place else 1
        self._suspect = (place, attempts)
        if attempts <= self._settings.retries:
            return
        if self._settings.dead_letters is None:
            raise cause
        self._calls.given_up[place] = (cause, attempts)

    # -- a batch ---------------------------------------------------------------------------------

    def _batch(self, consumer: Any, producer: Any, records: Sequence[Record]) -> None:
        settings, calls = self._settings, self._calls
        if settings.state is not None:
            self._restore(records, settings.state)
        try:
            results = [result for each in calls.results(records) for result in each]
        finally:
            self._count(retries=calls.retries)
        tx = producer.transaction(wait_visible=False)
        try:
            with tx:
                self._send(tx, results)
                tx.commit_offsets(consumer)
                self._commit(tx)
        except TransactionAbortedError as error:
            if isinstance(error.__cause__, UNWRITABLE):
                raise _Refused(error.__cause__) from error
            raise
        for state in self._states.values():
            state.committed()
            before = state.to_trim()
            if before is not None:
                self._rq.io.call(state.trim(self._rq.routes, before))
        self._count(records=len(records), results=len(results) - calls.dead, dead_letters=calls.dead, transactions=1)

    def _send(self, tx: Any, results: Sequence[Result]) -> None:
        try:
            send_all(tx, results, self._settings.sink)
            for state in self._states.values():
                state.send(tx)
        except UNWRITABLE as error:  # it has become so since the results were looked at
            raise _Refused(error) from error

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


def _got_no_id(error: RayQueueError) -> bool:
    """The cluster has no room for another one. That was tried for ``call_timeout_ms``, by a worker that has done
    nothing yet: whoever has started it is to know."""
    return isinstance(error, TooManyTransactionsError) and error.details.get("bound") == IDS_BOUND
