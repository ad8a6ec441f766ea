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
from rayqueue.cluster.transactions import CommitRow, is_lent_name
from rayqueue.config import ClusterSettings
from rayqueue.errors import InvalidInputError, RayQueueError, TooManyTransactionsError, TransactionTooLargeError
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.transactions import (
    IDS_BOUND,
    MAX_AT_ONCE,
    MAX_WRITE_TASKS,
    AbortTransaction,
    CoordinatorTransactionCall,
    Decided,
    EndTransaction,
    EndWrite,
    FinishTransactions,
    ForgetTransactionalId,
    InitTransactions,
    JoinWrite,
    ListTransactions,
    OpenFor,
    ResolveTransactions,
    SealedPart,
    Transaction,
    TransactionInfo,
    WriteEnded,
)

MAX_WRITE_PARTICIPANTS = 50_000
"""Of all parts of a write, together."""
MAX_SEALS = 10_000
"""What the end of a write is answered with: it holds up everybody else for as long as they take. Partitions that get no
seal ask by themselves (``cluster.resolve_after_ms``)."""
_NEVER_MS = 2**62
_TOO_LONG = "it was open for longer than its timeout"
REMEMBERED_S = 10.0
"""How long what a partition has told is good for."""

Key = tuple[int, int]
Part = tuple[int, int, tuple[str, ...]]
"""Producer id, epoch, participants."""
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
            case ForgetTransactionalId():
                self._write(commands.ForgetTransactionalId(call.transactional_id, call.attempt, self._wall_ms()), reply)
            case JoinWrite():
                self._join(call, reply)
            case EndWrite():
                self._end_write(call, reply)
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
        if not now_ms:
            return
        late = self._late_parts(now_ms)
        if late:
            self._write(commands.AbortTransactions(late, _TOO_LONG, now_ms), lambda _: None)
        if retention_ms is None:
            return
        if any(now_ms - row.used_ms > retention_ms for row in self._machine.transactions.ids.values()):
            self._write(commands.ExpireTransactionalIds(now_ms, retention_ms), lambda _: None)

    # -- producers ----------------------------------------------------------------------------

    def _init(self, call: InitTransactions, reply: Reply) -> None:
        known = self._machine.transactions.ids.get(call.transactional_id)
        if is_lent_name(call.transactional_id) and (known is None or not known.attempt):
            raise InvalidInputError(
                f"{call.transactional_id!r} is no transactional id for a producer: those of the form task.<number> are "
                "given to the tasks of Spark and Ray Data",
                key="transactional_id",
            )
        evict = self._make_room(call.timeout_ms, known=known is not None)
        self._write(
            commands.InitTransactions(
                call.transactional_id,
                call.attempt,
                call.timeout_ms,
                call.owner,
                call.resume,
                self._wall_ms(),
                self._settings.max_transactional_ids,
                evict,
            ),
            reply,
        )

    def _make_room(self, timeout_ms: int, *, known: bool) -> str:
        """The id that is to go, if one is. Ids that could be lent and are not make room by themselves; then those that
        nobody has used for longer than any transaction may last, the longest unused first."""
        settings, transactions = self._settings, self._machine.transactions
        count = len(transactions.ids) - len(transactions.free)
        if timeout_ms > settings.max_transaction_timeout_ms:
            raise InvalidInputError(
                f"a transaction may last {settings.max_transaction_timeout_ms} ms at most, not {timeout_ms} "
                "(cluster.max_transaction_timeout_ms)",
                key="timeout_ms",
            )
        if known or count < settings.max_transactional_ids:
            return ""
        idlest, now_ms = transactions.idlest(self._told), self._wall_ms()
        if idlest is not None and now_ms - idlest.used_ms > settings.max_transaction_timeout_ms:
            return idlest.transactional_id
        raise TooManyTransactionsError(
            f"{count} transactional ids are in use, which is the limit (cluster.max_transactional_ids): use the same "
            f"ones again; one that was not used for {settings.max_transaction_timeout_ms} ms "
            "(cluster.max_transaction_timeout_ms) makes room",
            limit=count,
            bound=IDS_BOUND,
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

    # -- tasks that write together --------------------------------------------------------------

    def _join(self, call: JoinWrite, reply: Reply) -> None:
        tasks = self._machine.transactions.tasks_of(call.write)
        if tasks >= MAX_WRITE_TASKS:
            raise TransactionTooLargeError(
                f"{tasks} tasks of {call.write!r} have a transaction each, with attempts that have failed; a partition "
                "takes no more: let fewer, larger tasks write (coalesce or repartition the rows before), or write them "
                "in several batches",
                limit=MAX_WRITE_TASKS,
            )
        evict = self._make_room(call.timeout_ms, known=bool(self._machine.transactions.free))
        now_ms = self._wall_ms()
        self._write(
            commands.JoinWrite(call.write, call.writer, call.batch_id, call.timeout_ms, call.owner, now_ms, evict),
            reply,
        )

    def _end_write(self, call: EndWrite, reply: Reply) -> None:
        touched = sum(len(part.participants) for part in call.parts)
        if touched > MAX_WRITE_PARTICIPANTS:
            raise TransactionTooLargeError(
                f"{len(call.parts)} tasks have written to {touched} partitions in all; {MAX_WRITE_PARTICIPANTS} is the "
                "limit: let fewer tasks write",
                limit=MAX_WRITE_PARTICIPANTS,
            )
        parts = tuple([(part.producer_id, part.epoch, part.participants) for part in call.parts])
        if len({part[:2] for part in parts}) != len(parts) or any(len(set(part[2])) != len(part[2]) for part in parts):
            raise InvalidInputError("each part, and each participant of it, is named once", key="parts")

        def decided(answer: Any) -> None:
            if not isinstance(answer, RayQueueError):
                written, dropped = answer
                answer = WriteEnded(written, self._sealed_parts(call, parts if written else told_again(), dropped))
            reply(answer)

        def told_again() -> list[Part]:
            """The first answer was lost: what was committed then, and what partitions may not know of."""
            commits = self._machine.transactions.commits
            known = [(part, commits.get(part[:2])) for part in parts]
            return [
                part
                for part, row in known
                if row is not None and row.transactional_id == call.write and set(part[2]) <= set(row.waiting)
            ]

        settings = self._settings
        self._write(
            commands.EndWrite(
                call.write,
                call.writer,
                call.batch_id,
                call.identity,
                call.once,
                call.commit,
                parts,
                settings.max_transactional_ids,
                settings.transactional_id_retention_ms or _NEVER_MS,
                self._wall_ms(),
            ),
            decided,
        )

    def _sealed_parts(
        self, call: EndWrite, committed: Sequence[Part], dropped: Sequence[Key]
    ) -> tuple[SealedPart, ...]:
        told = [(part, True) for part in committed]
        told += [((*key, call.others), False) for key in dropped[:MAX_AT_ONCE] if call.others]
        sealed: list[SealedPart] = []
        left = MAX_SEALS
        for part, commit in told:
            left -= len(part[2])
            if left < 0:
                break
            sealed.append(self._sealed(part, commit=commit))
        return tuple(sealed)

    def _sealed(self, part: Part, *, commit: bool) -> SealedPart:
        producer_id, epoch, at = part
        seals = tuple([self._seals.marker(each, producer_id, epoch, commit=commit) for each in at])
        return SealedPart(producer_id, epoch, commit, seals)

    def _late_parts(self, now_ms: int) -> tuple[Key, ...]:
        """Transactions of tasks whose write has not ended in time, also of those that have written nothing yet."""
        rows = self._machine.transactions.ids.values()
        late = [row.key for row in rows if row.write and now_ms - row.used_ms > row.timeout_ms]
        return tuple(late[:MAX_AT_ONCE])

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
                command = commands.AbortTransactions(tuple(late), _TOO_LONG, self._wall_ms())
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
        commits: dict[str, list[CommitRow]] = {}
        for commit in known.commits.values():
            commits.setdefault(commit.transactional_id, []).append(commit)
        found: list[TransactionInfo] = []
        for name in sorted(known.ids.keys() - known.free):
            row = known.ids[name]
            told = self._told.get(row.key, {})
            state, age_ms, partitions = "idle", 0, tuple(sorted(told))
            if told:
                state = "open"
                age_ms = max(age + int((now_s - at_s) * 1000) for age, at_s in told.values())
            elif name in commits:
                state, partitions = "committing", _waiting(commits[name])
            found.append(
                TransactionInfo(name, *row.key, row.owner, row.timeout_ms, state, age_ms, partitions),
            )
        for name in sorted(commits.keys() - known.ids.keys()):  # writes, whose ids are others' by now
            first = commits[name][0]
            found.append(TransactionInfo(name, *first.key, "", 0, "committing", 0, _waiting(commits[name])))
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


def _waiting(commits: Sequence[CommitRow]) -> tuple[str, ...]:
    """Participants that may have no marker of one of these."""
    return tuple(dict.fromkeys([group_id for row in commits for group_id in row.waiting]))
