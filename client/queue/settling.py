"""Settlements that wait to be sent: what workers have said of their jobs, gathered into as few words as possible.

No I/O. Acknowledgements of jobs that follow each other in one lease become one
run; whatever carries a reason or a result stays a settlement of its own. One
call per partition is under way at a time, and carries all that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from rayqueue.errors import LeaseLostError, RayQueueError
from rayqueue.protocol.jobs import MAX_JOBS, Run, Settled, Settlement

Kind = Literal["ack", "nack", "reject", "release"]
Told = Callable[["RayQueueError | None"], None]
"""Called once, in the I/O thread: None if it was settled."""


class Ending(NamedTuple):
    """How one delivery of a job ends."""

    kind: Kind
    token: int
    offset: int
    told: Told
    delay_ms: int = -1
    reason: str = ""
    traceback: str = ""
    result: bytes | None = None

    @property
    def plain(self) -> bool:
        """It can share a settlement with others."""
        return self.result is None and not self.reason and not self.traceback and self.delay_ms < 0


class Gathered(NamedTuple):
    settlement: Settlement
    endings: Sequence[Ending]


def gather(endings: Sequence[Ending]) -> list[Gathered]:
    """The settlements that say these. At most ``MAX_JOBS`` endings."""
    found: list[Gathered] = []
    shared: dict[tuple[str, int], list[Ending]] = {}
    for each in endings:
        if each.plain:
            shared.setdefault((each.kind, each.token), []).append(each)
        else:
            found.append(Gathered(_settlement(each, ((each.offset, 1),)), (each,)))
    for alike in shared.values():
        alike.sort(key=lambda each: each.offset)
        found.append(Gathered(_settlement(alike[0], runs_of(each.offset for each in alike)), alike))
    return found


def _settlement(ending: Ending, runs: tuple[Run, ...]) -> Settlement:
    return Settlement(
        kind=ending.kind,
        token=ending.token,
        jobs=runs,
        delay_ms=ending.delay_ms,
        reason=ending.reason,
        traceback=ending.traceback,
        result=ending.result,
    )


def runs_of(offsets: Iterable[int]) -> tuple[Run, ...]:
    """Ids in order, as runs of those that follow each other."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][0] + found[-1][1] and found[-1][1] < MAX_JOBS:
            found[-1][1] += 1
        else:
            found.append([offset, 1])
    return tuple((first, count) for first, count in found)


def tell(gathered: Sequence[Gathered], answers: Sequence[Settled], queue: str) -> None:
    """Whoever waits for these learns what became of them."""
    for (settlement, endings), answer in zip(gathered, answers, strict=True):
        lost = {offset for first, count in answer.lost for offset in range(first, first + count)}
        for each in endings:
            each.told(_lost(queue, settlement.kind, each) if each.offset in lost else None)


def tell_failure(endings: Iterable[Ending], error: RayQueueError) -> None:
    for each in endings:
        each.told(error)


def _lost(queue: str, kind: str, ending: Ending) -> LeaseLostError:
    return LeaseLostError(
        f"the lease of job {ending.offset} of {queue} has ended and somebody else was given it since, or it is gone; "
        f"this {kind} does not count",
        queue=queue,
        offset=ending.offset,
        token=ending.token,
    )
