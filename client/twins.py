"""Twins: calls that are written once, for threads (``X``) and for ``await`` in any event loop (``X_async``).

    @blocking
    async def topics(self) -> list[TopicInfo]:
        return await in_io(self._io, ...)

    topics_async = awaiting(topics)

The body of such a call runs in the caller's thread. What it waits for is a
*step*, and whoever drives the body waits for it in its own way: a thread by
blocking, a coroutine without. So a body awaits only what is defined here:

- ``in_io``: a coroutine of the I/O thread, where all connections live;
- ``beside``: a function that blocks, as most of Ray's do;
- ``rest``: a while, or until somebody rings;
- ``of_application``: what the application's own coroutine returns;
- ``part``: the body of another such call.

A wait that is cancelled cancels the coroutine of the I/O thread, unless that is
to be finished (``finish=True``); a function that blocks runs to its end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from types import coroutine
from typing import Any, NamedTuple, TypeVar

from typing_extensions import ParamSpec, Self

from rayqueue.client.arguments import hinted
from rayqueue.client.io import IoThread, in_io_thread
from rayqueue.client.wakeup import Wakeup
from rayqueue.errors import InvalidInputError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Rest(NamedTuple):
    wakeup: Wakeup
    seconds: float


class _Beside(NamedTuple):
    function: Callable[[], Any]


_Step = concurrent.futures.Future[Any] | _Rest | _Beside | Awaitable[Any]

Steps = Coroutine[_Step, Any, _T]
"""A body that awaits steps only."""


# -- what a body may await ----------------------------------------------------------------------


async def in_io(io: IoThread, work: Coroutine[Any, Any, _T], *, finish: bool = False) -> _T:
    """Its result, or error, in the I/O thread. ``finish``: it goes on also if nobody waits for it any more."""
    return await outcome(io.run(_finished(work) if finish else work))


async def outcome(future: concurrent.futures.Future[_T]) -> _T:
    """Of something that is under way in another thread."""
    return await _step(future)  # type: ignore[no-any-return]


async def beside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a function that blocks: called by a thread itself, and for a coroutine in a thread beside."""
    return await _step(_Beside(lambda: function(*args, **kwargs)))  # type: ignore[no-any-return]


async def rest(wakeup: Wakeup, seconds: float) -> bool:
    """Until somebody rings, or so long. Whether somebody has."""
    return await _step(_Rest(wakeup, seconds))  # type: ignore[no-any-return]


async def of_application(returned: Awaitable[Any]) -> Any:
    """``InvalidInputError`` if a thread drives this: it has no event loop for it."""
    return await _step(returned)


def part(call: Callable[_P, _T]) -> Callable[_P, Steps[_T]]:
    """Another ``blocking`` method, to be awaited as a part of this body."""
    method: Any = call
    return partial(method.__func__.body, method.__self__)


@coroutine
def _step(step: _Step) -> Generator[_Step, Any, Any]:
    return (yield step)


async def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    return await asyncio.shield(asyncio.ensure_future(work))


# -- who drives it ------------------------------------------------------------------------------


def run_blocking(work: Steps[_T]) -> _T:
    """Wait as a thread does."""
    try:
        step = work.send(None)
        while True:
            try:
                found = _wait(step)
            except BaseException as error:  # noqa: BLE001 - it goes to whoever awaits the step
                step = work.throw(error)
            else:
                step = work.send(found)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        work.close()


async def run_awaiting(work: Steps[_T]) -> _T:
    """Wait as a coroutine does, in any event loop."""
    try:
        step = work.send(None)
        while True:
            try:
                found = await _awaitable(step)
            except BaseException as error:  # noqa: BLE001 - it goes to whoever awaits the step
                step = work.throw(error)
            else:
                step = work.send(found)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        work.close()


def _wait(step: _Step) -> Any:
    if isinstance(step, _Rest):
        if in_io_thread() and step.seconds:
            raise _waits_for_itself()
        return step.wakeup.wait(step.seconds)
    if isinstance(step, concurrent.futures.Future):
        if in_io_thread() and not step.done():
            step.cancel()
            raise _waits_for_itself()
        return step.result()
    if isinstance(step, _Beside):
        return step.function()
    if inspect.iscoroutine(step):
        step.close()
    raise InvalidInputError("a listener whose methods are async needs poll_async")


def _waits_for_itself() -> InvalidInputError:
    return InvalidInputError("this would wait for itself: in the I/O thread, await instead")


def _awaitable(step: _Step) -> Awaitable[Any]:
    if isinstance(step, _Rest):
        return step.wakeup.wait_async(step.seconds)
    if isinstance(step, concurrent.futures.Future):
        return asyncio.wrap_future(step)
    if isinstance(step, _Beside):
        return asyncio.to_thread(step.function)
    return step


def blocking(body: Callable[_P, Steps[_T]]) -> Callable[_P, _T]:
    """The call for threads. Arguments that do not fit are an ``InvalidInputError`` with a hint."""
    begin = hinted(body)

    @wraps(body)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_blocking(begin(*args, **kwargs))

    shown: Any = call
    shown.__signature__ = inspect.signature(body)
    del shown.__wrapped__  # who looks for a coroutine there must not find one
    shown.body = body
    return call


def awaiting(call: Callable[_P, _T]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """The twin of a ``blocking`` call."""
    body: Callable[_P, Steps[_T]] = call.body  # type: ignore[attr-defined]
    begin = hinted(body)

    @wraps(body)
    async def call_async(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await run_awaiting(begin(*args, **kwargs))

    call_async.__name__ = f"{body.__name__}_async"
    call_async.__qualname__ = f"{body.__qualname__}_async"
    call_async.__doc__ = f"``await`` what ``{body.__name__}`` blocks for.\n\n{inspect.cleandoc(body.__doc__ or '')}"
    return call_async


class Twin:
    """Of what is used in a ``with`` block, and in an ``async with`` block."""

    async def _leave(self, kind: type[BaseException] | None) -> None:
        """The block has ended, with an exception of this kind if it is not None. A body that awaits steps only."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run_blocking(self._leave(kind))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await run_awaiting(self._leave(kind))
