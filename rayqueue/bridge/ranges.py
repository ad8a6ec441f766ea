"""Ranges of offsets, cut to size and shared out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rayqueue.errors import InvalidInputError
from rayqueue.net.scan import Range, data_loss
from rayqueue.protocol.calls import Bounds
from rayqueue.protocol.topics import TopicPartition


def split(ranges: Sequence[Range], *, max_records: int | None = None, at_least: int = 0) -> list[Range]:
    """The same records in pieces: none larger than ``max_records``, and ``at_least`` so many if there are enough.

    Pieces of one range are of equal size, give or take a record. Empty ranges fall out.
    """
    kept = [each for each in ranges if len(each)]
    total = sum(map(len, kept))
    pieces: list[Range] = []
    for each in kept:
        count = 1
        if max_records is not None:
            count = -(-len(each) // max_records)
        if at_least > len(kept):
            count = max(count, round(at_least * len(each) / total))
        count = min(count, len(each))
        marks = [each.start + len(each) * number // count for number in range(count + 1)]
        pieces += [replace(each, start=start, end=end) for start, end in pairwise(marks)]
    return pieces


def share(backlog: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """How many records of each partition to take, ``limit`` in all, in proportion to what waits there.

    Every partition that has something moves, if the limit allows: a small one is not starved by a large one.
    """
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    taken: dict[TopicPartition, int] = {}
    left = limit
    # The smallest first: what it does not need of its share is the others'.
    waiting = sorted((count, partition) for partition, count in backlog.items() if count)
    rest = total
    for count, partition in waiting:
        fair = max(1, left * count // rest)
        taken[partition] = min(count, fair, left)
        left -= taken[partition]
        rest -= count
    return {partition: taken.get(partition, 0) for partition in backlog}


def clip(wanted: Range, bounds: Bounds, *, fail_on_data_loss: bool) -> Range:
    """The part of a range that the log still has. ``DataLossError`` if some of it is gone and that matters."""
    if wanted.start >= bounds.start or not len(wanted):
        return wanted
    if fail_on_data_loss:
        raise data_loss(wanted.topic_partition, wanted.start, bounds.start)
    return replace(wanted, start=min(bounds.start, wanted.end))


def check_end(partition: TopicPartition, wanted: int, bounds: Bounds) -> None:
    """``InvalidInputError`` if an offset is asked for that the log does not have yet."""
    if wanted > bounds.end:
        raise InvalidInputError(
            f"offset {wanted} of {partition} is past its end, {bounds.end}", offset=wanted, end=bounds.end
        )
