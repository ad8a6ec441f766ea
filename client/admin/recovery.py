"""The plan of an unsafe recovery: which replica of a partition would go on alone, and what may be lost. Pure.

Nobody knows for certain what the replicas that are gone had. What is known is
said in figures: how far the survivor has come, how far each other one that still answers
has (one that is damaged may), how much an only voter remembers to have acknowledged,
and that whatever lies beyond is lost.

If there is no survivor, the partition can begin anew with a new replica, empty. No
offset may be given twice: it begins behind all that is known to have been
acknowledged, and some way further, since that is remembered to a second. Where
nobody knows it, the operator has to say where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayqueue.errors import InvalidInputError, RecoveryRefusedError, StorageError
from rayqueue.protocol.calls import RecoveryInfo
from rayqueue.protocol.topics import PartitionInfo, TopicInfo
from rayqueue.replica.status import Status

SKIPPED = 10_000_000
"""Offsets that are left out at least, more than a partition acknowledges between two of its marks."""


@dataclass(frozen=True, slots=True)
class PartitionRecovery:
    """The effect of an unsafe recovery of a partition, planned or done."""

    topic: str
    partition: int
    survivor: str
    """"" if there is none: a new replica begins anew. Once it is done, that one."""
    broker: str
    """Where the survivor is; "" if that is still to be decided."""
    kept_records: int
    """The records that the survivor has are those before this offset, and perhaps a few more: see ``open_entries``.
    0 if the partition begins anew."""
    open_entries: int
    """Entries at the end of its log of which it does not know whether they were committed. They are kept."""
    known_lost_records: int
    """Records that are known to have been acknowledged, by what a replica that still answers has or remembers, and that
    the survivor has not."""
    abandoned: Mapping[str, str]
    """The other replicas, and what each says, or why it says nothing."""
    said: str
    """All of it in words. It goes to the audit record."""
    done: RecoveryInfo | None = None
    """The audit record, if it was done."""
    begins_at: int | None = None
    """The first offset of a partition that begins anew, empty."""


def plan_recovery(
    info: TopicInfo,
    partition: PartitionInfo,
    statuses: Mapping[tuple[str, str], Any],
    survivor: str | None,
    begin_at: int | None = None,
    broker: str | None = None,
) -> PartitionRecovery:
    """``RecoveryRefusedError`` if a majority is there, or if nobody is left who could go on and nobody knows where to
    begin anew. ``begin_at``, ``broker``: only for that."""
    name = f"{info.name}-{partition.number}"
    told = {each.replica_id: statuses.get((partition.group_id, each.replica_id)) for each in partition.replicas}
    brokers = {each.replica_id: each.broker for each in partition.replicas}
    said = {replica_id: status for replica_id, status in told.items() if isinstance(status, Status)}
    able = {
        replica_id: status
        for replica_id, status in said.items()
        if status.damaged is None and replica_id in status.voters
    }
    sure = {replica_id: status for replica_id, status in able.items() if status.doubted is None}
    for replica_id, status in sure.items():
        if status.role == "leader" or 2 * sum(voter in sure for voter in status.voters) > len(status.voters):
            raise RecoveryRefusedError(
                f"{name} needs no recovery: {replica_id} and a majority are there, and decide by themselves",
                topic=info.name,
            )
    if not able:
        return _anew(info, partition, told, begin_at, broker)
    if begin_at is not None or broker is not None:
        raise InvalidInputError(
            f"{name} does not begin anew: {', '.join(sorted(able))} can go on with what it has", key="begin_at"
        )
    chosen = survivor or max(
        able, key=lambda replica_id: (able[replica_id].last_term, able[replica_id].last_index, replica_id)
    )
    if chosen not in able:
        raise RecoveryRefusedError(
            f"{chosen} of {name} cannot go on; these can: {', '.join(sorted(able))}", topic=info.name
        )
    own = able[chosen]
    best = max(max(status.high_watermark, status.acknowledged) for status in said.values())
    known_lost = max(0, best - own.high_watermark)
    abandoned = {replica_id: _standing(told[replica_id]) for replica_id in brokers if replica_id != chosen}
    others = "; ".join(f"{replica_id} on {brokers[replica_id]}: {each}" for replica_id, each in abandoned.items())
    text = (
        f"{chosen} on {brokers[chosen]} goes on alone for {name}, with the records before offset {own.high_watermark} "
        f"and {max(0, own.last_index - own.commit)} entries more that may not have been committed. Given up: "
        f"{others or 'nobody'}. {known_lost} records that are known to have been acknowledged are lost; what was "
        "acknowledged beyond that, by those who do not answer or before an older copy was restored, is lost, too, and "
        "nobody knows how much it is"
    )
    return PartitionRecovery(
        info.name,
        partition.number,
        chosen,
        brokers[chosen],
        own.high_watermark,
        max(0, own.last_index - own.commit),
        known_lost,
        abandoned,
        text,
    )


def _anew(
    info: TopicInfo, partition: PartitionInfo, told: Mapping[str, Any], begin_at: int | None, broker: str | None
) -> PartitionRecovery:
    name = f"{info.name}-{partition.number}"
    brokers = {each.replica_id: each.broker for each in partition.replicas}
    abandoned = {replica_id: _standing(each) for replica_id, each in told.items()}
    others = "; ".join(f"{replica_id} on {brokers[replica_id]}: {each}" for replica_id, each in abandoned.items())
    ends = dict(_acknowledged(told))
    known = max(ends.values(), default=0)
    if begin_at is None and ends.keys() != told.keys():
        raise RecoveryRefusedError(
            f"no replica of {name} is left that could go on ({others}). Bring a disk back. If they are gone for good, "
            "it can begin anew, empty; but nobody knows up to which offset it had acknowledged"
            + (f" ({known} at least)" if known else "")
            + ": say where, beyond all that was ever read of it or written to it (--begin-at OFFSET)",
            topic=info.name,
        )
    begins_at = (known // SKIPPED + 2) * SKIPPED if begin_at is None else begin_at
    if begins_at < known:
        raise RecoveryRefusedError(
            f"{name} has acknowledged the records before offset {known}; it cannot begin anew at {begins_at}, which "
            "would give offsets a second time",
            topic=info.name,
        )
    starts = [each.start_offset for each in told.values() if isinstance(each, Status)]
    lost = max(0, known - min(starts, default=0))
    where = f"on {broker}" if broker else "on the broker that had it, or on another one if that is away"
    text = (
        f"no replica of {name} is left that could go on: it begins anew {where}, empty, at offset {begins_at}. Given "
        f"up: {others}. The records before offset {known} are known to have been acknowledged: up to {lost} of them "
        "are lost, with all that was acknowledged since that was noted, the positions of its groups, and what it knows "
        f"of its producers. The offsets from {known} on are left out, so that none is given twice. What is left on "
        "disks is set aside and not deleted"
    )
    return PartitionRecovery(
        info.name, partition.number, "", broker or "", 0, 0, lost, abandoned, text, begins_at=begins_at
    )


def _acknowledged(told: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """How far each replica that knows it had come. The mark of one that does not start is its group's only if it was
    alone in it."""
    for replica_id, each in told.items():
        if isinstance(each, Status):
            yield replica_id, max(each.high_watermark, each.acknowledged)
        elif isinstance(each, StorageError) and len(told) == 1 and "acknowledged" in each.details:
            yield replica_id, int(each.details["acknowledged"])


def _standing(status: Any) -> str:
    if not isinstance(status, Status):
        return str(status)
    trouble = "" if status.damaged is None else f", damaged: {status.damaged}"
    return f"has the records before offset {status.high_watermark}{trouble}"
