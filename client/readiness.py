"""Waiting for a topic's partitions to be led, for no longer than that can come true.

It ends in one of three ways: each partition has a leader; for ``stall_s`` no
further one got one; or a majority of some partition's replicas say that they
cannot serve (a full disk, lost data), which waiting does not mend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rayqueue.errors import RayQueueError, StorageError, TopicNotReadyError
from rayqueue.net.interfaces import Routes
from rayqueue.net.requests import repeated
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicPartition

Progress = Callable[[int, int], None]
"""Told how many partitions have a leader, or replicas have been closed, of how many. It may be called in another thread
than the caller's."""

Statuses = Callable[[], Awaitable[Mapping[tuple[str, str], Any]]]
"""What each replica of the topic says of itself, by Raft group and id: a ``Status``, or why there is none."""

_LOOK_S = 2.0


def _at_once(error: RayQueueError, _: float) -> float:
    """Whoever watches decides when that is enough."""
    if not error.retriable:
        raise error
    return 0.0


async def wait_for_leaders(
    routes: Routes,
    info: TopicInfo,
    partitions: Sequence[PartitionInfo],
    statuses: Statuses,
    *,
    stall_s: float,
    on_progress: Progress | None = None,
    look_s: float = _LOOK_S,
) -> None:
    """``TopicNotReadyError`` if it is given up; ``details["led"]`` says how many partitions have a leader."""
    led: set[int] = set()
    progress_s = time.monotonic()

    async def lead(partition: PartitionInfo) -> None:
        nonlocal progress_s
        route = await routes.partition(TopicPartition(info.name, partition.number))
        await repeated(route.leader, _at_once)
        led.add(partition.number)
        progress_s = time.monotonic()
        if on_progress is not None:
            on_progress(len(led), len(partitions))

    leading = asyncio.gather(*map(lead, partitions))
    hopeless_before: set[int] = set()
    try:
        while not (await asyncio.wait((leading,), timeout=look_s))[0]:
            missing = [partition for partition in partitions if partition.number not in led]
            told = await statuses()
            hopeless = {each.number for each in missing if _is_hopeless(each, told)}
            # Twice in a row: what was just started may be on its way.
            if hopeless & hopeless_before or time.monotonic() - progress_s > stall_s:
                raise _not_ready(info, partitions, missing, told)
            hopeless_before = hopeless
        await leading
    finally:
        if not leading.done():
            leading.cancel()
            with suppress(asyncio.CancelledError, RayQueueError):
                await leading


def _is_hopeless(partition: PartitionInfo, told: Mapping[tuple[str, str], Any]) -> bool:
    stuck = sum(
        _stuck(told.get((partition.group_id, replica.replica_id))) is not None for replica in partition.replicas
    )
    return len(partition.replicas) - stuck < len(partition.replicas) // 2 + 1


def _stuck(status: Any) -> str | None:
    """Why this replica cannot serve, if waiting does not mend it."""
    if isinstance(status, StorageError):
        return f"{status.code}: {status}"
    if isinstance(status, Exception) or status is None:
        return None
    return str(status.damaged) if status.damaged else "disk_full: its disk is full" if status.read_only else None


def _not_ready(
    info: TopicInfo,
    partitions: Sequence[PartitionInfo],
    missing: Sequence[PartitionInfo],
    told: Mapping[tuple[str, str], Any],
) -> TopicNotReadyError:
    first = missing[0]
    why: dict[str, str] = {}
    for replica in first.replicas:
        status = told.get((first.group_id, replica.replica_id))
        plain = str(status) if isinstance(status, Exception) else "runs and has no majority"
        why[f"{replica.replica_id} on {replica.broker}"] = _stuck(status) or plain
    reasons = "; ".join(f"{who}: {each}" for who, each in why.items())
    return TopicNotReadyError(
        f"{len(missing)} of {len(partitions)} partitions of {info.name!r} have no leader; {info.name}-{first.number}: "
        f"{reasons}",
        topic=info.name,
        topic_id=info.topic_id,
        led=len(partitions) - len(missing),
        missing=sorted({replica.broker for partition in missing for replica in partition.replicas}),
    )
