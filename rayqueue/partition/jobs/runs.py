"""Runs of ids: ``(first, count, lane)``, for jobs that follow each other."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from rayqueue.errors import InvariantBrokenError

Run = tuple[int, int, int]


class Part(NamedTuple):
    """Jobs of a grant whose ids, and places, follow each other."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    place: int
    deliveries: int
    lane: int
    want_result: bool
    forgiven: int = 0


def subtract(runs: list[Run], first: int, count: int) -> list[Run]:
    """Take what the runs have of these ids out of them. What they had, in the order of the runs."""
    end = first + count
    taken: list[Run] = []
    for at, (start, length, lane) in enumerate(runs):
        if start == first and length == count:  # nearly always
            del runs[at]
            return [(first, count, lane)]
        if start <= first and end <= start + length:  # inside of one: the others are not looked at
            runs[at : at + 1] = [
                each for each in ((start, first - start, lane), (end, start + length - end, lane)) if each[1]
            ]
            return [(first, count, lane)]
        if start < end and first < start + length:
            break
    else:
        return taken
    left: list[Run] = []
    for start, length, lane in runs:
        low, high = max(start, first), min(start + length, end)
        if low >= high:
            left.append((start, length, lane))
            continue
        taken.append((low, high - low, lane))
        if start < low:
            left.append((start, low - start, lane))
        if high < start + length:
            left.append((high, start + length - high, lane))
    runs[:] = left
    return taken


def without(first: int, count: int, taken: list[Run]) -> list[tuple[int, int]]:
    """What of these ids is in none of the runs, which are inside of them."""
    if len(taken) == 1 and taken[0][1] == count:
        return []
    left, at = [], first
    for start, length, _ in sorted(taken):
        if start < at:
            raise InvariantBrokenError(f"two runs of a lease have job {start}")
        if at < start:
            left.append((at, start - at))
        at = start + length
    if at < first + count:
        left.append((at, first + count - at))
    return left


def add(runs: list[tuple[int, int]], first: int, count: int) -> None:
    """Into runs that are kept in order and joined where they meet."""
    end, low = first + count, bisect_left(runs, (first,))
    if low and sum(runs[low - 1]) >= first:
        low -= 1
        first = runs[low][0]
    high = low
    while high < len(runs) and runs[high][0] <= end:
        end = max(end, sum(runs[high]))
        high += 1
    runs[low:high] = [(first, end - first)]


def holds(runs: list[tuple[int, int]], job_id: int) -> bool:
    return any(start <= job_id < start + length for start, length in runs)
