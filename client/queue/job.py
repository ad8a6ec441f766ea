"""Job: one piece of work that a worker has a lease on, and how it ends.

Every job that was taken ends in one of these ways, and in one only: ``ack`` or
``done`` (it is finished, and never comes back), ``nack`` (it comes again, after
the back-off), ``reject`` (straight to the dead letters), or its lease runs out
(it comes again). While the object is in use its lease is extended beside the
application (``rayqueue.client.queue.leases``).
"""

from __future__ import annotations

import traceback as tracebacks
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgspec
from typing_extensions import Self

from rayqueue.client.arguments import check_duration
from rayqueue.client.queue.settling import texts
from rayqueue.client.twins import awaiting, blocking
from rayqueue.errors import InvalidInputError
from rayqueue.records import Headers, KeyT, ValueT

if TYPE_CHECKING:
    from rayqueue.client.queue.worker import Worker


class JobId(NamedTuple):
    """A job by its partition and the offset at which it was put. Its text is ``3-120``; it stays with the job for as
    long as there is one, also among the dead letters."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}-{self.offset}"

    @classmethod
    def of(cls, given: Any) -> JobId:
        """From its text, or itself. ``InvalidInputError`` if it is none."""
        if isinstance(given, JobId):
            return given
        if isinstance(given, str):
            partition, _, offset = given.partition("-")
            if partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit():
                return cls(int(partition), int(offset))
        raise InvalidInputError(f"a job's id is a text such as '3-120', not {given!r}")


def explained(error: BaseException) -> tuple[str, str]:
    """The reason and traceback of an exception, as ``nack`` and ``reject`` take them."""
    return texts(f"{type(error).__name__}: {said(error)}", "".join(tracebacks.format_exception(error)))


def said(error: BaseException) -> str:
    """Its text, as a reason may be."""
    try:
        return texts(str(error), "")[0]
    except Exception as broken:  # noqa: BLE001  # the application's: its job is not to be lost for that
        return f"(its text cannot be made: {type(broken).__name__})"


class Grant(NamedTuple):
    """The lease that some jobs came with: who has it, where, and the token that fences it."""

    worker: Worker
    partition: int
    token: int


class Job(msgspec.Struct, Generic[ValueT, KeyT], weakref=True, eq=False):
    """Made by ``JobQueue.get``, or by iteration over a queue.

    As a context manager it is acknowledged at the end of the block, unless it was ended in it; an exception becomes
    its ``nack``, with the traceback, and goes on.
    """

    # A worker makes one per job: a msgspec struct costs a third of what an ``__init__`` does.
    grant: Grant
    """Its lease. For the worker."""
    offset: int
    """Its place in its partition: with that, its id."""
    value: ValueT | None
    key: KeyT | None
    headers: Headers
    priority: int
    deliveries: int
    """This one included: 1 for a job that was never given out before."""
    put_ms: int
    """When it was put, in milliseconds since 1970, by the producer's clock."""
    wants_result: bool
    forgiven: int = 0
    """Deliveries before it was redriven, which do not count any more."""
    settled: bool = False
    """It was ended here, well or not."""

    @property
    def id(self) -> JobId:
        """Stays the same for all deliveries."""
        return JobId(self.grant.partition, self.offset)

    @property
    def attempt(self) -> int:
        """The delivery that this is since the job was put, or redriven: what ``max_deliveries`` bounds."""
        return self.deliveries - self.forgiven

    @property
    def token(self) -> int:
        """Fences this lease: another one for every delivery of the job."""
        return self.grant.token

    @property
    def _worker(self) -> Worker:
        return self.grant.worker

    @blocking
    async def ack(self, *, wait: bool = True) -> None:
        """It is finished, and never comes back. Returns once that is committed.

        ``LeaseLostError`` if somebody else was given the job meanwhile: then the other's work counts. With
        ``wait=False`` it returns at once, and ``JobQueue.flush`` waits, and raises what has failed.
        """
        await self._worker.settle((self,), "ack", wait=wait)

    ack_async = awaiting(ack)

    @blocking
    async def done(self, result: Any, *, wait: bool = True) -> None:
        """It is finished, with a result for those who wait for it (``put(..., want_result=True)``). Bytes, or what the
        queue's ``result_form`` writes; at most 64 KiB, or ``OversizedRecordError``. ``wait`` as for ``ack``."""
        await self._worker.settle((self,), "ack", result=self._worker.encoded_result(result), wait=wait)

    done_async = awaiting(done)

    @blocking
    async def nack(
        self, *, delay_ms: int | None = None, reason: str = "", traceback: str = "", wait: bool = True
    ) -> None:
        """It was not done, and is to be tried again: after ``delay_ms``, or after the queue's back-off. After
        ``max_deliveries`` it is dead. ``wait`` as for ``ack``."""
        if delay_ms is not None:
            check_duration("delay_ms", delay_ms)
        await self._worker.settle((self,), "nack", delay_ms=delay_ms, reason=reason, traceback=traceback, wait=wait)

    nack_async = awaiting(nack)

    @blocking
    async def reject(self, reason: str = "", *, traceback: str = "", wait: bool = True) -> None:
        """It can never be done: to the dead letters at once. ``wait`` as for ``ack``."""
        await self._worker.settle((self,), "reject", reason=reason, traceback=traceback, wait=wait)

    reject_async = awaiting(reject)

    @blocking
    async def extend(self, lease_ms: int | None = None) -> int:
        """Keep it for ``lease_ms`` from now, or for another lease of the queue. How long that is, in milliseconds: less
        where ``max_lease_ms`` ends it. ``LeaseLostError`` if somebody else was given the job meanwhile."""
        return await self._worker.extend(self, lease_ms)

    extend_async = awaiting(extend)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.settled:
            if error is None:
                self.ack()
            else:
                reason, told = explained(error)
                self.nack(reason=reason, traceback=told)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.settled:
            if error is None:
                await self.ack_async()
            else:
                reason, told = explained(error)
                await self.nack_async(reason=reason, traceback=told)

    def __del__(self) -> None:
        if not self.settled:
            self.grant.worker.dropped(self.grant, self.offset)

    def __repr__(self) -> str:
        ended = ", ended" if self.settled else ""
        return f"<Job {self._worker.name} {self.id}, delivery {self.deliveries}{ended}>"
