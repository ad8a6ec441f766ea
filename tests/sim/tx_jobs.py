"""Jobs in transactions: a queue in the transactions' world, who puts into it, and who works for it.

A worker leases jobs, and in one transaction sends a result of each, acknowledges
them and sometimes puts another one. It may pause until its lease is over, abort,
die anywhere, be replaced though it lives, or settle by its lease what it has
staged. ``JobBook`` is told what the queue's log says, and compares: nobody gets a
job that is not put yet, or that somebody else may be done with; each job has one
result.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.errors import ProducerFencedError
from rayqueue.log.store import Entry
from rayqueue.partition import Appended, Ended, Partition
from rayqueue.partition.commands import decode
from rayqueue.partition.jobs import commands as queue
from rayqueue.partition.transactions import commands as transactions
from rayqueue.partition.transactions.endings import transaction_of
from rayqueue.protocol.jobs import (
    JOB_HEADER,
    JobOptions,
    Leased,
    LeaseJobs,
    Settled,
    SettleJobs,
    Settlement,
    encode_options,
)
from rayqueue.protocol.transactions import StageAcks
from rayqueue.records import BATCH_TAG, BatchHeader, RecordBatch
from rayqueue.replica.partition_service import PartitionService
from tests.sim.ensemble import Ensemble
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.job_checker import JobLog
from tests.sim.served import PartitionNode
from tests.sim.tx_apps import _ENDED, TIMEOUT_MS, Feeding, TxProducer
from tests.sim.tx_checkers import TxChecker

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld

Key = tuple[int, int]

QUEUE = 3
"""The queue's number among the partitions."""
LEASE_MS = 1_000
DONE = b"done "
"""How results of jobs begin."""
_KEYS = (None, b"a", b"b")


def counted(runs: Any) -> set[int]:
    return {first + at for first, count in runs for at in range(count)}


class JobBook:
    """What the queue's log says of its jobs. ``fate`` is how a transaction has ended there."""

    def __init__(self, fate: Callable[[Key | None], bool | None]) -> None:
        self._fate = fate
        self._put: dict[int, tuple[bytes, Key | None]] = {}
        self._staged: dict[int, Key] = {}
        self._failed: set[int] = set()
        """Jobs that a transaction has staged and not done."""
        self._given: set[int] = set()
        self.done: dict[int, Key | None] = {}
        """By this transaction, or by an acknowledgement in none."""
        self.again = 0

    def put(self, job_id: int, value: bytes, key: Key | None) -> None:
        self._put[job_id] = value, key

    def given(self, ids: Collection[int]) -> None:
        for job_id in ids:
            key = self._put[job_id][1]
            if self._fate(key) is not True:
                raise BrokenError(Invariant.JOBS_PUT, f"job {job_id} of {key} is given out; ended: {self._fate(key)}")
            if job_id in self._staged:
                raise BrokenError(
                    Invariant.JOBS_DONE_ONCE,
                    f"job {job_id} is given out, and {self._staged[job_id]} may be done with it",
                )
            if job_id in self.done:
                raise BrokenError(Invariant.JOBS_DONE_ONCE, f"job {job_id} is given out after it was done")
            self.again += job_id in self._failed
            self._given.add(job_id)

    def staged(self, key: Key, ids: set[int], lost: set[int]) -> None:
        told = {job_id for job_id in lost if self._staged.get(job_id) == key}
        if told:
            raise BrokenError(Invariant.JOB_ANSWERS, f"{key} has staged {told}, and is told that they are lost")
        for job_id in ids - lost:
            if self._staged.setdefault(job_id, key) != key or job_id in self.done:
                whose = self.done.get(job_id, self._staged[job_id])
                raise BrokenError(Invariant.JOBS_DONE_ONCE, f"job {job_id} is staged by {key}, and is {whose}'s")

    def acknowledged(self, ids: set[int]) -> None:
        for job_id in ids - self.done.keys():
            self._finish(job_id, None)

    def ended(self, key: Key, *, commit: bool) -> None:
        for job_id in [job_id for job_id, whose in self._staged.items() if whose == key]:
            del self._staged[job_id]
            if commit:
                self._finish(job_id, key)
            else:
                self._failed.add(job_id)

    def _finish(self, job_id: int, key: Key | None) -> None:
        if job_id in self.done or job_id in self._staged:
            whose = self.done.get(job_id, self._staged.get(job_id))
            raise BrokenError(Invariant.JOBS_DONE_ONCE, f"job {job_id} is done by {key}, and by {whose}")
        self.done[job_id] = key

    def values(self) -> set[bytes]:
        """Of jobs that count."""
        return {value for value, key in self._put.values() if self._fate(key) is True}

    def left(self, dead: Collection[int]) -> set[int]:
        """Jobs that count and have come to no end."""
        counts = {job_id for job_id, (_, key) in self._put.items() if self._fate(key) is True}
        return counts - self.done.keys() - set(dead)

    def check_stuck(self, dead: Collection[int]) -> None:
        """After healing these had all the time that they need."""
        left = self.left(dead)
        never, failed = left - self._given, left & self._failed
        if failed:
            raise BrokenError(Invariant.JOBS_COME_AGAIN, f"these do not come again: {sorted(failed)[:5]}")
        if never:
            raise BrokenError(Invariant.JOBS_PUT, f"these are given to nobody: {sorted(never)[:5]}")

    def check(self, results: list[bytes], dead: Collection[int]) -> None:
        """``results``: those that readers of committed records have been given, at the end."""
        found = Counter(results)
        for job_id, key in self.done.items():
            value, expected = self._put[job_id][0], 0 if key is None else 1
            if found.pop(value, 0) != expected:
                raise BrokenError(Invariant.JOBS_DONE_ONCE, f"job {job_id}, done by {key}, has not {expected} results")
            if job_id in dead:
                raise BrokenError(Invariant.JOBS_DONE_ONCE, f"job {job_id}, done by {key}, is a dead letter")
        if found:
            raise BrokenError(Invariant.JOBS_DONE_ONCE, f"there are results of jobs that are not done: {found}")


class JobsChecker(TxChecker):
    """Of the queue's partition. Whether its jobs are in the states that the model gives is told last: what comes of a
    wrong one tells more."""

    def __init__(self, world: TxWorld, group: Ensemble[Any], number: int) -> None:
        super().__init__(world, group, number)
        self.book = JobBook(self.fate)
        self._log = JobLog(self.reads)
        self._otherwise: BrokenError | None = None

    def noted(self, entry: Entry, answer: Any) -> None:
        super().noted(entry, answer)
        if entry.payload[0] == BATCH_TAG:
            self._batch(entry.payload, answer)
        else:
            self._command(decode(entry.payload), answer)
        if self._otherwise is None:
            try:
                self._log.applied(entry, answer)
            except BrokenError as broken:
                self._otherwise = broken

    def _batch(self, payload: bytes, answer: Any) -> None:
        header = BatchHeader.parse(payload)
        if header.control or not isinstance(answer, Appended) or answer.duplicate:
            return
        for job_id, value in enumerate(RecordBatch.decode(payload).values(), answer.base_offset):
            self.book.put(job_id, value or b"", transaction_of(header))

    def _command(self, command: Any, answer: Any) -> None:
        book = self.book
        match command:
            case queue.LeaseJobs():
                for grant in answer:
                    if grant is not None:
                        book.given(counted((part.first, part.count) for part in grant.parts))
            case queue.SettleJobs():
                for told, settled in zip(command.settles, answer, strict=True):
                    if told.kind == "ack":
                        book.acknowledged(counted(told.jobs) - counted(settled.lost))
            case transactions.StageAcks() if isinstance(answer, Settled):
                key = command.producer_id, command.epoch
                book.staged(key, counted(command.jobs), counted(answer.lost))
            case transactions.EndTransaction() if isinstance(answer, Ended) and answer.was_open:
                book.ended((command.producer_id, command.epoch), commit=command.commit)

    @property
    def machine(self) -> Partition:
        return self.reads.machine

    def dead(self) -> list[int]:
        assert self.machine.jobs is not None
        return self.machine.jobs.dead.ids(0, 10_000)

    def check_end(self, results: list[bytes]) -> None:
        self.book.check(results, self.dead())
        if self._otherwise is not None:
            raise self._otherwise


class JobNode(PartitionNode):
    """A replica that moves jobs, once in a while."""

    service: PartitionService

    def started(self) -> None:
        super().started()
        self._maintain(self.life)

    def _maintain(self, life: int) -> None:
        if self.alive and self.life == life:
            self.call(lambda: self.service.jobs.maintain(0, 4_000))  # here little is much
            self.group.clock.after(0.5, partial(self._maintain, life))


class JobProducer(TxProducer):
    """One that puts jobs."""

    async def put(self, values: list[bytes]) -> None:
        keys = [self.rng.choice(_KEYS) for _ in values]
        delays = JobOptions(delay_ms=300)
        headers: Any = [[(JOB_HEADER, encode_options(delays))] for _ in values] if self.rng.random() < 0.3 else None
        await self.send(QUEUE, values, keys, headers)


class Putter(JobProducer, Feeding):
    """Puts jobs, in transactions or not."""

    transactional_id = "put"

    async def _feed(self, count: int) -> None:
        values = [b"job %d" % self.world.next_number() for _ in range(count)]
        if self.rng.random() < 0.3:
            await self.send_plain(QUEUE, values)
            self.world.promised(values, there=True)
            return
        try:
            if self.at is None:
                await self.init()
            await self.put(values[:1])
            if values[1:]:
                await self.put(values[1:])
            if self.rng.random() < 0.2 and not self.world.healing:
                await asyncio.sleep(self.rng.choice((0.5, 2 * TIMEOUT_MS / 1000)))
            self.world.promised(values, there=await self.end(commit=self.rng.random() < 0.7))
        except _ENDED:
            self.at = None


class Worker(JobProducer):
    """Leases jobs, and is done with them in transactions."""

    def __init__(self, world: TxWorld, name: str, rng: Random, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self._attempt = 0
        self._lost: set[int] = set()
        super().__init__(world, name, rng)

    async def _main(self) -> None:
        rng = self.rng
        while True:
            self._attempt += 1
            call = LeaseJobs(
                worker=self.name,
                attempt=self._attempt,
                max_jobs=rng.choice((1, 2, 4)),
                wait_ms=rng.choice((0, 300)),
                lease_ms=rng.choice((0, 300)),
            )
            leased: Leased = await self.ask(self.routes[QUEUE], call)
            if not leased.jobs:
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                continue
            try:
                if self.at is None:
                    await self.init()
                await self._work(leased)
            except ProducerFencedError:
                try:  # its transaction was aborted, or another one has its id
                    await self.init(resume=True)
                except _ENDED:
                    return
            except _ENDED:
                self.at = None

    async def _work(self, leased: Leased) -> None:
        world, rng = self.world, self.rng
        self._lost = set()
        mine = leased.jobs if world.healing else leased.jobs[: rng.randint(1, len(leased.jobs))]
        ids = [job.id for job in mine]
        work: list[Callable[[], Awaitable[object]]] = [
            partial(self.send, rng.randrange(1, world.partitions), [DONE + (job.value or b"")]) for job in mine
        ]
        work.append(partial(self._stage, leased.token, ids))
        if not world.healing and rng.random() < 0.3:
            work.append(partial(self._stage, leased.token, ids[:1]))  # again, in part
        if not world.healing and rng.random() < 0.4:
            work.append(partial(self.put, [b"more %d" % world.next_number()]))
        rng.shuffle(work)
        for each in work:
            await each()
            if rng.random() < 0.15 and not world.healing:
                await asyncio.sleep(rng.choice((0.05, 0.5, 1.5 * LEASE_MS / 1000, 2 * TIMEOUT_MS / 1000)))
        if not world.healing and rng.random() < 0.1:
            await self._settle("nack" if rng.random() < 0.5 else "ack", leased.token, ids)
        left = [job.id for job in leased.jobs[len(mine) :]]
        if left and rng.random() < 0.7:
            await self._settle(rng.choice(("nack", "release", "ack")), leased.token, left)
        await self.end(commit=not self._lost and (world.healing or rng.random() < 0.8))

    async def _stage(self, token: int, ids: list[int]) -> None:
        self.touched.add(QUEUE)
        call = StageAcks(
            producer_id=self.pair.producer_id,
            epoch=self.pair.epoch,
            worker=self.name,
            token=token,
            jobs=tuple([(each, 1) for each in ids]),
        )
        settled: Settled = await self.ask(self.routes[QUEUE], call)
        self._lost |= counted(settled.lost)

    async def _settle(self, kind: Any, token: int, ids: list[int]) -> None:
        told = Settlement(kind=kind, token=token, jobs=tuple([(each, 1) for each in ids]), delay_ms=0)
        await self.ask(self.routes[QUEUE], SettleJobs(worker=self.name, settlements=(told,)))
