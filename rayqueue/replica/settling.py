"""Settling: what producers ask of a partition for their transactions, and how those end that nobody ends.

The leader of a partition knows what is open in it. What has been so for
``cluster.resolve_after_ms`` it asks the coordinator about, and again after as
long; whoever carries the question (``rayqueue.actors.settler``, over the
connection layer) takes it from ``questions`` and brings the answer to ``answered``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, RayQueueError, UpgradeUnfinishedError
from rayqueue.partition import Ended, Partition, Staged
from rayqueue.partition.commands import decode
from rayqueue.partition.transactions.commands import (
    end_transaction_command,
    stage_acks_command,
    stage_offsets_command,
)
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import check_name
from rayqueue.protocol.transactions import (
    MAX_AT_ONCE,
    GetTransactions,
    MarkTransaction,
    OpenFor,
    PartitionTransactionCall,
    StageAcks,
    StageOffsets,
)

if TYPE_CHECKING:
    from rayqueue.replica.appends import Appends
    from rayqueue.replica.core import ReplicaCore

_VERSION = 3
"""Of the replicas' protocol: the first whose replicas can apply entries about transactions."""

Reply = Callable[[Any], None]


def check_all_know(oldest_version: int) -> None:
    """``UpgradeUnfinishedError`` if a replica of the group would stop at an entry about transactions, or take a batch
    of one for any other."""
    if oldest_version < _VERSION:
        raise UpgradeUnfinishedError(
            "a replica of this partition is of the release before, and knows no transactions; upgrade it first"
        )


class Settling:
    """On the engine's thread."""

    def __init__(
        self,
        replica: ReplicaCore[Any],
        partition: Partition,
        appends: Appends,
        seals: Seals,
        settings: Settings,
        now_ms: Callable[[], int],
    ) -> None:
        self._replica = replica
        self._partition = partition
        self._appends = appends
        self._seals = seals
        self._after_ms = settings.cluster.resolve_after_ms
        self._now_ms = now_ms
        self._asked_s: dict[tuple[int, int], float] = {}

    # -- calls -----------------------------------------------------------------------------

    def call(self, call: PartitionTransactionCall, reply: Reply) -> None:
        self._replica.check_leads()
        match call:
            case GetTransactions():
                self._replica.confirm(lambda error: reply(self._infos() if error is None else error))
            case MarkTransaction(producer_id=producer_id, epoch=epoch, commit=commit):
                self._seals.check_marker(call.seal, self._replica.group_id, producer_id, epoch, commit=commit)
                self._propose(end_transaction_command(producer_id, epoch, commit=commit), reply)
            case StageOffsets(producer_id=producer_id, epoch=epoch, group=group, generation=generation):
                check_name("group", group)
                self._seals.check_grant(call.seal, group, self._replica.group_id, generation)
                self._propose(
                    stage_offsets_command(producer_id, epoch, group, generation, call.offsets, call.metadata), reply
                )
            case StageAcks(producer_id=producer_id, epoch=epoch, worker=worker, token=token, jobs=jobs):
                self._propose(stage_acks_command(self._now_ms(), producer_id, epoch, worker, token, jobs), reply)

    def open_for(self) -> tuple[int, int]:
        """The number of open transactions, and the age of the oldest in ms."""
        opened = self._partition.transactions
        now_ms = max(self._now_ms(), self._partition.clock.now_ms)
        return len(opened), max([now_ms - each.opened_ms for each in opened], default=0)

    def _infos(self) -> Any:
        return self._partition.transactions.infos(self._now_ms())

    def _propose(self, payload: bytes, reply: Reply) -> None:
        check_all_know(self._replica.oldest_version)
        try:
            decode(payload)  # raises here rather than at every replica that applies it
        except RayQueueError as error:
            raise InvalidInputError(str(error)) from None
        self._appends.keep_time(transactional=True)
        self._replica.propose(payload, lambda result: reply(_told(result)))

    # -- what nobody ends ---------------------------------------------------------------------

    def questions(self) -> tuple[OpenFor, ...]:
        """The questions for the coordinator now. None, unless this replica leads."""
        if not self._replica.engine.is_leader or not len(self._partition.transactions):
            self._asked_s.clear()
            return ()
        now_s, now_ms = time.monotonic(), max(self._now_ms(), self._partition.clock.now_ms)
        due: list[OpenFor] = []
        asked: dict[tuple[int, int], float] = {}
        for each in self._partition.transactions:
            # From when it was first seen here: the clock of its stamp may have been another one's.
            before_s = self._asked_s.get(each.key)
            asked[each.key] = now_s if before_s is None else before_s
            if before_s is not None and now_s - before_s >= self._after_ms / 1000 and len(due) < MAX_AT_ONCE:
                asked[each.key] = now_s
                due.append(OpenFor(*each.key, max(0, now_ms - each.opened_ms)))
        self._asked_s = asked
        return tuple(due)

    def answered(self, asked: Sequence[OpenFor], fates: Sequence[str]) -> None:
        """The coordinator's answer. A fate is for ever, so it does not matter how old the answer is."""
        for each, fate in zip(asked, fates, strict=True):
            key = each.producer_id, each.epoch
            if fate in ("committed", "aborted") and self._partition.transactions.get(key) is not None:
                try:
                    self._replica.tell_log(end_transaction_command(*key, commit=fate == "committed"))
                except RayQueueError:
                    return  # it leads no more, or has no room: whoever leads asks again


def _told(result: Any) -> Any:
    """The answer of applying a command, as a client is told."""
    match result:
        case Staged():
            return None
        case Ended(was_open):
            return was_open
        case _:
            return result  # what became of jobs, or an error
