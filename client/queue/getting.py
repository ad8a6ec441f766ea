"""Getting items of a ``rayqueue.Queue``: each ``get`` leases so many, acknowledges them all or none, and has them then.

What was acknowledged is in nobody's hands but this process's, so it is not let go
of: if whoever asked is gone by then, or was told an error because the answer took
too long, the items are kept (``Kept``) and the handle's next ``get`` has them
first. What was leased and not acknowledged is given back as if it had not been
delivered. Whatever has been sent is repeated until it is answered, though nobody
waits for it.

Belongs to the I/O thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import chain, count, repeat
from random import Random
from typing import Any

from ray.util.queue import Empty

from rayqueue.client.queue.settling import itself, portions, runs_of
from rayqueue.config import Settings
from rayqueue.net.backoff import FOREVER_S, Retry
from rayqueue.net.interfaces import Routes, ask
from rayqueue.net.requests import repeated
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import (
    MAX_JOBS,
    AckAll,
    AckedAll,
    Leased,
    LeaseJobs,
    SettleJobs,
    Settlement,
    WithdrawRequest,
)
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_log = logging.getLogger(__name__)

_WAIT_MS = 10_000
"""How long one question for an item waits in the partition."""

Values = list[bytes | None]


class Kept:
    """Items that were acknowledged, and that nobody has got yet."""

    def __init__(self) -> None:
        self._values: deque[bytes | None] = deque()
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._values)

    def take(self, most: int) -> Values:
        return [self._values.popleft() for _ in range(min(most, len(self._values)))]

    def put_back(self, values: Values) -> None:
        """They were taken, and come first again."""
        self._values.extendleft(reversed(values))
        self._tell()

    def add(self, values: Values) -> None:
        self._values.extend(values)
        self._tell()

    def _tell(self) -> None:
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    async def or_first(self, asking: asyncio.Future[Any]) -> bool:
        """Wait for this. False if something was added before it is there."""
        added: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(added)
        try:
            await asyncio.wait((asking, added), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(added)
        return asking.done()


class Getting:
    """The gets of one handle."""

    def __init__(self, routes: Routes, settings: Settings, info: TopicInfo, worker: str) -> None:
        self.kept = Kept()
        self._routes = routes
        self._settings = settings
        self._place = TopicPartition(info.name, 0)
        self._topic_id = info.topic_id
        self._lease_s = info.settings.lease_ms / 1000
        """What nobody has heard of by then has ended."""
        self._worker = worker
        self._attempts = count(1)
        self._rng = Random()  # noqa: S311  # jitter

    def begin(self, number: int, wait_s: float | None) -> Get:
        return Get(self, self.get(number, wait_s))

    async def get(self, number: int, wait_s: float | None) -> Values:
        """So many values. ``Empty`` if there were fewer for all of the time."""
        clock_s = asyncio.get_running_loop().time
        deadline_s = None if wait_s is None else clock_s() + wait_s
        while True:
            left_ms = _WAIT_MS if deadline_s is None else max(0, round((deadline_s - clock_s()) * 1000))
            kept = self.kept.take(number)
            found: Values | None = None
            try:
                found, leased = await self._new(number - len(kept), min(_WAIT_MS, left_ms))
            finally:
                if found is None and kept:
                    self.kept.put_back(kept)
            if found is not None:
                return kept + found
            if not leased and not len(self.kept) >= number and deadline_s is not None and clock_s() >= deadline_s:
                raise Empty(f"Cannot get {number} items from {self._place.topic}.")

    async def _new(self, number: int, wait_ms: int) -> tuple[Values | None, bool]:
        """Exactly so many values, acknowledged, or None; and whether there was a lease of so many."""
        if not number:
            return [], False
        leased = await self._lease(number, wait_ms)
        if not leased:
            return None, False
        values = [job.value for each in leased for job in each.jobs]
        call = AckAll(leases=tuple([(each.token, _runs(each)) for each in leased]))

        def late(acked: AckedAll) -> None:
            if acked.done or acked.forgotten:
                self.kept.add(values)
            else:
                self._release_later(leased)

        acked: AckedAll = await self._surely(call, late)
        # Forgotten: it was repeated for so long that nobody knows. That somebody else has had them too is better than
        # that nobody ever has.
        if acked.done or acked.forgotten:
            return values, True
        await self._release(leased)  # some of them went to somebody else meanwhile; the others are not for this one
        return None, True

    async def _lease(self, number: int, wait_ms: int) -> list[Leased]:
        """Leases of exactly so many items, or none."""
        leased: list[Leased] = []
        missing = number
        try:
            while missing:
                some = await self._asked(missing, wait_ms if not leased else 0)
                if not some.jobs:  # others have taken the rest
                    await self._release(leased)
                    return []
                leased.append(some)
                missing -= len(some.jobs)
        except BaseException:
            self._release_later(leased)
            raise
        return leased

    async def _asked(self, number: int, wait_ms: int) -> Leased:
        most = min(number, MAX_JOBS)
        call = LeaseJobs(
            worker=self._worker,
            attempt=next(self._attempts),
            max_jobs=most,
            least_jobs=most,
            max_bytes=self._settings.consumer.fetch_bytes,
            wait_ms=wait_ms,
        )

        asking = asyncio.ensure_future(self._ask(call, wait_ms))
        try:
            if await self.kept.or_first(asking):
                return asking.result()  # type: ignore[no-any-return]
        except BaseException:
            self._withdraw(asking, call.attempt)
            raise
        self._withdraw(asking, call.attempt)  # there is something else now
        return Leased()

    def _withdraw(self, asking: asyncio.Future[Leased], attempt: int) -> None:
        """Nobody waits for the answer any more, which may be on its way, or lost with its jobs."""
        asking.add_done_callback(self._hand_back)
        call = WithdrawRequest(worker=self._worker, attempt=attempt, give_back=True)
        _finish(self._surely(call, _nothing, self._lease_s))

    def _hand_back(self, asking: asyncio.Future[Leased]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._release_later([asking.result()])

    async def _release(self, leased: Sequence[Leased]) -> None:
        told = [Settlement(kind="release", token=each.token, jobs=_runs(each)) for each in leased if each.jobs]
        calls = [SettleJobs(worker=self._worker, settlements=tuple(some)) for some in portions(told, itself)]
        await asyncio.gather(*[self._surely(call, _nothing, self._lease_s) for call in calls])

    def _release_later(self, leased: Sequence[Leased]) -> None:
        """Nobody waits for it."""
        if any(each.jobs for each in leased):
            _finish(self._release(leased))

    # -- what was sent is answered ------------------------------------------------------------------

    async def _ask(self, call: Call, may_take_ms: int = 0) -> Any:
        return await ask(self._routes, self._place, call, topic_id=self._topic_id, may_take_ms=may_take_ms)

    async def _surely(self, call: Call, late: Callable[[Any], None], within_s: float = FOREVER_S) -> Any:
        """The answer. If whoever waits for it gives up, or is told an error because it takes too long, the call is
        repeated, for so long, until there is an answer, which ``late`` gets then."""
        asking = asyncio.ensure_future(self._ask(call))
        try:
            return await asyncio.shield(asking)
        except BaseException:
            _finish(self._go_on(asking, call, late, within_s))
            raise

    async def _go_on(
        self, asking: asyncio.Future[Any], call: Call, late: Callable[[Any], None], within_s: float
    ) -> None:
        now_s = asyncio.get_running_loop().time()
        retry = Retry(self._settings.client, self._rng, now_s, within_s=within_s)
        attempts = chain((asking,), (self._ask(call) for _ in repeat(None)))
        late(await repeated(partial(next, attempts), retry.after))


class Get:
    """One ``get``. Whoever asks for it is in another thread, and may stop waiting at any time: then the values are
    kept, though they may be on their way to it already."""

    def __init__(self, getting: Getting, work: Coroutine[Any, Any, Values]) -> None:
        self._getting = getting
        self._work = work
        self._task: asyncio.Task[Values] | None = None
        self._given_up = False

    async def values(self) -> Values:
        if self._given_up:
            raise asyncio.CancelledError
        self._task = asyncio.get_running_loop().create_task(self._work)
        return await asyncio.shield(self._task)

    def give_up(self) -> None:
        """Nobody gets the values."""
        self._given_up = True
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()
            self._task.add_done_callback(self._keep)

    def _keep(self, task: asyncio.Task[Values]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._getting.kept.put_back(task.result())


def _runs(leased: Leased) -> tuple[tuple[int, int], ...]:
    return runs_of(sorted(job.id for job in leased.jobs))


def _nothing(_: Any) -> None:
    """Comes of the answer."""


_finishing: set[asyncio.Task[Any]] = set()
"""What goes on though nobody waits for it. If it fails, a lease ends by its time."""


def _finish(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _finishing.add(task)
    task.add_done_callback(_finished)


def _finished(task: asyncio.Task[Any]) -> None:
    _finishing.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.info("a request that was given up: %s", task.exception())
