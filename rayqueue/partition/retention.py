"""Retention: the place up to which a log may be trimmed, by age, by size, by what its groups have read.

Looks at rows, of a store or of a snapshot, and at the groups' positions. Searches
cost a logarithm of the log's length per lane; nothing scans it.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayqueue.ids import Offset
from rayqueue.partition.groups import Group
from rayqueue.partition.lanes import committed_prefix
from rayqueue.partition.rows import Rows, bounds, find_batch, first_batch, lanes_of, load_log


def retention_point(
    rows: Rows,
    now_ms: int,
    retention_ms: int | None,
    retention_bytes: int | None,
    *,
    consumed: bool = False,
    groups: Iterable[Group] = (),
) -> Offset:
    """The offset that the log may be trimmed to: its start, or one after it.

    By time, every batch may go once nothing up to it is younger than
    ``retention_ms``. By bytes, the newest batch always stays. ``consumed`` lets go
    what all ``groups`` have committed; if there is none, that is nothing. What a
    pinned one has not committed stays in any case.
    """
    start, end = bounds(rows)
    point = start
    if retention_ms is not None and point < end:
        oldest = now_ms - retention_ms
        kept = first_batch(rows, point, end, lambda batch: batch.running_timestamp >= oldest)
        point = end if kept is None else max(point, kept.base_offset)
    if retention_bytes is not None and point < end:
        total_bytes = load_log(rows).total_bytes
        kept = first_batch(rows, point, end, lambda batch: total_bytes - batch.bytes_before <= retention_bytes)
        kept = kept or find_batch(rows, end - 1)
        if kept is not None:
            point = max(point, kept.base_offset)
    groups = list(groups)
    if consumed and groups and point < end:
        positions = [group.offsets for group in groups]
        point = max(point, committed_prefix(rows, start, end, lanes_of(rows), positions))
    pinned = [group.offsets for group in groups if group.pinned]
    if pinned and point > start:
        point = min(point, committed_prefix(rows, start, end, lanes_of(rows), pinned))
    return point
