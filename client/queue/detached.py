"""Detached leases: jobs for somebody behind this process, who keeps nothing but the text of each lease.

A worker (``rayqueue.client.queue.worker``) holds its jobs itself and extends their
leases. A gateway cannot: its callers come and go, and the next one of theirs may
ask another gateway. So each request takes a lease of its own, which outlives the
connection and the gateway, and is extended by nobody but the caller. The text of a
lease says all there is to know of it, and any process can settle it.

Partitions are asked in turn, a few more each time; where none has a job, a question
waits in every one of them. What comes too late for the request, or is more than it
wanted, is given back as if it had not been delivered.

Belongs to the I/O thread, but for what it says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import count
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rayqueue.client.queue.job import JobId
from rayqueue.client.queue.settling import portions, runs_of, texts
from rayqueue.errors import InvalidInputError, RayQueueError, TopicKindError, TopicRecreatedError, UnknownTopicError
from rayqueue.net.backoff import Retry
from rayqueue.net.interfaces import ask
from rayqueue.net.requests import repeated
from rayqueue.protocol.jobs import FindJobs, Job, Leased, LeaseJobs, Settled, SettleJobs, Settlement, WithdrawRequest
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name
from rayqueue.records.room import Room

if TYPE_CHECKING:
    from rayqueue.client.routes import ClusterRoutes
    from rayqueue.config import Settings

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
"""How old what is known of a queue's partitions may be: some may have been added."""
_GRACE_S = 0.02
"""How long the first jobs wait for those of partitions that were asked at the same time."""
_ASK_S = 1.0
"""How long a partition without a leader keeps those from being told that the others have nothing."""
_PARK_MS = 2000
"""How long a question waits in one of several partitions: once another has answered, it stays there for no use."""
_ALONE_MS = 10_000
_FIND = 1000
_WITHDRAW_S = 300.0
"""How long a request whose answer was lost is looked after."""

Kind = Literal["ack", "nack", "reject", "release"]


class JobLease(NamedTuple):
    """One delivery of one job, as its text ``7.3-120.55`` has it: queue's id, job, token. It is no secret: whoever may
    work on the queue could settle any of its jobs."""

    topic_id: int
    job: JobId
    token: int

    def __str__(self) -> str:
        return f"{self.topic_id}.{self.job}.{self.token}"

    @classmethod
    def of(cls, text: str) -> JobLease:
        """``InvalidInputError`` if it is none."""
        parts = text.split(".") if len(text) <= 80 else []
        if len(parts) == 3 and all(each.isascii() and each.isdigit() for each in (parts[0], parts[2])):
            made = cls(int(parts[0]), JobId.of(parts[1]), int(parts[2]))
            if max(made.topic_id, *made.job, made.token) < 2**63:
                return made
        raise InvalidInputError(f"a lease is a text such as '7.3-120.55', as it came with its job, not {text[:100]!r}")


class TakenJob(NamedTuple):
    lease: JobLease
    lease_ms: int
    """How long it lasts from now."""
    job: Job


class DetachedQueue:
    """One work queue. ``worker`` is this process's own name, as dead letters tell it; nobody else has it."""

    def __init__(self, routes: ClusterRoutes, settings: Settings, name: str, worker: str) -> None:
        """From any thread."""
        self.name = check_name("queue", name)
        self._routes = routes
        self._settings = settings
        self._worker = worker
        self._attempts = count(1)
        self._turn = 0
        self._looked_s = float("-inf")
        self._rng = Random()  # noqa: S311  # jitter
        self._returning: set[asyncio.Task[None]] = set()

    async def info(self, *, fresh: bool = False) -> TopicInfo:
        """``UnknownTopicError``; ``TopicKindError`` if it is a log."""
        info = self._routes.cached_topic(self.name)
        now_s = time.monotonic()
        if info is None or fresh or now_s - self._looked_s >= _LOOK_EVERY_S:
            try:
                info = await self._routes.topic(self.name, refresh=True)
            except RayQueueError as error:
                if info is None or fresh or not error.retriable:
                    raise
                _log.info("queue %s is taken as it was, the coordinator does not answer: %s", self.name, error)
            self._looked_s = now_s
        if not info.settings.queue:
            raise TopicKindError(f"{self.name} is no work queue but a log: its records are read, not worked on")
        return info

    # -- taking --------------------------------------------------------------------------------

    async def take(
        self, max_jobs: int, *, wait_ms: int, lease_ms: int = 0, max_bytes: int | None = None
    ) -> list[TakenJob]:
        """The next jobs, at most so many; waits for the first. [] if none came. Cancelled, it takes none.

        ``max_bytes``: of all of them; one that is larger comes alone.
        """
        max_bytes = max_bytes or self._settings.consumer.fetch_bytes
        found = await self._take(max_jobs, wait_ms, lease_ms, max_bytes)
        count = Room(max_bytes).cut([each.job for each in found])
        self.give_back(found[count:])
        return found[:count]

    async def _take(self, max_jobs: int, wait_ms: int, lease_ms: int, max_bytes: int) -> list[TakenJob]:
        deadline_s = time.monotonic() + wait_ms / 1000
        info = await self.info()
        try:
            found = await self._look(info, max_jobs, lease_ms, max_bytes)
        except TopicRecreatedError:  # the caller means the one there is
            info = await self.info(fresh=True)
            found = await self._look(info, max_jobs, lease_ms, max_bytes)
        while not found and (left_ms := round((deadline_s - time.monotonic()) * 1000)) > 0:
            info = await self.info()
            numbers = range(len(info.partitions))
            park_ms = min(left_ms, _PARK_MS if len(numbers) > 1 else _ALONE_MS)
            asks = [self._ask(info, number, max_jobs, lease_ms, park_ms, max_bytes) for number in numbers]
            found = await self._first(asks, max_jobs, park_ms / 1000 + _ASK_S)
        return found

    async def _look(self, info: TopicInfo, max_jobs: int, lease_ms: int, max_bytes: int) -> list[TakenJob]:
        """What there is now: from one partition, or from as many as it takes."""
        total = len(info.partitions)
        order = [(self._turn + step) % total for step in range(total)]
        self._turn = (self._turn + 1) % total
        found: list[TakenJob] = []
        width = min(total, max_jobs)
        while order and len(found) < max_jobs:
            asked, order = order[:width], order[width:]
            share = -(-(max_jobs - len(found)) // len(asked))
            share_bytes = max(1, max_bytes // len(asked))
            asks = [self._ask(info, number, share, lease_ms, 0, share_bytes) for number in asked]
            found += await self._first(asks, max_jobs - len(found), _ASK_S)
            width *= 2
            if found:
                break
        return found

    async def _ask(
        self, info: TopicInfo, number: int, max_jobs: int, lease_ms: int, wait_ms: int, max_bytes: int
    ) -> list[TakenJob]:
        call = LeaseJobs(
            worker=self._worker,
            attempt=next(self._attempts),
            max_jobs=max_jobs,
            max_bytes=max_bytes,
            wait_ms=wait_ms,
            lease_ms=lease_ms,
            detached=True,
        )
        place = TopicPartition(self.name, number)
        try:
            leased: Leased = await ask(self._routes, place, call, topic_id=info.topic_id, may_take_ms=wait_ms)
        except RayQueueError as error:
            if error.retriable:  # there may be a lease that nobody knows of
                self._beside(self._withdrawn(info, place, call.attempt, lease_ms))
            raise
        return [
            TakenJob(JobLease(info.topic_id, JobId(number, each.id), leased.token), leased.lease_ms, each)
            for each in leased.jobs
        ]

    async def _first(self, asks: Iterable[Any], max_jobs: int, within_s: float) -> list[TakenJob]:
        """The jobs of those that answer first. An error if nobody has anything else to say."""
        loop = asyncio.get_running_loop()
        waiting = {loop.create_task(each) for each in asks}
        found: list[TakenJob] = []
        error: RayQueueError | None = None
        empty = False
        deadline_s = time.monotonic() + within_s
        try:
            while waiting and (left_s := deadline_s - time.monotonic()) > 0:
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        some = task.result()
                    except RayQueueError as told:
                        error = told
                    else:
                        found += some
                        empty = empty or not some
                if found:
                    deadline_s = min(deadline_s, time.monotonic() + (_GRACE_S if len(found) < max_jobs else 0))
        except asyncio.CancelledError:
            self.give_back(found)
            found = []
            raise
        finally:
            for task in waiting:
                task.add_done_callback(self._came_late)
        self.give_back(found[max_jobs:])
        if error is not None and not found and not empty:
            raise error
        return found[:max_jobs]

    def _came_late(self, task: asyncio.Task[list[TakenJob]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.give_back(task.result())

    def give_back(self, jobs: Sequence[TakenJob]) -> None:
        """Nobody has got these: as if they had not been delivered. Nobody waits for it, either."""
        if jobs:
            self._beside(self._released([each.lease for each in jobs]))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _withdrawn(self, info: TopicInfo, place: TopicPartition, attempt: int, lease_ms: int) -> None:
        call = WithdrawRequest(worker=self._worker, attempt=attempt, give_back=True)
        lasts_s = (lease_ms or info.settings.lease_ms) / 1000
        now_s = asyncio.get_running_loop().time()
        retry = Retry(self._settings.client, self._rng, now_s, within_s=min(lasts_s, _WITHDRAW_S))
        try:
            await repeated(partial(ask, self._routes, place, call, topic_id=info.topic_id), retry.after)
        except RayQueueError as error:
            _log.info("jobs of %s that nobody may know of come again when their lease ends: %s", self.name, error)

    async def _released(self, leases: Sequence[JobLease]) -> None:
        try:
            await self.settle("release", leases)
        except RayQueueError as error:
            _log.info("jobs of %s that nobody wanted come again when their leases end: %s", self.name, error)

    # -- settling ------------------------------------------------------------------------------

    async def settle(
        self,
        kind: Kind,
        leases: Sequence[JobLease],
        *,
        delay_ms: int | None = None,
        reason: str = "",
        traceback: str = "",
        result: bytes | None = None,
    ) -> list[JobLease]:
        """Say how these ended. Returns once that is committed, with those that were lost. May be repeated. ``result``:
        of the one job that is acknowledged."""
        reason, traceback = texts(reason, traceback)

        def settlement(token: int, offsets: Sequence[int]) -> Settlement:
            return Settlement(
                kind=kind,
                token=token,
                jobs=runs_of(sorted(set(offsets))),
                delay_ms=-1 if delay_ms is None else delay_ms,
                reason=reason,
                traceback=traceback,
                result=result,
            )

        lost, _ = await self._say(leases, settlement)
        return lost

    async def extend(self, leases: Sequence[JobLease], lease_ms: int = 0) -> tuple[list[JobLease], int]:
        """Let these last so long from now, or another lease of the queue. Those that were lost, and how long the others
        last: less where the queue's ``max_lease_ms`` ends them."""
        return await self._say(
            leases,
            lambda token, offsets: Settlement(kind="extend", token=token, jobs=((offsets[0], 1),), lease_ms=lease_ms),
        )

    async def _say(
        self, leases: Sequence[JobLease], settlement: Callable[[int, Sequence[int]], Settlement]
    ) -> tuple[list[JobLease], int]:
        info = await self.info()
        if any(each.topic_id > info.topic_id or each.job.partition >= len(info.partitions) for each in leases):
            info = await self.info(fresh=True)
        of_token: dict[tuple[int, int], list[JobLease]] = {}
        lost: list[JobLease] = []
        for each in leases:
            if each.topic_id != info.topic_id or each.job.partition >= len(info.partitions):
                lost.append(each)  # of a queue that had this name before
            else:
                of_token.setdefault((each.job.partition, each.token), []).append(each)
        calls: dict[int, list[tuple[Settlement, list[JobLease]]]] = {}
        for (number, token), some in of_token.items():
            told = settlement(token, [each.job.offset for each in some])
            calls.setdefault(number, []).append((told, some))
        lasts_ms: list[int] = []

        async def one(number: int, told: Sequence[tuple[Settlement, list[JobLease]]]) -> None:
            call = SettleJobs(worker=self._worker, settlements=tuple([each for each, _ in told]))
            place = TopicPartition(self.name, number)
            answers: Sequence[Settled] = await ask(self._routes, place, call, topic_id=info.topic_id)
            for (settled, some), answer in zip(told, answers, strict=True):
                gone = {offset for first, length in answer.lost for offset in range(first, first + length)}
                if gone and settled.kind == "extend":
                    lost.extend(some)
                else:
                    lost.extend(each for each in some if each.job.offset in gone)
                if not gone:
                    lasts_ms.append(answer.lease_ms)

        try:
            said = [(number, some) for number, told in calls.items() for some in portions(told, itemgetter(0))]
            await asyncio.gather(*(one(number, some) for number, some in said))
        except (TopicRecreatedError, UnknownTopicError):
            return list(leases), 0
        return lost, min(lasts_ms, default=0)

    # -- looking -------------------------------------------------------------------------------

    async def first_of(self, put: Sequence[JobId], dedupe_ids: Sequence[str]) -> list[JobId]:
        """The jobs that are there in place of these, which were put with these ``dedupe_id``s."""
        info = await self.info()
        rows: dict[int, list[int]] = {}
        for row, job in enumerate(put):
            rows.setdefault(job.partition, []).append(row)
        found = list(put)
        for number, theirs in rows.items():
            for begin in range(0, len(theirs), _FIND):
                some = theirs[begin : begin + _FIND]
                call = FindJobs(dedupe_ids=tuple([dedupe_ids[row] for row in some]))
                place = TopicPartition(self.name, number)
                firsts: Sequence[int | None] = await ask(self._routes, place, call, topic_id=info.topic_id)
                for row, first in zip(some, firsts, strict=True):
                    if first is not None:  # else the window is over already: it was this one's
                        found[row] = JobId(number, first)
        return found
