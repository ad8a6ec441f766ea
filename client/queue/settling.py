"""Settlements that wait to be sent: what workers have said of their jobs, gathered into as few words as possible.

No I/O. An ``Ending`` is of any number of jobs of one lease, and acknowledgements
of the same lease become one settlement, of runs; whatever carries a reason or a
result stays a settlement of its own. One call per partition is under way at a
time, and carries all that waits, within the bounds of a call: ``MAX_JOBS`` jobs and
``CALL_BYTES``. Many callers share it, so nothing may go into it that a replica
refuses: texts are cut and made writable (``texts``), results are measured by
whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from rayqueue.errors import LeaseLostError, RayQueueError
from rayqueue.protocol.jobs import MAX_JOBS, Run, Settled, Settlement

if TYPE_CHECKING:
    from rayqueue.client.queue.job import Job

Kind = Literal["ack", "nack", "reject", "release"]
Told = Callable[["Ending", "RayQueueError | None"], None]
"""Called once, in the I/O thread: None if all of them were settled."""

MAX_REASON = 4000
MAX_TRACEBACK = 16_000
CALL_BYTES = 256 * 1024
"""Of settlements in one call, about: far below what a replica takes (``log.max_batch_bytes``)."""

_T = TypeVar("_T")
_grant = attrgetter("grant")


def texts(reason: str, traceback: str) -> tuple[str, str]:
    """As they may be sent: the beginning of a reason, the end of a traceback."""
    return _writable(reason[:MAX_REASON])[:MAX_REASON], _writable(traceback[-MAX_TRACEBACK:])[-MAX_TRACEBACK:]


def _writable(text: str) -> str:
    """A file's name that is no UTF-8 becomes a text with halves of surrogate pairs, which cannot be written. They are
    escaped."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class Ending(NamedTuple):
    """How deliveries of some jobs of one lease end."""

    kind: Kind
    token: int
    offsets: list[int]
    """In order, each once. Not more than a lease has: ``MAX_JOBS``."""
    told: Told
    delay_ms: int = -1
    reason: str = ""
    traceback: str = ""
    result: bytes | None = None

    @property
    def plain(self) -> bool:
        """It can share a settlement with others."""
        return self.result is None and not self.reason and not self.traceback and self.delay_ms < 0


def of_leases(jobs: Iterable[Job[Any, Any]]) -> dict[tuple[int, int], list[int]]:
    """The offsets of jobs by their partition and lease, in order, each once."""
    found: dict[tuple[int, int], list[int]] = {}
    for grant, some in groupby(jobs, _grant):  # those of one answer come together, nearly always
        offsets = [job.offset for job in some]
        where = grant.partition, grant.token
        found[where] = found[where] + offsets if where in found else offsets
    for where, offsets in found.items():
        if not _follow(offsets):
            found[where] = sorted(set(offsets))
    return found


def add(endings: list[Ending], new: Ending) -> None:
    """To those that wait. One that goes on where the last one ends, and has no more to say, becomes a part of it: a
    worker that does its jobs one by one leaves nothing behind for each."""
    if endings:
        last = endings[-1]
        alike = last.token == new.token and last.kind == new.kind and last.told == new.told
        if alike and last.offsets[-1] < new.offsets[0] and last.plain and new.plain:
            last.offsets.extend(new.offsets)
            return
    endings.append(new)


class Gathered(NamedTuple):
    settlement: Settlement
    endings: Sequence[Ending]


def gather(endings: Sequence[Ending]) -> list[Gathered]:
    """The settlements that say these."""
    found: list[Gathered] = []
    shared: dict[tuple[str, int], list[Ending]] = {}
    for each in endings:
        if each.plain:
            shared.setdefault((each.kind, each.token), []).append(each)
        else:
            found.append(Gathered(_settlement(each, each.offsets), (each,)))
    for alike in shared.values():
        offsets = alike[0].offsets if len(alike) == 1 else sorted({at for each in alike for at in each.offsets})
        found.append(Gathered(_settlement(alike[0], offsets), alike))
    return found


def portions(said: Sequence[_T], settlement: Callable[[_T], Settlement]) -> Iterator[Sequence[_T]]:
    """As many at a time as one call may have: ``MAX_JOBS`` jobs, and ``CALL_BYTES`` unless a single one has more.
    ``settlement``: that of each."""
    some: list[_T] = []
    jobs = size_bytes = 0
    for each in said:
        told = settlement(each)
        their_jobs, their_bytes = sum([count for _, count in told.jobs]), _size_bytes(told)
        if some and (jobs + their_jobs > MAX_JOBS or size_bytes + their_bytes > CALL_BYTES):
            yield some
            some, jobs, size_bytes = [], 0, 0
        some.append(each)
        jobs += their_jobs
        size_bytes += their_bytes
    if some:
        yield some


def _size_bytes(told: Settlement) -> int:
    """At most so many, written as MessagePack: with the names of its fields, and its numbers."""
    texts_bytes = sum([len(text) * (1 if text.isascii() else 4) for text in (told.reason, told.traceback)])
    return 128 + 15 * len(told.jobs) + texts_bytes + len(told.result or b"")


def itself(told: Settlement) -> Settlement:
    return told


def _settlement(ending: Ending, offsets: Sequence[int]) -> Settlement:
    return Settlement(
        kind=ending.kind,
        token=ending.token,
        jobs=runs_of(offsets),
        delay_ms=ending.delay_ms,
        reason=ending.reason,
        traceback=ending.traceback,
        result=ending.result,
    )


def runs_of(offsets: Sequence[int]) -> tuple[Run, ...]:
    """Ids in order, as runs of those that follow each other."""
    if offsets and len(offsets) <= MAX_JOBS and _follow(offsets):
        return ((offsets[0], len(offsets)),)
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][0] + found[-1][1] and found[-1][1] < MAX_JOBS:
            found[-1][1] += 1
        else:
            found.append([offset, 1])
    return tuple((first, count) for first, count in found)


def _follow(offsets: Sequence[int]) -> bool:
    """They are in order, without a gap."""
    first, count = offsets[0], len(offsets)
    return offsets[-1] - first == count - 1 and list(offsets) == list(range(first, first + count))


def tell(gathered: Sequence[Gathered], answers: Sequence[Settled], queue: str) -> None:
    """Whoever waits for these learns what became of them."""
    for (settlement, endings), answer in zip(gathered, answers, strict=True):
        gone = {offset for first, count in answer.lost for offset in range(first, first + count)}
        for each in endings:
            lost = [offset for offset in each.offsets if offset in gone] if gone else []
            each.told(each, _lost(queue, settlement.kind, each, lost) if lost else None)


def tell_failure(gathered: Iterable[Gathered], error: RayQueueError) -> None:
    for _, endings in gathered:
        for each in endings:
            each.told(each, error)


def _lost(queue: str, kind: str, ending: Ending, lost: list[int]) -> LeaseLostError:
    others = f" (and of {len(lost) - 1} more)" if len(lost) > 1 else ""
    return LeaseLostError(
        f"the lease of job {lost[0]} of {queue}{others} has ended and somebody else was given it since, or it is gone; "
        f"this {kind} does not count",
        queue=queue,
        offset=lost[0],
        token=ending.token,
    )


class Countdown:
    """Resolves a future once all of several endings are told; with the first error."""

    __slots__ = ("_answer", "_error", "_left")

    def __init__(self, left: int, answer: Future[None]) -> None:
        self._left = left
        self._answer = answer
        self._error: RayQueueError | None = None

    def __call__(self, _: Ending, error: RayQueueError | None) -> None:
        self._left -= 1
        self._error = self._error or error
        if self._left:
            return
        with suppress(InvalidStateError):  # whoever waited for it has given up, in another thread
            if self._error is None:
                self._answer.set_result(None)
            else:
                self._answer.set_exception(self._error)
