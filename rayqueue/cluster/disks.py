"""Disks: how many bytes may still be written to each broker's, and what moves under way will still write there. Pure.

A move takes its space bit by bit, so what is free now is not what may be
given away: the bytes that it still lacks are promised. Brokers on one host may
have one disk. They are taken to have one if their disks are of the same size:
what one of them takes, the others have no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rayqueue.cluster.moves import Move
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.seen import Pace
from rayqueue.config import ClusterSettings


def same_disk(one: AliveBroker, other: AliveBroker) -> bool:
    return one.broker == other.broker or (
        one.host == other.host and one.disk_bytes == other.disk_bytes and bool(one.disk_bytes)
    )


def promised_bytes(
    moves: Iterable[Move], sizes: Mapping[str, int], paces: Mapping[str, Pace], alive: Collection[AliveBroker]
) -> dict[str, int]:
    """What moves under way will still write, by each broker whose disk takes it.

    ``sizes``: of partitions, by Raft group; ``paces``: of moves whose group's leader has said how far they are."""
    known = {each.broker: each for each in alive}
    promised: dict[str, int] = {}
    for move in moves:
        target = known.get(move.broker)
        if target is not None:
            pace = paces.get(move.group_id)
            left_bytes = sizes.get(move.group_id, 0) if pace is None else pace.left_bytes
            for each in alive:
                if same_disk(each, target):
                    promised[each.broker] = promised.get(each.broker, 0) + left_bytes
    return promised


def spare_bytes(
    alive: Collection[AliveBroker], settings: ClusterSettings, promised: Mapping[str, int] | None = None
) -> dict[str, int]:
    """What may still be written to each disk, beside what is ``promised``; those that are not known are not named."""
    taken, kept = promised or {}, settings.disk_reserve_percent
    return {
        each.broker: max(0, each.disk_free_bytes - each.disk_bytes * kept // 100 - taken.get(each.broker, 0))
        for each in alive
        if each.disk_bytes
    }


def reserve(spare: dict[str, int], alive: Iterable[AliveBroker], broker: str, size_bytes: int) -> None:
    """So many bytes are given to this broker: take them from what it, and whoever shares its disk, has in ``spare``."""
    here = list(alive)
    target = next((each for each in here if each.broker == broker), None)
    for each in here:
        if target is not None and each.broker in spare and same_disk(each, target):
            spare[each.broker] -= size_bytes
