"""The coordinator's part in transactions: it gives ids, decides, and tells fates. On the replica that leads.

What lasts is in ``ClusterMachine.transactions``. In memory is only what leaders
of partitions have told of transactions that stay open there, for whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rayqueue.cluster import commands
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.sessions import Reply
from rayqueue.config import ClusterSettings
from rayqueue.errors import InvalidInputError, RayQueueError, TooManyTransactionsError, TransactionTooLargeError
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.transactions import (
    AbortTransaction,
    CoordinatorTransactionCall,
    Decided,
    EndTransaction,
    FinishTransactions,
    InitTransactions,
    ListTransactions,
    OpenFor,
    ResolveTransactions,
    Transaction,
    TransactionInfo,
)

REMEMBERED_S = 10.0
"""How long what a partition has told is good for."""

Key = tuple[int, int]
Write = Callable[[commands.AnyCommand, Callable[[Any], None]], None]
Read = Callable[[Callable[[], Any], Reply], None]


class Fates:
    """``write`` proposes, ``read`` answers once it is sure that this replica leads. ``wall_ms``: the time of day."""

    def __init__(
        self,
        machine: ClusterMachine,
        settings: ClusterSettings,
        seals: Seals,
        write: Write,
        read: Read,
        wall_ms: Callable[[], int],
    ) -> None:
        self._machine = machine
        self._settings = settings
        self._seals = seals
        self._write = write
        self._read = read
        self._wall_ms = wall_ms
        self._told: dict[Key, dict[str, tuple[int, float]]] = {}
        """To the partitions in which it is open: its age in ms there, and when that was told."""

    def lead(self) -> None:
        self._told.clear()

    def call(self, now_s: float, call: CoordinatorTransactionCall, reply: Reply) -> None:
        match call:
            case InitTransactions():
                self._init(call, reply)
            case EndTransaction():
                self._end(call, reply)
            case FinishTransactions():
                self._finish(call, reply)
            case ResolveTransactions():
                self._resolve(now_s, call, reply)
            case ListTransactions():
                self._read(lambda: self._list(now_s), reply)
            case AbortTransaction():
                self._abort(call, reply)

    def tick(self, now_s: float) -> None:
        """Once in a while: forget what nobody uses."""
        self._forget_told(now_s)
        now_ms, retention_ms = self._wall_ms(), self._settings.transactional_id_retention_ms
        if not now_ms or retention_ms is None:
            return
        if any(now_ms - row.used_ms > retention_ms for row in self._machine.transactions.ids.values()):
            self._write(commands.ExpireTransactionalIds(now_ms, retention_ms), lambda _: None)

    # -- producers ----------------------------------------------------------------------------

    def _init(self, call: InitTransactions, reply: Reply) -> None:
        settings, known = self._settings, self._machine.transactions.ids
        if call.timeout_ms > settings.max_transaction_timeout_ms:
            raise InvalidInputError(
                f"a transaction may last {settings.max_transaction_timeout_ms} ms at most, not {call.timeout_ms} "
                "(cluster.max_transaction_timeout_ms)",
                key="timeout_ms",
            )
        if call.transactional_id not in known and len(known) >= settings.max_transactional_ids:
            raise TooManyTransactionsError(
                f"{len(known)} transactional ids are known, which is the limit (cluster.max_transactional_ids): use "
                "the same ones again, or let unused ones expire sooner (cluster.transactional_id_retention_ms)",
                limit=len(known),
            )
        self._write(
            commands.InitTransactions(
                call.transactional_id, call.attempt, call.timeout_ms, call.owner, call.resume, self._wall_ms()
            ),
            reply,
        )

    def _end(self, call: EndTransaction, reply: Reply) -> None:
        most = self._settings.max_transaction_participants
        if len(call.participants) > most:
            raise TransactionTooLargeError(
                f"a transaction touches {most} partitions at most, not {len(call.participants)} "
                "(cluster.max_transaction_participants)",
                limit=most,
            )
        if len(set(call.participants)) != len(call.participants):
            raise InvalidInputError("each participant is named once", key="participants")

        def decided(answer: Any) -> None:
            if isinstance(answer, Transaction):
                key, commit = (call.producer_id, call.epoch), call.commit
                self._told.pop(key, None)
                seals = tuple([self._seals.marker(each, *key, commit=commit) for each in call.participants])
                answer = Decided(commit, seals, answer)
            reply(answer)

        finished = tuple([(each.producer_id, each.epoch) for each in call.finished])
        self._write(
            commands.EndTransaction(
                call.transactional_id,
                call.producer_id,
                call.epoch,
                call.commit,
                call.participants,
                finished,
                self._wall_ms(),
            ),
            decided,
        )

    def _finish(self, call: FinishTransactions, reply: Reply) -> None:
        commits = self._machine.transactions.commits
        keys = [(each.producer_id, each.epoch) for each in call.finished]
        own = tuple([key for key in keys if key in commits and commits[key].transactional_id == call.transactional_id])
        if own:
            self._write(commands.FinishTransactions(own), reply)
        else:
            reply(None)

    # -- partitions -----------------------------------------------------------------------------

    def _resolve(self, now_s: float, call: ResolveTransactions, reply: Reply) -> None:
        """Only once it is sure that this replica leads: one that was deposed may not know of a producer that is new,
        and would say that what it has open is aborted."""

        def fates() -> tuple[str, ...]:
            known = self._machine.transactions
            return tuple([known.fate((each.producer_id, each.epoch), call.group_id) for each in call.transactions])

        def found(answer: Any) -> None:
            if isinstance(answer, RayQueueError):
                reply(answer)
                return
            self._note(now_s, call.group_id, call.transactions, answer)
            late = self._late(call.transactions)
            if late:
                why = "it was open for longer than its timeout"
                command = commands.AbortTransactions(tuple(late), why, self._wall_ms())
                self._write(command, lambda done: reply(done if isinstance(done, RayQueueError) else fates()))
            else:
                reply(answer)

        self._read(fates, found)

    def _late(self, told: Sequence[OpenFor]) -> list[Key]:
        late: list[Key] = []
        for each in told:
            row = self._machine.transactions.current((each.producer_id, each.epoch))
            if row is not None and each.age_ms > row.timeout_ms:
                late.append(row.key)
        return late

    def _note(self, now_s: float, group_id: str, told: Sequence[OpenFor], fates: Sequence[str]) -> None:
        for each, fate in zip(told, fates, strict=True):
            if fate == "open":
                self._told.setdefault((each.producer_id, each.epoch), {})[group_id] = (each.age_ms, now_s)

    def _forget_told(self, now_s: float) -> None:
        for key, at in list(self._told.items()):
            fresh = {group: told for group, told in at.items() if now_s - told[1] < REMEMBERED_S}
            if fresh:
                self._told[key] = fresh
            else:
                del self._told[key]

    # -- operators --------------------------------------------------------------------------------

    def _list(self, now_s: float) -> tuple[TransactionInfo, ...]:
        self._forget_told(now_s)
        known = self._machine.transactions
        found: list[TransactionInfo] = []
        for name in sorted(known.ids):
            row = known.ids[name]
            told = self._told.get(row.key, {})
            state, age_ms, partitions = "idle", 0, tuple(sorted(told))
            if told:
                state = "open"
                age_ms = max(age + int((now_s - at_s) * 1000) for age, at_s in told.values())
            commit = next((each for each in known.commits.values() if each.transactional_id == name), None)
            if commit is not None and not told:
                state, partitions = "committing", commit.waiting
            found.append(
                TransactionInfo(name, *row.key, row.owner, row.timeout_ms, state, age_ms, partitions),
            )
        return tuple(found)

    def _abort(self, call: AbortTransaction, reply: Reply) -> None:
        key = call.producer_id, call.epoch
        row = self._machine.transactions.current(key)
        if row is None or row.transactional_id != call.transactional_id:
            self._read(lambda: False, reply)
            return

        def aborted(answer: Any) -> None:
            reply(answer if isinstance(answer, RayQueueError) else answer[0])

        self._write(commands.AbortTransactions((key,), "an operator ended it", self._wall_ms()), aborted)
