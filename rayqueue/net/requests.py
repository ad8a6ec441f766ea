"""The one request loop: attempts at something by a route, until one succeeds or the errors say that none will.

And many requests, some at a time; and one that must be answered in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from rayqueue.errors import ClosedError, NotLeaderError, RayQueueError
from rayqueue.net.backoff import Retry


class _Route(Protocol):
    def failed(self, error: RayQueueError) -> None: ...


_AT_ONCE = 64
_K = TypeVar("_K")
_T = TypeVar("_T")
_R = TypeVar("_R", bound=_Route)

After = Callable[[RayQueueError, float], float]
"""The pause after an attempt that failed so, now; raises the error if there is to be no other."""


async def request(way: Callable[[], Awaitable[_R]], attempt: Callable[[_R], Awaitable[_T]], retry: Retry) -> _T:
    """The result of the first attempt that succeeds. Raises what ``retry`` says is not to be tried again.

    ``way`` finds the route, and is asked before every attempt: the replicas may be others by then.
    """
    return await repeated(partial(once, way, attempt), retry.after)


async def repeated(attempt: Callable[[], Awaitable[_T]], after: After) -> _T:
    """The result of the first of these that succeeds."""
    clock_s = asyncio.get_running_loop().time
    while True:
        try:
            return await attempt()
        except RayQueueError as error:
            pause_s = after(error, clock_s())
        await asyncio.sleep(pause_s)


async def once(way: Callable[[], Awaitable[_R]], attempt: Callable[[_R], Awaitable[_T]]) -> _T:
    """One attempt. Its route hears of an error that says that the route is out of date.

    ``NotLeaderError`` if the route was closed and there is another one: try that.
    """
    route = await way()
    try:
        return await attempt(route)
    except ClosedError as closed:
        if await way() is route:
            raise
        raise NotLeaderError(str(closed), leader=None) from None
    except RayQueueError as error:
        if error.refresh_metadata:
            route.failed(error)
        raise


async def gathered(ask: Callable[[_K], Awaitable[_T]], of: Iterable[_K]) -> list[_T]:
    """The answers of all of these, in their order. Some are asked at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(each: _K) -> _T:
        async with gate:
            return await ask(each)

    return await asyncio.gather(*map(one, of))


async def in_time(work: Awaitable[_T], timeout_s: float) -> _T:
    """Its result, if that comes in time. ``asyncio.TimeoutError`` otherwise; it was cancelled then.

    As ``asyncio.wait_for``, which before Python 3.12 forgets that its caller was cancelled if the answer comes in the
    same moment: a loop around it goes on, and whoever waits for its end waits for ever.
    """
    future = asyncio.ensure_future(work)
    future.add_done_callback(heard)
    try:
        if not (await asyncio.wait((future,), timeout=timeout_s))[0]:
            future.cancel()
            await asyncio.wait((future,))
            if future.cancelled():
                raise asyncio.TimeoutError
    except asyncio.CancelledError:
        future.cancel()
        raise
    return future.result()


def heard(future: asyncio.Future[Any]) -> None:
    """Its error is known: whoever waits for it has it, and there may be nobody any more."""
    if not future.cancelled():
        future.exception()
