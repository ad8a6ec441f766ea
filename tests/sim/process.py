"""A simulated process: an asyncio event loop in virtual time, so that client code runs in the simulator as it is.

Every callback is an event of the world's ``Clock``, in the order in which it was
asked for. A process can be paused, which its peers see as silence and which it
does not notice itself, and killed, after which nothing of it runs any more.
``virtual_time`` gives the clocks and the dice of the modules that have their own
to the world, so that a seed means one schedule.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
import uuid
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import Context
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from rayqueue.client.consumer import reader
from rayqueue.client.producer import sender
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Clock

_T = TypeVar("_T")

EPOCH_MS = 1_000_000_000
TICK_S = 1e-6
"""A timer is late by this much, as in life: who computes with fractions of seconds would else find itself too early,
and time would never go on."""


class SimTask(asyncio.Task[_T]):
    """A task whose place in a set does not depend on where in memory it is."""

    def __init__(self, coro: Coroutine[Any, Any, _T], *, loop: SimProcess, **options: Any) -> None:
        self._number = loop.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimProcess(asyncio.AbstractEventLoop):
    """The loop of one process, and its life. ``connect`` makes its connections (``tests.sim.sockets``)."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.cut = False
        """The network between this process and all replicas is down: nothing arrives, and nobody is told."""
        self.killed = False
        self._paused = False
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled = False
        self._numbers = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.on_killed: list[Callable[[], object]] = []
        self.connect: Callable[[SimProcess, int, Callable[[], Any]], Any] = _nowhere

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- its life ------------------------------------------------------------------------

    def pause(self, duration_s: float) -> None:
        self._paused = True
        self.clock.after(duration_s, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._schedule()

    def kill(self) -> None:
        """Kill -9: nothing of it runs any more, not even a ``finally``."""
        if not self.killed:
            self.killed = True
            self._ready.clear()
            for task in self._tasks:
                coroutine = task.get_coro()
                if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    coroutine.close()
            self._tasks.clear()
            for callback in self.on_killed:
                callback()

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        """Run this. What it raises ends the simulation."""
        self.create_task(main).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() or self.killed else task.exception()
        if error is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        def fail() -> None:
            raise error

        self.clock.after(0.0, fail)

    # -- asyncio.AbstractEventLoop ----------------------------------------------------------

    def time(self) -> float:
        return self.clock.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.killed

    def is_closed(self) -> bool:
        return self.killed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: SimTask[Any] = SimTask(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.clock.at(max(when, self.clock.now) + TICK_S, lambda: self._add(timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays on the clock, and does nothing there."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that nobody handles: a bug of the client. What a kill leaves behind is none."""
        if not self.killed:
            error = context.get("exception")
            text = f"{self.name}: {context.get('message')}: {error!r}"
            broken = error if isinstance(error, BrokenError) else BrokenError(Invariant.SOUND_CLIENT, text)
            self._raise(broken)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """The socket is only a name here: ``create_connection`` follows, and connects."""
        self._address = address

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *, sock: Any, **options: Any
    ) -> tuple[Any, Any]:
        port = self._address[1]
        sock.close()
        return await self.connect(self, port, protocol_factory)  # type: ignore[no-any-return]

    # -- being driven ------------------------------------------------------------------------

    def _add(self, handle: asyncio.Handle) -> None:
        if not self.killed and not handle.cancelled():
            self._ready.append(handle)
            self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._scheduled and not self._paused:
            self._scheduled = True
            self.clock.after(0.0, self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._paused or self.killed:
            return
        events._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                if not self._ready:
                    break  # killed from within
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)
        self._schedule()


async def _nowhere(process: SimProcess, port: int, factory: Callable[[], Any]) -> Any:
    raise ConnectionRefusedError(f"{process.name} has no network")


class SimIo:
    """The process's I/O thread, as the client sees it. Its loop is the only one, so nobody may block for it."""

    forked = False
    is_current = False

    def __init__(self, process: SimProcess) -> None:
        self.loop = process

    @property
    def usable(self) -> bool:
        return not self.loop.killed

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        future: Future[_T] = Future()
        if self.loop.killed:
            coroutine.close()
            return future

        def ended(task: asyncio.Task[_T]) -> None:
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        self.loop.create_task(coroutine).add_done_callback(ended)
        return future


class _Alarm(logging.Handler):
    """Client code reports its own bugs by the log: each is an error here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextmanager
def virtual_time(clock: Clock, dice: Random) -> Iterator[list[str]]:
    """Until it is over, the product's own clocks and dice are the world's. Gives what the product logs as errors."""

    def monotonic() -> float:
        return clock.now

    def time_ns() -> int:
        return EPOCH_MS * 1_000_000 + int(clock.now * 1e9)

    class Seeded(Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(dice.random() if seed is None else seed)

    logger, alarm = logging.getLogger("rayqueue"), _Alarm()
    level, propagates = logger.level, logger.propagate
    with ExitStack() as patches:
        for target, name, replacement in (
            (time, "monotonic", monotonic),
            (time, "time_ns", time_ns),
            (time, "time", lambda: time_ns() / 1e9),
            (uuid, "uuid4", lambda: uuid.UUID(int=dice.getrandbits(128))),
            (random, "Random", Seeded),
            (reader, "Random", Seeded),
            (sender, "Random", Seeded),
        ):
            patches.enter_context(patch.object(target, name, replacement))
        patches.enter_context(patch.dict(sender.Sender.__init__.__kwdefaults__, clock_s=monotonic))
        logger.addHandler(alarm)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            yield alarm.found
        finally:
            logger.removeHandler(alarm)
            logger.setLevel(level)
            logger.propagate = propagates
