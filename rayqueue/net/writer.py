"""The writer of batches into one partition: a window with a loop, a clock and a channel.

It does what the window (``rayqueue.net.write_window``) says: sends to the leader,
looks for it, waits. Batches come from a ``Source``: a producer's accumulator, or
a bridge.

Belongs to one event loop, and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from rayqueue.config import ClientSettings
from rayqueue.errors import ClosedError, NotLeaderError, OutcomeUnknownError, RayQueueError, TransactionAbortedError
from rayqueue.net.backoff import Backoff
from rayqueue.net.outgoing import Outgoing
from rayqueue.net.requests import in_time
from rayqueue.net.write_actions import (
    Action,
    AskRoom,
    Connect,
    Doubt,
    FailWaiting,
    Identity,
    Resolve,
    Split,
    State,
    Transmit,
    WriteLimits,
)
from rayqueue.net.write_window import WriteWindow
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import Appended
from rayqueue.protocol.frames import Kind

_log = logging.getLogger(__name__)
_A = TypeVar("_A")
_B = TypeVar("_B", bound=Outgoing)

_PATIENT_FAILURES = 3
"""After more of them in a row the topic itself is looked up again: it may have been deleted, or made anew."""

_LEADERLESS_S = 1.0
"""When nobody leads for so long, the same."""

_CONGESTED_S = 0.002


class AppendChannel(Protocol):
    """The part of ``rayqueue.net.channel.Channel`` that a writer needs. Errors come by the futures."""

    @property
    def closed(self) -> bool: ...
    @property
    def queued_bytes(self) -> int: ...
    def append(self, batch: bytes, kind: Kind = ...) -> asyncio.Future[Appended]: ...
    def call(self, call: Call, *, may_take_ms: int = ...) -> Awaitable[Any]: ...


class LeaderRoute(Protocol):
    """The part of ``rayqueue.net.route.GroupRoute`` that a writer needs."""

    @property
    def trouble(self) -> str:
        """Why nobody may lead, for the end of a sentence; "" if nothing is known."""

    async def leader(self) -> Any: ...
    def failed(self, error: RayQueueError) -> None: ...


class Source(Protocol[_B]):
    """The source of a writer's batches, which is told what became of them."""

    in_flight: int
    """Batches that were taken and are not acknowledged. The writer's to write."""

    def __len__(self) -> int:
        """Batches that wait."""

    def take(self, now_s: float) -> _B | None:
        """The next that may go now."""

    def due_s(self) -> float | None:
        """When one may be taken that may not go yet."""

    def expired(self, now_s: float) -> Iterable[_B]:
        """Those that were never taken and whose time is up; they wait no more."""

    def drain(self) -> Iterable[_B]:
        """All that wait; they wait no more."""

    def split(self, batch: _B, pieces: tuple[_B, _B]) -> None:
        """The batch was cut: these are resolved in its place."""

    def resolve(self, batch: _B, outcome: Appended | RayQueueError) -> None:
        """Once for each batch."""


class PartitionWriter(Generic[_B]):
    """One partition's. ``pump`` whenever there may be something to send, ``tick`` now and then."""

    def __init__(
        self,
        name: str,
        source: Source[_B],
        limits: WriteLimits,
        client: ClientSettings,
        *,
        find: Callable[[bool], Awaitable[LeaderRoute]],
        identify: Callable[[bool], Awaitable[int]] | None = None,
        kind: Kind = Kind.APPEND,
        loop: asyncio.AbstractEventLoop,
        clock_s: Callable[[], float],
        rng: Random,
    ) -> None:
        """``find`` gives the route to the partition; True: the topic is to be looked up first. ``identify`` gives the
        producer id; True: one that was never used."""
        self.name = name
        self._source = source
        self._limits = limits
        self._find = find
        self._identify = identify
        self._kind = kind
        self._loop = loop
        self._clock_s = clock_s
        self._backoff = Backoff(client, rng)
        self._window = WriteWindow(name, limits, self._backoff)
        self._route: LeaderRoute | None = None
        self._channel: AppendChannel | None = None
        self._leaderless = False
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._wake_s: float | None = None
        self._linger: asyncio.TimerHandle | None = None

    def pump(self) -> None:
        """Send what may go now."""
        window, source, channel = self._window, self._source, self._channel
        if channel is not None and channel.closed and window.state is State.OPEN:
            self._do(window.lost(self._clock_s()))
        while window.has_room:
            if self._kind is Kind.APPEND_UNACKED and self._is_congested():
                return
            batch = source.take(self._clock_s())
            if batch is None:
                self._arm_linger()
                return
            self._do(window.offered(batch, self._clock_s()))
        if window.state is State.IDLE and len(source):
            self._do(window.wanted(self._clock_s()))

    def tick(self, now_s: float) -> None:
        """Report what is too late; doubt a leader that has been silent for long."""
        self._do(self._window.tick(now_s, self._source.expired(now_s)))

    def begin(self, producer_id: int, epoch: int) -> None:
        """Send from now on in this transaction. Nothing of the one before is left here."""
        self._do(self._window.begun(producer_id, epoch))

    @property
    def numbered(self) -> int:
        """Records of the transaction that may have been written."""
        return self._window.numbered

    def abort(self, error: RayQueueError) -> None:
        """Let go of all that waits and all that is under way: it is resolved with this. More may be sent later."""
        if self._task is not None:
            self._task.cancel()  # what it has to tell is about a window that is no more
        self._do(self._window.aborted(error, self._clock_s()))

    def close(self) -> None:
        """Send nothing any more. What is not acknowledged is reported as unknown, or as not written."""
        for each in (self._task, self._linger):
            if each is not None:
                each.cancel()
        self._do(self._window.closed())

    # -- what the window says ------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        window = self._window
        self._source.in_flight = window.in_flight  # before anybody is told of an outcome and sends more
        for action in actions:
            if type(action) is Transmit:
                self._transmit(action.batch, action.attempt)
            elif type(action) is Resolve:
                self._resolve(action.batch, action.outcome)
            else:
                self._do_seldom(action)
        if window.wake_s != self._wake_s:
            self._arm_wake(window.wake_s)

    def _do_seldom(self, action: Action) -> None:
        if isinstance(action, Connect):
            self._begin(self._connect, action)
        elif isinstance(action, AskRoom):
            self._begin(self._ask_room, action)
        elif isinstance(action, Doubt):
            self._begin(self._doubt, action)
        elif isinstance(action, Split):
            self._source.split(action.batch, action.pieces)  # type: ignore[arg-type]  # what was taken from it
        elif isinstance(action, FailWaiting):
            for batch in self._source.drain():
                self._resolve(batch, action.error)

    def _transmit(self, batch: Outgoing, attempt: int) -> None:
        assert self._channel is not None  # noqa: S101  # connected before
        future = self._channel.append(batch.encoded, self._kind)
        if self._kind is Kind.APPEND_UNACKED:
            self._do(self._window.answered(batch, attempt, _answer_of(future), self._clock_s()))
        else:
            future.add_done_callback(partial(self._answered, batch, attempt))

    def _answered(self, batch: Outgoing, attempt: int, future: asyncio.Future[Appended]) -> None:
        self._tell(self._window.answered, batch, attempt, _answer_of(future))

    def _tell(self, event: Callable[..., list[Action]], *details: Any) -> None:
        try:
            self._do(event(*details, self._clock_s()))
            self.pump()
        except Exception:  # noqa: BLE001  # a bug; nobody may wait for ever because of it
            self._fail()

    def _resolve(self, batch: Outgoing, outcome: Appended | RayQueueError) -> None:
        if isinstance(outcome, RayQueueError):
            level = (
                logging.DEBUG if isinstance(outcome, TransactionAbortedError) else logging.WARNING
            )  # that is no news
            _log.log(level, "%d records for %s: %s: %s", len(batch), self.name, type(outcome).__name__, outcome)
        self._source.resolve(batch, outcome)  # type: ignore[arg-type]  # what was taken from it

    def _begin(self, work: Callable[[_A], Awaitable[None]], action: _A) -> None:
        """The window waits for nothing else meanwhile."""
        self._task = self._loop.create_task(self._work(work, action))

    async def _work(self, work: Callable[[_A], Awaitable[None]], action: _A) -> None:
        try:
            await work(action)
        except Exception:  # noqa: BLE001  # as above
            self._fail()

    def _fail(self) -> None:
        _log.exception("the writer to %s has failed", self.name)
        self.abort(OutcomeUnknownError(f"the writer to {self.name} has failed; see the log"))

    # -- time ----------------------------------------------------------------------------

    def _arm_wake(self, wake_s: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake_s = wake_s
        self._wake = None if wake_s is None else self._loop.call_later(max(0.0, wake_s - self._clock_s()), self._woken)

    def _woken(self) -> None:
        self._wake = self._wake_s = None
        self._tell(self._window.timer)

    def _arm_linger(self) -> None:
        due_s = self._source.due_s()
        if due_s is None or self._linger is not None:
            return

        def due() -> None:
            self._linger = None
            self.pump()

        self._linger = self._loop.call_later(max(0.0, due_s - self._clock_s()), due)

    def _is_congested(self) -> bool:
        """Nobody answers, so the kernel's pace is the only limit."""
        if self._channel is None or self._channel.queued_bytes <= self._limits.max_bytes:
            return False
        self._loop.call_later(_CONGESTED_S, self.pump)
        return True

    # -- the leader ----------------------------------------------------------------------

    async def _connect(self, action: Connect) -> None:
        try:
            producer_id = None
            if action.identity is not Identity.NONE and self._identify is not None:
                producer_id = await self._identify(action.identity is Identity.FRESH)
            self._channel = await self._leader(action.stale)
        except RayQueueError as error:
            if not error.retriable:
                self._route = self._channel = None
            self._tell(self._window.not_connected, error)
        else:
            self._tell(self._window.connected, producer_id)

    async def _leader(self, stale: RayQueueError | None) -> AppendChannel:
        """An open channel to it. Whatever is needed for it is asked for again if there was trouble."""
        if self._route is None:
            self._route = await self._find(False)
        elif self._leaderless or (stale is not None and self._backoff.failures > _PATIENT_FAILURES):
            await self._look_up()
        if stale is not None:
            self._route.failed(stale)
        try:
            channel: AppendChannel = await in_time(self._route.leader(), _LEADERLESS_S)
        except ClosedError as closed:  # the partition's replicas are others now, and so is the way to them
            self._route = None
            raise NotLeaderError(str(closed), leader=None) from None
        except asyncio.TimeoutError:
            self._leaderless = True
            why = self._route.trouble
            raise NotLeaderError(f"nobody leads {self.name} at the moment{why}", leader=None) from None
        self._leaderless = False
        return channel

    async def _look_up(self) -> None:
        """The topic may have been deleted, or made anew. If nobody knows, the route that we have may still be right."""
        try:
            self._route = await in_time(self._find(True), _LEADERLESS_S)
        except asyncio.TimeoutError:
            return
        except RayQueueError as error:
            if not error.retriable:
                raise

    async def _ask_room(self, action: AskRoom) -> None:
        assert self._channel is not None  # noqa: S101  # connected before
        wait_ms = action.call.wait_ms
        try:
            asked = self._channel.call(action.call, may_take_ms=wait_ms)
            room = await in_time(asked, wait_ms / 1000 + self._limits.stall_s)
        except asyncio.TimeoutError:
            silent = OutcomeUnknownError(f"the leader of {self.name} has not answered")
            self._tell(self._window.not_granted, silent)
        except RayQueueError as error:
            self._tell(self._window.not_granted, error)
        else:
            self._tell(self._window.granted, room)

    async def _doubt(self, action: Doubt) -> None:
        route, channel = self._route, self._channel
        assert route is not None and channel is not None  # noqa: S101, PT018  # connected before
        route.failed(action.error)
        try:
            same = await route.leader() is channel and not channel.closed
        except RayQueueError as error:
            self._tell(self._window.replaced, error)
        else:
            self._tell(self._window.confirmed if same else partial(self._window.replaced, None))


def _answer_of(future: asyncio.Future[Appended]) -> Appended | RayQueueError:
    if future.cancelled():
        return OutcomeUnknownError("the call was cancelled")
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, RayQueueError) else OutcomeUnknownError(f"{type(error).__name__}: {error}")
