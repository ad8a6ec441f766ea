"""The transactions' world, compared with its logs: what the coordinator has decided, and how it has ended where.

Every committed entry of every group is applied to a machine beside the replicas'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayqueue.cluster.commands import (
    AbortTransactions,
    AnyCommand,
    EndTransaction,
    EndWrite,
    ExpireTransactionalIds,
    FinishTransactions,
    InitTransactions,
    decode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.partition import Appended, Ended, Trimmed
from rayqueue.partition.commands import decode
from rayqueue.partition.transactions.commands import EndTransaction as Marker
from rayqueue.partition.transactions.endings import transaction_of
from rayqueue.protocol.transactions import Transaction
from rayqueue.records import BATCH_TAG, BatchHeader, RecordBatch
from tests.sim.app_world import PartitionChecker
from tests.sim.checker import LogChecker
from tests.sim.ensemble import Ensemble
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.node import EngineNode
from tests.sim.served import PartitionNode
from tests.sim.tx_writes import Writes, told

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld

Key = tuple[int, int]


class DecisionChecker(LogChecker):
    """Applies the coordinator's log, and knows what was decided."""

    def __init__(self, ended_in: Callable[[str, Key], bool | None], writes: Writes) -> None:
        """``ended_in`` tells how a transaction has ended in a partition."""
        super().__init__()
        self.ended_in = ended_in
        self.writes = writes
        self._store = MemoryStore(GroupId("coordinator"), ReplicaId("reference"), COORDINATOR)
        self.machine = ClusterMachine(self._store)
        self._applied = Index(0)
        self.decided: dict[Key, tuple[bool, tuple[str, ...]]] = {}
        self.given: dict[Key, str] = {}
        """Each pair to the id it was given to."""
        self.late = self.carried = 0

    def watch_commit(self, node: EngineNode) -> None:
        super().watch_commit(node)
        while (entry := self.committed.get(Index(self._applied + 1))) is not None:
            self._applied = entry.index
            self._store.append([entry])
            if entry.payload[0] >= 4:
                self._decided(decode_command(entry.payload), self.machine.apply(entry.index, entry.payload))

    def _decided(self, command: AnyCommand, answer: Any) -> None:
        if isinstance(command, AbortTransactions):
            self.late += sum(answer)
        elif isinstance(command, FinishTransactions) and command.group_id:
            self.carried += len(command.finished)
        elif isinstance(command, ExpireTransactionalIds):
            told_of = {row.transactional_id for row in self.machine.transactions.commits.values()}
            if told_of & set(answer):
                raise BrokenError(Invariant.FATE_KEPT, f"{told_of & set(answer)} are forgotten")
        told(self.writes, command, answer)
        if isinstance(command, EndWrite):
            known = self.machine.transactions
            is_open = {key for key in self.writes.open_keys() if known.current(key) is not None}
            if self.writes.ended(command, answer, is_open):
                for producer_id, epoch, participants in command.parts:
                    self._decide((producer_id, epoch), True, participants)
        if not isinstance(answer, Transaction) or not isinstance(command, InitTransactions | EndTransaction):
            return
        if isinstance(command, EndTransaction):
            self._decide((command.producer_id, command.epoch), command.commit, command.participants)
        pair = answer.producer_id, answer.epoch
        if self.given.setdefault(pair, command.transactional_id) != command.transactional_id:
            raise BrokenError(
                Invariant.ATOMIC, f"{pair} was given to {self.given[pair]} and {command.transactional_id}"
            )

    def _decide(self, key: Key, commit: bool, participants: tuple[str, ...]) -> None:
        decision = commit, participants
        if self.decided.setdefault(key, decision)[0] != commit:
            raise BrokenError(Invariant.ATOMIC, f"{key} was decided twice: {self.decided[key]}, then {decision}")
        for group_id in participants if commit else ():
            if self.ended_in(group_id, key) is False:
                raise BrokenError(Invariant.ATOMIC, f"{key} was committed, and aborted in {group_id} before")

    def is_committed(self, key: Key, group_id: str) -> bool:
        commit, participants = self.decided.get(key, (False, ()))
        return commit and group_id in participants


class TxChecker(PartitionChecker):
    """Of one partition: what is where, of which transaction, and how that has ended here."""

    def __init__(self, world: TxWorld, group: Ensemble[PartitionNode], number: int) -> None:
        super().__init__(world, group, number)
        self._tx_world = world
        self.group_id = group.group_id
        self.values: list[tuple[bytes | None, Key | None, int]] = []
        """By offset: value, transaction, lane."""
        self.ended: dict[Key, bool] = {}
        self.start = 0
        self.reads.on_applied = self.noted

    def noted(self, entry: Entry, answer: Any) -> None:
        if entry.payload[0] == BATCH_TAG:
            if isinstance(answer, Appended) and not answer.duplicate:
                header = BatchHeader.parse(entry.payload)
                key = transaction_of(header)
                if key is not None and key in self.ended:
                    raise BrokenError(Invariant.ATOMIC, f"{key} goes on in {self.group_id} after it has ended there")
                values = RecordBatch.decode(entry.payload).values()
                self.values += [(value, key, header.lane) for value in values]
                for value in values:
                    self._tx_world.writes.in_log(value, key)
            return
        if isinstance(answer, Trimmed):
            self._trimmed(answer.start_offset)
        command = decode(entry.payload)
        if isinstance(command, Marker) and isinstance(answer, Ended) and answer.was_open:
            key = command.producer_id, command.epoch
            self.ended[key] = command.commit
            self._tx_world.ended(key, self.group_id, commit=command.commit)

    def _trimmed(self, start: int) -> None:
        for at in range(self.start, start):
            key = self.values[at][1]
            if self.fate(key) is None:
                raise BrokenError(Invariant.READABLE, f"offset {at} of {self.group_id} is trimmed, and {key} is open")
        self.start = max(self.start, start)

    def fate(self, key: Key | None) -> bool | None:
        return True if key is None else self.ended.get(key)
