"""Appends: batches of clients on their way into a partition's log.

They are admitted and proposed as they are read; those whose check takes long,
in the order they came, once another thread has checked them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rayqueue.config import Settings
from rayqueue.errors import QueueFullError, RayQueueError
from rayqueue.partition import Admission, AdmissionLimits, Partition, pass_time_command
from rayqueue.partition.clock import TICK_MS
from rayqueue.partition.line import Line
from rayqueue.protocol.calls import AwaitRoom
from rayqueue.protocol.data import encode_appended
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.records import BatchHeader
from rayqueue.records.batch import is_costly
from rayqueue.records.header import HAS_HEADERS
from rayqueue.replica.checks import Checks, Result
from rayqueue.replica.settling import check_all_know

if TYPE_CHECKING:
    from rayqueue.replica.core import ReplicaCore

_log = logging.getLogger(__name__)

_TELL_UNACKED_S = 10.0
"""How often it is logged, at most, that unacknowledged batches are refused."""


_TRANSACTION_TICK_MS = 500


class Appends:
    """On the engine's thread."""

    def __init__(
        self, replica: ReplicaCore[Any], partition: Partition, settings: Settings, now_ms: Callable[[], int]
    ) -> None:
        """``now_ms`` is the time that the log is told."""
        log, calls = settings.log, settings.calls
        limits = AdmissionLimits(
            max_batch_bytes=log.max_batch_bytes,
            max_message_bytes=log.max_message_bytes,
            max_batch_records=log.max_batch_records,
        )
        self.admission = Admission(
            partition,
            limits,
            next_index=lambda: replica.engine.next_index,
            applied=lambda: replica.engine.applied,
            line=Line(calls.room_hold_ms / 1000),
            disks_full=lambda: replica.engine.refuses_records,
        )
        self.unacked_refused = 0
        """Batches with ``acks="none"`` that were not written: the topic was full, for example."""
        self._replica = replica
        self._clients = replica.clients
        self._calls = calls
        self._tell_unacked_s = 0.0
        self._now_ms = now_ms
        self._partition = partition
        self._checks = Checks(self._check, replica.run, calls.check_queue_bytes)

    def append(self, client: int, frame: Frame) -> None:
        self._replica.check_leads()
        kind, request, batch = frame.kind, frame.request, bytes(frame.body)
        if client not in self._checks and not is_costly(batch):
            self._propose(client, kind, request, batch, self._check(batch))
            return

        def propose(result: Result) -> None:
            try:
                if isinstance(result, Exception):
                    raise result
                self._propose(client, kind, request, batch, result)
            except RayQueueError as error:
                if kind == Kind.APPEND_UNACKED:
                    self._refused_unacked(error)
                raise

        waits = None if kind == Kind.APPEND_UNACKED else request
        self._checks.add(client, batch, lambda result: self._clients.serving(client, waits, partial(propose, result)))

    def append_unacked(self, client: int, frame: Frame) -> None:
        try:
            self.append(client, frame)
        except RayQueueError as error:
            self._refused_unacked(error)
            raise

    def await_room(self, client: int, call: AwaitRoom, reply: Callable[[Any], None]) -> None:
        self._replica.check_leads()
        line, calls = self.admission.line, self._calls
        if len(line) >= calls.max_fetches:
            raise QueueFullError(f"{len(line)} producers wait here for room already, which is the limit")
        wait_s = min(call.wait_ms, calls.max_fetch_wait_ms) / 1000
        self.admission.await_room(call, client, time.monotonic() + wait_s, reply)

    def keep_time(self, *, exactly: bool = False, transactional: bool = False) -> None:
        """Tell the log the time, if what is proposed next would be stamped with an old one; or, with ``exactly``, with
        any but now. How old a transaction is must be right to within a second or so."""
        now_ms = self._now_ms()
        within_ms = _TRANSACTION_TICK_MS if transactional else TICK_MS
        tick = pass_time_command(now_ms) if exactly else self.admission.tick(now_ms, within_ms)
        if tick is not None:
            self._replica.tell_log(tick)
            self.admission.ticked(now_ms)

    def needs(self, client: int) -> bool:
        return client in self._checks

    def close(self, error: RayQueueError) -> None:
        self.refuse_waiting(error)
        self._checks.close()

    def refuse_waiting(self, error: RayQueueError) -> None:
        """Those who wait for room."""
        for answer in self.admission.line.clear():
            answer(error)

    def _check(self, batch: bytes) -> BatchHeader:
        return self.admission.check(batch, now_ms=time.time_ns() // 1_000_000)

    def _propose(self, client: int, kind: int, request: int, batch: bytes, header: BatchHeader) -> None:
        replica = self._replica
        replica.check_leads()
        # Before: admission counts the batch at the index that it gets. Delays of jobs count from this moment.
        transactional = header.transactional
        if transactional:
            check_all_know(replica.oldest_version)
        exactly = self._partition.jobs is not None and bool(header.flags & HAS_HEADERS)
        self.keep_time(exactly=exactly, transactional=transactional)
        known = self.admission.admit_checked(header)
        if kind == Kind.APPEND_UNACKED:
            if known is None:
                replica.propose(batch, self._written_unacked)
            return
        if known is not None:
            self._appended(client, request, known)
            return
        pending = replica.propose(batch, partial(self._appended, client, request))
        if kind == Kind.APPEND_LEADER:
            replica.once_synced(pending, (None, header.count, False))

    def _appended(self, client: int, request: int, result: Any) -> None:
        if isinstance(result, RayQueueError):
            self._clients.fail(client, request, result)
        else:
            self._clients.send(client, Kind.APPENDED, request, (encode_appended(*result),))

    def _written_unacked(self, result: Any) -> None:
        if isinstance(result, RayQueueError):
            self._refused_unacked(result)

    def _refused_unacked(self, error: RayQueueError) -> None:
        """Whoever sent it does not wait for an answer: it is counted and, from time to time, logged."""
        self.unacked_refused += 1
        now_s = time.monotonic()
        if now_s >= self._tell_unacked_s:
            self._tell_unacked_s = now_s + _TELL_UNACKED_S
            _log.warning(
                "%d batches that were sent with acks='none' have been refused so far, and nobody is told; this one: %s",
                self.unacked_refused,
                error,
            )
