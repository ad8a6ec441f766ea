"""A worker: one handle of a queue that takes jobs, and everything that goes on beside the application for it.

Application threads and event loops ask it for jobs and tell it how they ended;
what concerns connections happens in the I/O thread. There it

- takes jobs as ``rayqueue.client.queue.takes`` plans it, and keeps those that
  came early in a ``buffer``; what the application does not come to soon is
  handed back as if it had not been delivered;
- sends what became of jobs, gathered per partition (``settling``);
- extends the leases of jobs in hand (``leases``).

Its name is drawn anew for every worker, and says on which Ray node it runs. When
its process dies its connections break, and the partitions end its leases at once;
so they do when Ray reports the node dead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.client.io import IoThread
from rayqueue.client.joining import own_node
from rayqueue.client.queue.buffer import LINGER_S, Buffer, Waiter
from rayqueue.client.queue.job import Grant, Job, JobId
from rayqueue.client.queue.leases import Leases
from rayqueue.client.queue.settling import (
    Countdown,
    Ending,
    Kind,
    Told,
    add,
    gather,
    itself,
    of_leases,
    portions,
    tell,
    tell_failure,
    texts,
)
from rayqueue.client.queue.takes import Ask, Takes
from rayqueue.client.twins import outcome, rest
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    LeaseLostError,
    OutcomeUnknownError,
    RayQueueError,
    TransportError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.net.interfaces import ask, same_topic
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import (
    MAX_JOBS,
    EndWorker,
    Leased,
    LeaseJobs,
    Settled,
    SettleJobs,
    Settlement,
    WithdrawRequest,
    worker_name,
)
from rayqueue.protocol.jobs import Job as WireJob
from rayqueue.protocol.topics import TopicInfo, TopicPartition

if TYPE_CHECKING:
    from rayqueue.client.routes import ClusterRoutes

_log = logging.getLogger(__name__)

PARK_MS = 10_000
"""How long a take waits in a partition before it is renewed."""
_LATE_S = 0.05
"""A timer that is so late tells that this process was not given a processor."""
_FOREVER_S = 3600.0
_LET_GO = "the worker has let go of it without ack, nack or reject"
_END_MS = 2000

Decode = Callable[[WireJob, int], tuple[Any, Any]]
"""The value and key of a job of this partition. ``DeserializationError`` if they cannot be read."""


class Worker:
    """Made by any thread. Methods that begin with an underscore run in the I/O thread, unless they say otherwise."""

    def __init__(
        self,
        io: IoThread,
        routes: ClusterRoutes,
        settings: Settings,
        info: TopicInfo,
        decode: Decode,
        *,
        encode_result: Callable[[Any], bytes],
        lease_ms: int = 0,
    ) -> None:
        self.name = info.name
        self.id = worker_name(uuid.uuid4().hex, own_node())
        self.encoded_result = encode_result
        self._io = io
        self._routes = routes
        self._settings = settings
        self.topic_id = info.topic_id
        self._decode = decode
        self._lease_ms = lease_ms
        self._rng = Random()  # noqa: S311  # jitter, and where to begin
        self._attempts = count(1)
        self._buffer = Buffer(settings.consumer.prefetch_bytes)
        # Shared with application threads, under the lock.
        self._lock = threading.Lock()
        self._endings: dict[int, list[Ending]] = {}
        self._kicked = False
        self._closed = False
        self._error: RayQueueError | None = None
        self._unreported: RayQueueError | None = None
        # The I/O thread's.
        self._takes = Takes(len(info.partitions), self._rng.randrange(len(info.partitions)))
        self._leases = [Leases() for _ in info.partitions]
        self._parked: dict[int, int] = {}
        """Partition to the attempt by which a take waits there."""
        self._withdraw_s: float | None = None
        self._looked_s = time.monotonic()
        self._settling: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    # -- what applications ask, from any thread -----------------------------------------------

    async def get(self, most: int, timeout_s: float | None) -> list[Job[Any, Any]]:
        """Up to so many jobs; [] if none came in time."""
        now_s = time.monotonic()
        self._check()
        found, low = self._buffer.ask(most, now_s)
        if low:
            self._kick()
        if not isinstance(found, Waiter):
            return found
        waiter = found
        deadline_s = None if timeout_s is None else now_s + timeout_s
        gave: list[Job[Any, Any]] = []
        try:
            while not waiter.jobs and self._error is None and not self._closed:
                left_s = _FOREVER_S if deadline_s is None else deadline_s - time.monotonic()
                if not await rest(waiter.wakeup, max(0.0, left_s)) and deadline_s is not None:
                    break
            gave = self._buffer.leave(waiter, time.monotonic())
        finally:
            if not gave:  # it has given up, or was cancelled
                self._release(self._buffer.leave(waiter, time.monotonic()))
                self._kick()  # nobody waits: what is parked for it is not wanted any more
        if not gave:
            self._check()
        return gave

    async def settle(
        self,
        jobs: Sequence[Job[Any, Any]],
        kind: Kind,
        *,
        delay_ms: int | None = None,
        reason: str = "",
        traceback: str = "",
        result: bytes | None = None,
        wait: bool = True,
    ) -> None:
        """Say how these ended, and wait until that is committed. Raises the first ``LeaseLostError`` of them; without
        ``wait``, ``flush`` does."""
        if not jobs:
            return
        by_lease = of_leases(jobs)
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        told: Told = Countdown(len(by_lease), answer) if wait else self._heard_later
        more = -1 if delay_ms is None else delay_ms, *texts(reason, traceback), result
        self._end(jobs, [(where, Ending(kind, token, some, told, *more)) for (where, token), some in by_lease.items()])
        if wait:
            with self._buffer.blocked():
                await outcome(answer)

    def settle_later(
        self,
        job: Job[Any, Any],
        kind: Kind,
        *,
        reason: str = "",
        traceback: str = "",
        result: bytes | None = None,
    ) -> None:
        """The same, and nobody waits for it. A failure is logged: the job comes again."""
        grant = job.grant
        ending = Ending(kind, grant.token, [job.offset], self._unheard, -1, *texts(reason, traceback), result)
        self._end((job,), ((grant.partition, ending),))

    def _end(self, jobs: Iterable[Job[Any, Any]], endings: Iterable[tuple[int, Ending]]) -> None:
        """From any thread."""
        for job in jobs:
            job.settled = True
        with self._lock:
            for partition, ending in endings:
                add(self._endings.setdefault(partition, []), ending)
        self._kick()

    def dropped(self, grant: Grant, offset: int, reason: str = _LET_GO) -> None:
        """The application has let go of a job without ending it. Called by the garbage collector, in any thread: it
        must take no lock."""
        if not self._closed and self._io.usable:
            self._io.loop.call_soon_threadsafe(self._dropped, grant, offset, reason)

    def _dropped(self, grant: Grant, offset: int, reason: str) -> None:
        with self._lock:
            endings = self._endings.setdefault(grant.partition, [])
            endings.append(Ending("nack", grant.token, [offset], self._unheard, -1, *texts(reason, "")))
        self._pump()

    def _unheard(self, ending: Ending, error: RayQueueError | None) -> None:
        """Nobody waits for it."""
        if error is not None:
            level = logging.WARNING if ending.kind == "ack" else logging.INFO  # work was done that may be done again
            jobs = f"job {ending.offsets[0]}" if len(ending.offsets) == 1 else f"{len(ending.offsets)} jobs"
            _log.log(level, "%s of %s of %s had no effect: %s", ending.kind, jobs, self.name, error)

    def _heard_later(self, ending: Ending, error: RayQueueError | None) -> None:
        """The next ``flush`` raises it."""
        self._unheard(ending, error)
        self._unreported = self._unreported or error

    async def extend(self, job: Job[Any, Any], lease_ms: int | None) -> int:
        """Until when, in milliseconds from now."""
        return await outcome(self._io.run(self._extend_one(job.id, job.token, lease_ms or 0)))

    async def flush(self) -> None:
        """Until all that was said of jobs has been answered. Raises the first failure of what nobody has waited for."""
        with self._buffer.blocked():
            await outcome(self._io.run(self._flushed()))
        failed, self._unreported = self._unreported, None
        if failed is not None:
            raise failed

    def close_later(self) -> None:
        """The handle was let go without ``close``: its leases end. From any thread, without waiting."""
        if not self._closed and self._io.usable:
            self._closed = True
            self._io.loop.call_soon_threadsafe(lambda: self._spawn(self._close()))

    async def close(self) -> None:
        """Send what waits to be sent, and hand back all that is in hand."""
        if not self._closed:
            self._closed = True
            self._buffer.wake()
            if self._io.usable:
                await outcome(self._io.run(self._close()))

    def _check(self) -> None:
        """From any thread."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError(f"this handle of queue {self.name} was closed")

    def _kick(self) -> None:
        """From any thread: there is something to do in the I/O thread."""
        if not self._kicked:
            self._kicked = True
            try:
                self._io.loop.call_soon_threadsafe(self._pump)
            except RuntimeError:
                raise ClosedError("this process has ended its connections, because it exits") from None

    # -- the I/O thread -------------------------------------------------------------------------

    def handed_over(self, number: int, token: int, offsets: Iterable[int]) -> None:
        """A transaction has these: they are in hand no more, and nobody else's until it ends."""
        self._leases[number].ended(token, offsets)
        self._arm(time.monotonic())

    def _pump(self) -> None:
        """Do whatever there is to do now."""
        self._kicked = False
        now_s = time.monotonic()
        with self._lock:
            # One call is under way per partition: what is said meanwhile waits, and goes together.
            endings = {each: self._endings.pop(each) for each in self._endings.keys() - self._settling.keys()}
        waited_for, wanted = self._buffer.wanted(now_s)
        if waited_for or not self._parked:
            self._withdraw_s = None
        elif self._withdraw_s is None:
            self._withdraw_s = now_s + LINGER_S
        for number, some in endings.items():
            for each in some:
                self._leases[number].ended(each.token, each.offsets)
            self._settling[number] = self._spawn(self._settle(number, some))
        if wanted > 0 and not self._closed and self._error is None:
            # Half of what an answer may have: a few that are larger than the last ones fit too.
            most = min(MAX_JOBS, self._buffer.at_once(self._settings.consumer.fetch_bytes // 2))
            for take in self._takes.plan(min(wanted, MAX_JOBS), now_s, park=waited_for > 0, most=most):
                self._spawn(self._take(take))
        self._arm(now_s)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, number: int, call: Call, **patience_ms: int) -> Any:
        place = TopicPartition(self.name, number)
        return await ask(self._routes, place, call, topic_id=self.topic_id, **patience_ms)

    # -- taking --------------------------------------------------------------------------------

    async def _take(self, wanted: Ask) -> None:
        number, wait_ms, attempt = wanted.partition, PARK_MS if wanted.parked else 0, next(self._attempts)
        backoff: Backoff | None = None
        while True:
            try:
                leased = await self._lease(wanted, attempt, wait_ms)
                break
            except RayQueueError as error:
                self._takes.failed(number)
                # The connection broke: their leases may have ended.
                self._release(self._buffer.hand_back(time.monotonic(), of=number))
                if not error.retriable:
                    self._give_up(error)
                    return
            # There may be a lease that nobody knows of. The same request is answered with it; if its jobs are not
            # wanted any more they go to others.
            self._pump()
            backoff, wait_ms = backoff or Backoff(self._settings.client, self._rng), 0
            await asyncio.sleep(backoff.pause_s())
            while self._buffer.wanted(time.monotonic())[1] <= 0:
                if await self._given_back(number, attempt):
                    self._takes.resumed(number)
                    self._pump()
                    return
                await asyncio.sleep(backoff.pause_s())
        now_s = time.monotonic()
        self._takes.answered(number, int(len(leased.jobs) >= wanted.count), now_s)
        if leased.jobs:
            self._leases[number].add(leased.token, leased.lease_ms, {each.id for each in leased.jobs}, now_s)
            self._received(number, leased, now_s)
        self._pump()
        await self._look_for_partitions(now_s)

    async def _lease(self, wanted: Ask, attempt: int, wait_ms: int) -> Leased:
        if wait_ms:
            self._parked[wanted.partition] = attempt
        call = LeaseJobs(
            worker=self.id,
            attempt=attempt,
            max_jobs=wanted.count,
            max_bytes=self._settings.consumer.fetch_bytes,
            wait_ms=wait_ms,
            lease_ms=self._lease_ms,
        )
        try:
            leased: Leased = await self._ask(wanted.partition, call, may_take_ms=wait_ms)
        finally:
            self._parked.pop(wanted.partition, None)
        return leased

    async def _withdraw(self, number: int, attempt: int) -> None:
        """Nobody wants what this take may bring. It is answered, by the leader, with nothing."""
        try:
            await self._ask(number, WithdrawRequest(worker=self.id, attempt=attempt), timeout_ms=_END_MS)
        except RayQueueError as error:
            _log.debug("a take of %s-%d was not withdrawn: %s", self.name, number, error)

    async def _given_back(self, number: int, attempt: int) -> bool:
        """Whether this request has no lease any more."""
        try:
            await self._ask(number, WithdrawRequest(worker=self.id, attempt=attempt, give_back=True))
        except RayQueueError as error:
            _log.debug("a lease of %s-%d may be there that nobody knows of: %s", self.name, number, error)
            return False
        return True

    async def _look_for_partitions(self, now_s: float) -> None:
        """Now and then: the queue may have been given more."""
        if now_s - self._looked_s < self._settings.consumer.refresh_ms / 1000:
            return
        self._looked_s = now_s
        try:
            info = same_topic(await self._routes.topic(self.name, refresh=True), self.topic_id)
        except RayQueueError as error:
            _log.info("the partitions of %s were not looked up: %s", self.name, error)
            return
        if len(info.partitions) > len(self._takes):
            self._leases += [Leases() for _ in range(len(info.partitions) - len(self._leases))]
            self._takes.grow(len(info.partitions))
            self._pump()

    def _give_up(self, error: RayQueueError) -> None:
        self._error = error
        self._buffer.wake()

    def _received(self, number: int, leased: Leased, now_s: float) -> None:
        jobs = self._made(Grant(self, number, leased.token), leased.jobs)
        if jobs:
            size_bytes = sum([len(each.value or b"") + len(each.key or b"") for each in leased.jobs])
            self._buffer.add(jobs, size_bytes, now_s)

    def _made(self, grant: Grant, wire: Sequence[WireJob]) -> list[Job[Any, Any]]:
        """Those whose value and key can be read. The others are dead letters: no delivery can change them."""
        made: list[Job[Any, Any]] = []
        for each in wire:
            try:
                value, key = self._decode(each, grant.partition)
            except RayQueueError as error:
                with self._lock:
                    endings = self._endings.setdefault(grant.partition, [])
                    ending = Ending("reject", grant.token, [each.id], self._unheard, -1, *texts(str(error), ""))
                    endings.append(ending)
            else:
                made.append(
                    Job(
                        grant,
                        each.id,
                        value,
                        key,
                        each.headers,
                        each.lane,
                        each.deliveries,
                        each.timestamp,
                        each.want_result,
                        each.forgiven,
                    )
                )
        return made

    def _release(self, jobs: Sequence[Job[Any, Any]]) -> None:
        """From any thread: nobody has begun with these."""
        if jobs:
            by_lease = of_leases(jobs).items()
            endings = [(where, Ending("release", token, some, self._unheard)) for (where, token), some in by_lease]
            self._end(jobs, endings)

    # -- settling --------------------------------------------------------------------------------

    async def _settle(self, number: int, endings: list[Ending]) -> None:
        """Everybody is told, whatever happens: somebody waits, or has a job that he thinks is done."""
        untold = deque(portions(gather(endings), attrgetter("settlement")))
        try:
            while untold:
                some = untold[0]
                failed: RayQueueError | None = None
                try:
                    answers = await self._say(number, [each.settlement for each in some])
                except InvalidInputError as error:
                    if len(some) > 1:  # it is about one of them: the others are not to suffer for it
                        middle = len(some) // 2
                        untold.popleft()
                        untold.extendleft((some[middle:], some[:middle]))
                        continue
                    failed = error
                except RayQueueError as error:
                    failed = error
                except Exception as error:  # noqa: BLE001  # whatever it is, somebody waits
                    _log.exception("what became of jobs of %s-%d could not be said", self.name, number)
                    failed = OutcomeUnknownError(f"this could not be said of a job of {self.name}: {error!r}")
                untold.popleft()
                if failed is None:
                    tell(some, answers, f"{self.name}-{number}")
                else:
                    tell_failure(some, failed)
        finally:
            for some in untold:
                tell_failure(some, OutcomeUnknownError(f"this handle of queue {self.name} was closed; outcome unknown"))
            del self._settling[number]
            if number in self._endings:
                self._pump()

    async def _say(self, number: int, settlements: Sequence[Settlement]) -> Sequence[Settled]:
        call = SettleJobs(worker=self.id, settlements=tuple(settlements), attached=True)
        answers: Sequence[Settled] = await self._ask(number, call)
        if len(answers) != len(settlements):
            raise TransportError(f"{len(answers)} answers to {len(settlements)} settlements of {self.name}-{number}")
        return answers

    async def _flushed(self) -> None:
        self._pump()
        for _ in range(2):  # what is under way, and then all that waited behind it
            if self._settling:
                await asyncio.wait(list(self._settling.values()))

    # -- extending -------------------------------------------------------------------------------

    async def _extend(self, number: int, due: Sequence[Settlement]) -> None:
        leases = self._leases[number]
        try:
            answers = await self._say(number, due)
        except RayQueueError as error:
            _log.info("leases of %s-%d could not be extended, trying again: %s", self.name, number, error)
            for each in due:
                leases.not_answered(each.token, time.monotonic())
        else:
            now_s = time.monotonic()
            for each, answer in zip(due, answers, strict=True):
                if answer.lost:
                    leases.lost(each.token)
                else:
                    leases.extended(each.token, answer.lease_ms, now_s)
        self._arm(time.monotonic())

    async def _extend_one(self, job_id: JobId, token: int, lease_ms: int) -> int:
        asked = Settlement(kind="extend", token=token, jobs=((job_id.offset, 1),), lease_ms=lease_ms)
        (answer,) = await self._say(job_id.partition, (asked,))
        if answer.lost:
            raise LeaseLostError(
                f"the lease of job {job_id} of {self.name} has ended and somebody else was given it since, or it is "
                "gone",
                queue=self.name,
                job=str(job_id),
            )
        self._leases[job_id.partition].extended(token, answer.lease_ms, time.monotonic())
        return answer.lease_ms

    # -- time ------------------------------------------------------------------------------------

    def _arm(self, now_s: float) -> None:
        """Wake up when the next thing is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [due_s for each in self._leases if (due_s := each.next_due_s()) is not None]
        due += [due_s for due_s in (self._buffer.due_s(), self._withdraw_s) if due_s is not None]
        if due and not self._closed:
            self._due_s = max(now_s, min(due))
            self._timer = asyncio.get_running_loop().call_later(self._due_s - now_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if now_s - self._due_s < _LATE_S:
            self._release(self._buffer.hand_back(now_s))
        else:
            self._buffer.spare(now_s)
        if self._withdraw_s is not None and self._withdraw_s <= now_s:
            self._withdraw_s = None
            parked, self._parked = self._parked, {}
            for number, attempt in parked.items():
                self._spawn(self._withdraw(number, attempt))
        for number, leases in enumerate(self._leases):
            due = leases.due(now_s)
            if due:
                for each in due:
                    leases.not_answered(each.token, now_s)  # not twice while this is under way
                for some in portions(due, itself):
                    self._spawn(self._extend(number, some))
        self._pump()

    # -- the end ---------------------------------------------------------------------------------

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._release(self._buffer.hand_back(time.monotonic(), everything=True))
        await self._flushed()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        held = {number for number, each in enumerate(self._leases) if len(each)}
        await asyncio.gather(*[self._end_in(number) for number in sorted({*held, *self._takes.under_way})])

    async def _end_in(self, number: int) -> None:
        try:
            await self._ask(number, EndWorker(worker=self.id), timeout_ms=_END_MS)
        except RayQueueError as error:
            _log.info("the leases of a worker of %s-%d end by their time: %s", self.name, number, error)
