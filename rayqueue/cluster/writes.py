"""Writes: what many tasks have written, decided together. Spark's and Ray Data's jobs are such.

Owns these rows of the META table:

    l<writer>       the ledger of a writer: the batches that it has written

A task writes in a transaction of its own (``transactions.join``), so that one that
is run again, or dies, leaves nothing behind. The end of a write is one entry: it
looks into the ledger, commits the parts that count, aborts the others, and notes
the batch. So a batch is written once, however many drivers try.

A writer is forgotten when two things are true: there are more than the entry
says, with it as the one that has written least recently, and that was longer
ago than the entry says. One of a write that nobody comes back to, after an hour.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rayqueue.cluster.commands import EndWrite, JoinWrite
from rayqueue.cluster.ledger import Ledger
from rayqueue.cluster.tables import META
from rayqueue.cluster.transactions import Key, Transactions
from rayqueue.errors import BridgeError, RayQueueError, TooManyTransactionsError, TransactionAbortedError
from rayqueue.log.store import LogStore
from rayqueue.protocol.transactions import Transaction

_LEDGER = b"l"
ONCE_MS = 3_600_000
_FORGOTTEN_AT_ONCE = 100
_ABANDONED = b"abandoned"
"""An identity that no batch has."""


class WriterRow(msgspec.Struct, frozen=True, array_like=True):
    writer: str
    ledger: Ledger
    used_ms: int
    once: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WriterRow).decode


class Writes:
    """``age_ms``: how long ago a time is, by the coordinators' clock."""

    def __init__(self, store: LogStore, transactions: Transactions, age_ms: Callable[[int], int]) -> None:
        self._store = store
        self._transactions = transactions
        self._age_ms = age_ms
        self.load()

    def load(self) -> None:
        rows = [_decode(row) for _, row in self._store.scan(META, _LEDGER, bytes((_LEDGER[0] + 1,)))]
        self.writers = {row.writer: row for row in rows}

    def join(self, command: JoinWrite, now_ms: int) -> Transaction | RayQueueError:
        known = self.writers.get(command.writer)
        if known is not None and known.ledger.span_of(command.batch_id) is not None:
            return TransactionAbortedError(f"{command.write!r} is over: nothing that this task could write counts")
        return self._transactions.join(command, now_ms)

    def end(self, command: EndWrite, now_ms: int) -> tuple[bool, tuple[Key, ...]] | RayQueueError:
        """Whether its parts are committed by this, and what of it is aborted."""
        answer = self._commit(command, now_ms) if command.commit else self._abandon(command, now_ms)
        dropped = self._transactions.drop_parts(command.write, now_ms)
        return answer if isinstance(answer, RayQueueError) else (answer, dropped)

    def _commit(self, command: EndWrite, now_ms: int) -> bool | RayQueueError:
        writer = command.writer
        known = self.writers.get(writer)
        ledger = Ledger() if known is None else known.ledger
        try:
            if ledger.has(command.batch_id, command.identity, writer=writer):
                return False
        except BridgeError as refused:
            return refused
        if known is None:
            self._make_room(command)
            if len(self.writers) >= command.max_writers:
                return TooManyTransactionsError(
                    f"{len(self.writers)} writers are remembered, which is the limit "
                    "(cluster.max_transactional_ids): use the same ones again",
                    limit=len(self.writers),
                )
        lost = self._transactions.commit_parts(command.write, command.parts, now_ms)
        if lost is not None:
            return TransactionAbortedError(
                f"transaction {lost[1]} of producer {lost[0]}, a task's of {command.write!r}, was open for longer than "
                "its timeout, or was ended by an operator or another run; nothing is written",
                producer_id=lost[0],
                epoch=lost[1],
            )
        self._note(command, ledger, command.identity, now_ms)
        return True

    def _abandon(self, command: EndWrite, now_ms: int) -> bool:
        """What runs once does not come back: a task of it that is late is told so."""
        if command.once and command.writer not in self.writers:
            self._make_room(command)
            if len(self.writers) < command.max_writers:
                self._note(command, Ledger(), _ABANDONED, now_ms)
        return False

    def _note(self, command: EndWrite, ledger: Ledger, identity: bytes, now_ms: int) -> None:
        row = WriterRow(command.writer, ledger.add(command.batch_id, identity), now_ms, command.once)
        self.writers[row.writer] = row
        self._store.put(META, _LEDGER + row.writer.encode(), _encode(row))

    def _make_room(self, command: EndWrite) -> None:
        full = len(self.writers) >= command.max_writers
        old = [
            (row.used_ms, row.writer)
            for row in self.writers.values()
            if self._age_ms(row.used_ms) > (ONCE_MS if row.once else command.retention_ms) and (row.once or full)
        ]
        for _, writer in sorted(old)[:_FORGOTTEN_AT_ONCE]:
            del self.writers[writer]
            self._store.delete(META, _LEDGER + writer.encode())
