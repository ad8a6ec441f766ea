"""The plan of an unsafe recovery: which replica of a partition would go on alone, and what may be lost. Pure.

Nobody knows for certain what the replicas that are gone had. What is known is
said in figures: how far the survivor has come, how far each other one that still answers
has (one that is damaged may), how much an only voter remembers to have acknowledged,
and that whatever lies beyond is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayqueue.errors import RecoveryRefusedError
from rayqueue.protocol.calls import RecoveryInfo
from rayqueue.protocol.topics import PartitionInfo, TopicInfo
from rayqueue.replica.status import Status


@dataclass(frozen=True, slots=True)
class PartitionRecovery:
    """The effect of an unsafe recovery of a partition, planned or done."""

    topic: str
    partition: int
    survivor: str
    broker: str
    """Where the survivor is."""
    kept_records: int
    """The records that the survivor has are those before this offset, and perhaps a few more: see ``open_entries``."""
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


def plan_recovery(
    info: TopicInfo, partition: PartitionInfo, statuses: Mapping[tuple[str, str], Any], survivor: str | None
) -> PartitionRecovery:
    """``RecoveryRefusedError`` if a majority is there, or nobody is left who could go on."""
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
        raise RecoveryRefusedError(f"no replica of {name} is left that could go on; restore a disk", topic=info.name)
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


def _standing(status: Any) -> str:
    if not isinstance(status, Status):
        return str(status)
    trouble = "" if status.damaged is None else f", damaged: {status.damaged}"
    return f"has the records before offset {status.high_watermark}{trouble}"
