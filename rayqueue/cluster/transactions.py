"""Transactional ids and the fates of their transactions.

Owns these rows of the META table, but for the ledgers of writers (``writes``):

    i<transactional id>         an id, and its producer's current transaction
    w<producer id><epoch>       a transaction that was committed, and who has no marker yet

Abort is presumed: a transaction that is not the current one of its producer, and
not among the committed ones, was aborted, or never was. So only commits are kept,
and only until every participant has its marker: a row that goes too early would
tear its transaction, one that stays costs a few bytes.

The end of a transaction, whoever decides it, gives its producer the next epoch; at
the highest, another producer id. So no pair is ever given twice.

Tasks that write together have ids that belong to nobody: one is lent to a task
until its write ends, and then to another. Their names (``is_lent_name``) are no
producer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Literal

import msgspec

from rayqueue.cluster.commands import (
    AbortTransactions,
    EndTransaction,
    FinishTransactions,
    ForgetTransactionalId,
    InitTransactions,
    JoinWrite,
)
from rayqueue.cluster.tables import META
from rayqueue.errors import (
    ProducerFencedError,
    RayQueueError,
    TransactionAbortedError,
    TransactionError,
    UnknownTransactionError,
)
from rayqueue.log.store import LogStore
from rayqueue.protocol.transactions import MAX_EPOCH, Transaction
from rayqueue.records.checksum import crc32c

_ID = b"i"
_COMMITTED = b"w"
EXPIRED_AT_ONCE = 200
_LENT_NAME = re.compile(r"task\.[0-9]+")

Fate = Literal["open", "committed", "aborted"]
Key = tuple[int, int]


class IdRow(msgspec.Struct, frozen=True, array_like=True):
    """A transactional id."""

    transactional_id: str
    producer_id: int
    epoch: int
    """Of the transaction that is open, or comes next."""
    timeout_ms: int
    owner: str
    attempt: str
    """Of the producer that has the id."""
    used_ms: int
    last: Key = (0, 0)
    """The transaction before, of the same attempt; none if the producer id is 0."""
    last_committed: bool = False
    last_named: int = 0
    """A checksum of its participants: a repetition must name the same."""
    why_aborted: str = ""
    """If somebody else than its producer aborted it."""
    write: str = ""
    """The write that a task has it for."""

    @property
    def key(self) -> Key:
        return self.producer_id, self.epoch

    @property
    def is_free(self) -> bool:
        """Whether a task may have it. Producers draw an attempt."""
        return not self.attempt and not self.write


class CommitRow(msgspec.Struct, frozen=True, array_like=True):
    """A commit that some participants may not know of."""

    transactional_id: str
    producer_id: int
    epoch: int
    waiting: tuple[str, ...]
    """Raft groups."""
    decided_ms: int

    @property
    def key(self) -> Key:
        return self.producer_id, self.epoch


_encode = msgspec.msgpack.Encoder().encode
_decode_id = msgspec.msgpack.Decoder(IdRow).decode
_decode_commit = msgspec.msgpack.Decoder(CommitRow).decode


def _commit_key(key: Key) -> bytes:
    return _COMMITTED + key[0].to_bytes(8, "big") + key[1].to_bytes(4, "big")


class Transactions:
    def __init__(self, store: LogStore, new_producer_id: Callable[[], int]) -> None:
        self._store = store
        self._new_producer_id = new_producer_id
        self.load()

    def load(self) -> None:
        scan = self._store.scan
        ids = [_decode_id(row) for _, row in scan(META, _ID, bytes((_ID[0] + 1,)))]
        self.ids: dict[str, IdRow] = {row.transactional_id: row for row in ids}
        self._by_producer: dict[int, str] = {row.producer_id: row.transactional_id for row in ids}
        self.free: set[str] = {row.transactional_id for row in ids if row.is_free}
        self._lent: dict[str, set[str]] = {}
        """To each write: the ids that its tasks have."""
        for row in ids:
            if row.write:
                self._lent.setdefault(row.write, set()).add(row.transactional_id)
        commits = [_decode_commit(row) for _, row in scan(META, _COMMITTED, bytes((_COMMITTED[0] + 1,)))]
        self.commits: dict[Key, CommitRow] = {row.key: row for row in commits}

    # -- what others ask ----------------------------------------------------------------------

    def fate(self, key: Key, group_id: str) -> Fate:
        """Of a transaction in this partition."""
        row = self._of_producer(key[0])
        if row is not None and row.producer_id == key[0] and key[1] >= row.epoch:
            return "open"
        commit = self.commits.get(key)
        # Who has its marker needs no other: what is open there is of something late.
        return "committed" if commit is not None and group_id in commit.waiting else "aborted"

    def current(self, key: Key) -> IdRow | None:
        """The id whose current transaction this is."""
        row = self._of_producer(key[0])
        return row if row is not None and row.key == key else None

    def tasks_of(self, write: str) -> int:
        """How many tasks of this write have a transaction."""
        return len(self._lent.get(write, ()))

    def _of_producer(self, producer_id: int) -> IdRow | None:
        name = self._by_producer.get(producer_id)
        return None if name is None else self.ids[name]

    # -- applying -------------------------------------------------------------------------------

    def init(self, command: InitTransactions, now_ms: int) -> Transaction | RayQueueError:
        row = self.ids.get(command.transactional_id)
        if row is not None and row.attempt == command.attempt:
            return Transaction(*row.key)
        if command.resume:
            return _unknown(command.transactional_id) if row is None else _taken(row)
        if row is None:
            self._evict(command.evict)
        if row is None and self.free and 0 < command.max_ids <= len(self.ids):
            self._forget(min(self.free))
        key = (self._new_producer_id(), 0) if row is None else self._after(row.key)
        made = IdRow(
            command.transactional_id,
            *key,
            command.timeout_ms,
            command.owner,
            command.attempt,
            now_ms,
        )
        self._put(made)
        return Transaction(*key)

    def end(self, command: EndTransaction, now_ms: int) -> Transaction | RayQueueError:
        row = self.ids.get(command.transactional_id)
        if row is None:
            return _unknown(command.transactional_id)
        key = command.producer_id, command.epoch
        named = crc32c("\0".join(command.participants).encode())
        if key == row.last and key != row.key:
            return self._again(row, command.commit, named)
        if key != row.key:
            return _taken(row, committed=command.commit and key in self.commits)
        self.finish(FinishTransactions(command.finished), only=row.transactional_id)
        if command.commit and command.participants:
            self._put_commit(CommitRow(row.transactional_id, *key, command.participants, now_ms))
        ended = msgspec.structs.replace(
            row, last=key, last_committed=command.commit, last_named=named, why_aborted="", used_ms=now_ms
        )
        return self._go_on(ended)

    def _again(self, row: IdRow, commit: bool, named: int) -> Transaction | RayQueueError:
        """A repetition, or the first call for what somebody else has ended."""
        if commit and not row.last_committed:
            why = row.why_aborted or "its producer has aborted it"
            return TransactionAbortedError(
                f"transaction {row.last[1]} of {row.transactional_id!r} was aborted: {why}",
                producer_id=row.last[0],
                epoch=row.last[1],
            )
        if row.last_committed and (not commit or named != row.last_named):
            return TransactionError(
                f"transaction {row.last[1]} of {row.transactional_id!r} is committed, and not as this says",
                committed=True,
            )
        return Transaction(*row.key)

    def abort(self, command: AbortTransactions, now_ms: int) -> tuple[bool, ...]:
        answers: list[bool] = []
        for producer_id, epoch in command.transactions:
            row = self.current((producer_id, epoch))
            answers.append(row is not None)
            if row is not None:
                self._go_on(
                    msgspec.structs.replace(
                        row, last=row.key, last_committed=False, last_named=0, why_aborted=command.why, used_ms=now_ms
                    )
                )
        return tuple(answers)

    # -- tasks that write together -------------------------------------------------------------

    def join(self, command: JoinWrite, now_ms: int) -> Transaction:
        self._evict(command.evict)
        if self.free:
            name = min(self.free)
            key = self.ids[name].key
        else:
            key = self._new_producer_id(), 0
            while (name := f"task.{key[0]}") in self.ids:  # a producer's, from before such names were refused
                key = self._new_producer_id(), 0
        self._put(IdRow(name, *key, command.timeout_ms, command.owner, "", now_ms, write=command.write))
        return Transaction(*key)

    def commit_parts(self, write: str, parts: Iterable[tuple[int, int, tuple[str, ...]]], now_ms: int) -> Key | None:
        """All of them, or none: then the first one that is not the write's any more."""
        rows: list[tuple[IdRow, tuple[str, ...]]] = []
        for producer_id, epoch, participants in parts:
            row = self.current((producer_id, epoch))
            if row is None or row.write != write:
                return producer_id, epoch
            rows.append((row, participants))
        for row, participants in rows:
            self._put_commit(CommitRow(write, *row.key, participants, now_ms))
            self._go_on(msgspec.structs.replace(row, used_ms=now_ms))
        return None

    def drop_parts(self, write: str, now_ms: int) -> tuple[Key, ...]:
        """Abort what tasks of this write have open."""
        dropped = sorted([self.ids[name] for name in self._lent.get(write, ())], key=lambda row: row.key)
        for row in dropped:
            self._go_on(msgspec.structs.replace(row, used_ms=now_ms))
        return tuple([row.key for row in dropped])

    # -- forgetting ------------------------------------------------------------------------------

    def finish(self, command: FinishTransactions, *, only: str | None = None) -> None:
        """``only``: those of this id, whatever its producer says."""
        for key in command.finished:
            row = self.commits.get((key[0], key[1]))
            if row is None or only not in (None, row.transactional_id):
                continue
            waiting = tuple([each for each in row.waiting if command.group_id and each != command.group_id])
            if waiting:
                self._put_commit(msgspec.structs.replace(row, waiting=waiting))
            else:
                del self.commits[row.key]
                self._store.delete(META, _commit_key(row.key))

    def expire(self, is_old: Callable[[int], bool]) -> tuple[str, ...]:
        """Forget ids that are not used; those of which a commit is still to be told stay."""
        busy = self._busy()
        gone: list[str] = []
        for name in sorted(self.ids):
            row = self.ids[name]
            if len(gone) < EXPIRED_AT_ONCE and name not in busy and is_old(row.used_ms):
                gone.append(name)
        for name in gone:
            self._forget(name)
        return tuple(gone)

    def forget(self, command: ForgetTransactionalId) -> bool:
        """Its producer was the last one."""
        name = command.transactional_id
        row = self.ids.get(name)
        if row is None or row.attempt != command.attempt or name in self._busy():
            return False
        self._forget(name)
        return True

    def idlest(self, open_ones: Container[Key]) -> IdRow | None:
        """The producer's id that was not used for longest, with nothing open that is known of, and nothing to do."""
        busy = self._busy()
        idle = [
            row
            for row in self.ids.values()
            if row.attempt and row.transactional_id not in busy and row.key not in open_ones
        ]
        return min(idle, key=lambda row: (row.used_ms, row.transactional_id), default=None)

    def _evict(self, name: str) -> None:
        row = self.ids.get(name)
        if row is not None and row.attempt and name not in self._busy():
            self._forget(name)

    def _busy(self) -> set[str]:
        """Ids of which a commit is still to be told."""
        return {row.transactional_id for row in self.commits.values()}

    def _forget(self, name: str) -> None:
        row = self.ids.pop(name)
        self.free.discard(name)
        self._give_back(row)
        self._by_producer.pop(row.producer_id, None)
        self._store.delete(META, _ID + name.encode())

    # -- rows -----------------------------------------------------------------------------------

    def _go_on(self, row: IdRow) -> Transaction:
        """The producer's next transaction."""
        producer_id, epoch = self._after(row.key)
        self._put(msgspec.structs.replace(row, producer_id=producer_id, epoch=epoch, write=""))
        return Transaction(producer_id, epoch)

    def _after(self, key: Key) -> Key:
        return (key[0], key[1] + 1) if key[1] < MAX_EPOCH else (self._new_producer_id(), 0)

    def _put(self, row: IdRow) -> None:
        before = self.ids.get(row.transactional_id)
        if before is not None and before.producer_id != row.producer_id:
            self._by_producer.pop(before.producer_id, None)
        if before is not None:
            self._give_back(before)
        if row.write:
            self._lent.setdefault(row.write, set()).add(row.transactional_id)
        self.ids[row.transactional_id] = row
        (self.free.add if row.is_free else self.free.discard)(row.transactional_id)
        self._by_producer[row.producer_id] = row.transactional_id
        self._store.put(META, _ID + row.transactional_id.encode(), _encode(row))

    def _give_back(self, row: IdRow) -> None:
        others = self._lent.get(row.write)
        if others is not None:
            others.discard(row.transactional_id)
            if not others:
                del self._lent[row.write]

    def _put_commit(self, row: CommitRow) -> None:
        self.commits[row.key] = row
        self._store.put(META, _commit_key(row.key), _encode(row))


def is_lent_name(transactional_id: str) -> bool:
    """Whether this is the name of an id that is lent to tasks, or may be one day."""
    return _LENT_NAME.fullmatch(transactional_id) is not None


def unfinished(commits: Mapping[Key, CommitRow], now_ms: int, after_ms: int) -> Iterable[CommitRow]:
    """Commits that were decided so long ago and are not known everywhere."""
    return [row for row in commits.values() if now_ms - row.decided_ms >= after_ms]


def _unknown(transactional_id: str) -> UnknownTransactionError:
    return UnknownTransactionError(
        f"the transactional id {transactional_id!r} is not known (any more); nothing of its transaction will be seen",
        transactional_id=transactional_id,
    )


def _taken(row: IdRow, *, committed: bool = False) -> ProducerFencedError:
    """``committed``: what is asked for was decided before. That this is not said means nothing."""
    return ProducerFencedError(
        f"transactional id {row.transactional_id!r} belongs to another producer, or a later transaction: "
        f"{row.owner or 'unknown'}, epoch {row.epoch}",
        current=row.epoch,
        owner=row.owner,
        **({"committed": True} if committed else {}),
    )
