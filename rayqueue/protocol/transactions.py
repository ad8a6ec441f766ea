"""Transactions: what producers, partitions and the coordinator say to each other (ADR 38).

A transaction is told by its producer id and epoch, and by nothing else. Each
pair names one transaction for ever: the coordinator gives the next epoch with
the end of the transaction before, so what is late of one can never be taken for
another's.

A producer, in this order:

1. ``InitTransactions`` to the coordinator, once: the first pair. Whoever had the
   id before is fenced.
2. Appends, whose batches carry the pair and the flag ``TRANSACTIONAL``; sequences
   begin at 0 in each partition, with each pair. ``StageOffsets`` and ``StageAcks``
   to the partitions where the positions and the jobs are.
3. When all of that is acknowledged: ``EndTransaction`` to the coordinator, which
   decides. The answer has the next pair, and a seal for each participant.
4. ``MarkTransaction`` with its seal to each participant. Once all have answered,
   everything is visible, or gone; that is said with the next ``EndTransaction``
   (``finished``), or by ``FinishTransactions``.

If the producer dies, or does not bother, participants and coordinator do step 4
by themselves: leaders of partitions ask for the fate of what stays open
(``ResolveTransactions``), and the coordinator sees to it that every participant
has its marker before it forgets the decision.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rayqueue.protocol.call import Call
from rayqueue.protocol.jobs import Runs, Settled, Token, Worker

MAX_EPOCH = 2**31 - 1
"""A producer whose epoch gets there goes on with a new producer id."""
MAX_TRANSACTION_TIMEOUT_MS = 24 * 3_600_000
MAX_PARTICIPANTS = 10_000
MAX_AT_ONCE = 1_000
IDS_BOUND = "cluster.max_transactional_ids"
"""The ``bound`` of a ``TooManyTransactionsError`` that says so."""
MAX_WRITE_PARTS = 10_000
"""Of a message. Tasks are fewer."""
MAX_WRITE_TASKS = 900
"""Tasks of one write that have a transaction each, with attempts that have failed: all may write into one partition,
which has 1,000 open at most, of others too."""

TransactionalId = Annotated[str, Meta(min_length=1, max_length=255)]
ProducerId = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
RaftGroup = Annotated[str, Meta(min_length=1, max_length=400)]
WriteName = TransactionalId
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TRANSACTION_TIMEOUT_MS)]
Owner = Annotated[str, Meta(max_length=256)]


class Transaction(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The identity of a transaction."""

    producer_id: ProducerId
    epoch: Epoch


# -- answers -------------------------------------------------------------------------


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """The fate of a transaction, which nothing changes any more."""

    committed: bool
    seals: tuple[bytes, ...]
    """For ``MarkTransaction``: what proves the fate to each participant, in the order in which they were named."""
    next: Transaction
    """The producer's next one."""


class SealedPart(msgspec.Struct, frozen=True, array_like=True):
    """For ``MarkTransaction``: the fate of a transaction, and what proves it to each participant, in their order."""

    producer_id: int
    epoch: int
    committed: bool
    seals: tuple[bytes, ...]


class WriteEnded(msgspec.Struct, frozen=True, array_like=True):
    """The fate of a write."""

    written: bool
    """Whether it is this call that has let it be seen."""
    parts: tuple[SealedPart, ...] = ()
    """Those that were named, if they are committed; then those that are aborted, whose participants are ``others``. Not
    all if they are many, or known already: partitions ask for what they are not told."""


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A transaction that has not ended in a partition."""

    producer_id: int
    epoch: int
    age_ms: int
    """Since its first batch, stage of offsets or of acknowledgements, by the partition's clock."""
    records: int
    first_offset: int | None
    """Readers of committed records wait here; None if it has only staged."""
    groups: tuple[str, ...] = ()
    """Whose positions it has staged."""
    jobs: int = 0
    """How many acknowledgements it has staged."""


class TransactionInfo(msgspec.Struct, frozen=True, array_like=True):
    """A transactional id, and where its transaction stands."""

    transactional_id: str
    producer_id: int
    epoch: int
    """Of the transaction that is open, or comes next."""
    owner: str
    """For humans: where the producer runs."""
    timeout_ms: int
    state: str
    """``idle``: nothing has been open for longer than a moment. ``open``. ``committing``: decided, and some partitions
    may have no marker yet."""
    age_ms: int = 0
    """Of what is open, in the partition that has had it open for longest."""
    partitions: tuple[str, ...] = ()
    """Raft groups in which it is open, or which have no marker yet."""


# -- calls to the coordinator ----------------------------------------------------------


class InitTransactions(Call, frozen=True, kw_only=True):
    """Take a transactional id. What its producer of before had open is aborted, and that producer is fenced.

    May be repeated with the same ``attempt``: it is answered as the first time for as long as nobody else has taken
    the id. With ``resume`` nobody is fenced: the pair that this attempt's producer has now, as after
    ``TransactionAbortedError``; ``ProducerFencedError`` if somebody else has taken the id.
    """

    answer_type: ClassVar[Any] = Transaction
    transactional_id: TransactionalId
    attempt: Annotated[str, Meta(min_length=1, max_length=64)]
    """Drawn by the producer, unique for ever, the same for its whole life."""
    timeout_ms: TimeoutMs
    """A transaction that is open for longer is aborted. At most ``cluster.max_transaction_timeout_ms``."""
    owner: Owner = ""
    """For humans: where the producer runs."""
    resume: bool = False


class EndTransaction(Call, frozen=True, kw_only=True):
    """Decide the fate of a transaction, for good: one entry of the coordinator's log.

    Only after all of it was acknowledged by its participants: what is not is lost. May be repeated; the answer is that
    of the first time. ``TransactionAbortedError`` if it was to be committed and has been aborted (it took too long, or
    an operator did it): the producer may go on (``InitTransactions`` with ``resume``). ``ProducerFencedError`` if
    somebody else has the id now. ``UnknownTransactionError`` if the id is forgotten: nothing of it will be seen.
    """

    answer_type: ClassVar[Any] = Decided
    transactional_id: TransactionalId
    producer_id: ProducerId
    epoch: Epoch
    commit: bool
    participants: Annotated[tuple[RaftGroup, ...], Meta(max_length=MAX_PARTICIPANTS)]
    """The Raft group ids of all partitions that have a batch, positions or acknowledgements of it, or may have."""
    finished: Annotated[tuple[Transaction, ...], Meta(max_length=MAX_AT_ONCE)] = ()
    """Earlier ones of this producer whose participants all have answered ``MarkTransaction``."""


class FinishTransactions(Call, frozen=True, kw_only=True):
    """All participants of these have answered ``MarkTransaction``. For a producer that ends no further transaction."""

    answer_type: ClassVar[Any] = None
    transactional_id: TransactionalId
    finished: Annotated[tuple[Transaction, ...], Meta(min_length=1, max_length=MAX_AT_ONCE)]


class ForgetTransactionalId(Call, frozen=True, kw_only=True):
    """This attempt's producer has ended, and nobody will take up its work: for ids that were drawn for one run.

    An id that names work stays, for it fences whoever was at that work before. Answers whether it is gone; not if
    somebody else has it, or a commit is still to be told: then it expires. May be repeated.
    """

    answer_type: ClassVar[Any] = bool
    transactional_id: TransactionalId
    attempt: Annotated[str, Meta(min_length=1, max_length=64)]


class JoinWrite(Call, frozen=True, kw_only=True):
    """A task of a write takes a transaction of its own, which ends with the write, or after ``timeout_ms`` (ADR 40).

    A repetition gives another one. What nobody names in ``EndWrite`` is aborted. ``TransactionAbortedError`` if the
    batch was written, or abandoned, before: nothing that this task could write would count.
    ``TransactionTooLargeError`` if ``MAX_WRITE_TASKS`` have one.
    """

    answer_type: ClassVar[Any] = Transaction
    write: WriteName
    writer: TransactionalId
    batch_id: int
    """As for ``EndWrite``."""
    timeout_ms: TimeoutMs
    owner: Owner = ""


class WritePart(msgspec.Struct, frozen=True, array_like=True):
    """The transaction of a task that counts."""

    producer_id: ProducerId
    epoch: Epoch
    participants: Annotated[tuple[RaftGroup, ...], Meta(min_length=1, max_length=MAX_PARTICIPANTS)]


class EndWrite(Call, frozen=True, kw_only=True):
    """Decide a write, for good: one entry of the coordinator's log commits all of its parts that are named, aborts the
    others, and puts the batch into its writer's ledger.

    Only after all of it was acknowledged. May be repeated: what is in the ledger is not written again (``written``).
    ``TransactionAbortedError`` if a part was open for longer than its timeout, or an operator has ended it;
    ``BatchConflictError``, ``BatchForgottenError`` as the ledger says. Nothing of it will be seen then.
    """

    answer_type: ClassVar[Any] = WriteEnded
    write: WriteName
    writer: TransactionalId
    batch_id: int
    identity: Annotated[bytes, Meta(max_length=256)] = b""
    """What the id stands for."""
    once: bool = False
    """Nobody comes back with this writer: it is remembered for an hour."""
    commit: bool = True
    """Without it all parts are aborted; the batch may be tried again, unless its writer writes once."""
    parts: Annotated[tuple[WritePart, ...], Meta(max_length=MAX_WRITE_PARTS)] = ()
    others: Annotated[tuple[RaftGroup, ...], Meta(max_length=MAX_PARTICIPANTS)] = ()
    """Where tasks that do not count may have written."""


class OpenFor(msgspec.Struct, frozen=True, array_like=True):
    """A transaction that is open in a partition, and for how long."""

    producer_id: ProducerId
    epoch: Epoch
    age_ms: Annotated[int, Meta(ge=0)]


class ResolveTransactions(Call, frozen=True, kw_only=True):
    """The leader of a partition to the coordinator: what is the fate of these? One of ``open``, ``committed`` and
    ``aborted`` for each. What has been open for longer than its producer's timeout is aborted by this."""

    answer_type: ClassVar[Any] = tuple[str, ...]
    group_id: RaftGroup
    transactions: Annotated[tuple[OpenFor, ...], Meta(min_length=1, max_length=MAX_AT_ONCE)]


class ListTransactions(Call, frozen=True, kw_only=True):
    """All transactional ids; of what is open, what has been for a second or more."""

    answer_type: ClassVar[Any] = tuple[TransactionInfo, ...]


class AbortTransaction(Call, frozen=True, kw_only=True):
    """An operator ends what a transactional id has open. Answers whether this pair was still open: a later
    transaction of the same id stays."""

    answer_type: ClassVar[Any] = bool
    transactional_id: TransactionalId
    producer_id: ProducerId
    epoch: Epoch


CoordinatorTransactionCall = (
    InitTransactions
    | EndTransaction
    | FinishTransactions
    | ForgetTransactionalId
    | JoinWrite
    | EndWrite
    | ResolveTransactions
    | ListTransactions
    | AbortTransaction
)


# -- calls to a partition ----------------------------------------------------------------


class StageOffsets(Call, frozen=True, kw_only=True):
    """Let a group continue at these offsets of this partition once the transaction is committed.

    Fenced by the generation now, as ``Commit`` is; until the transaction has ended, a newer generation cannot claim the
    partition (``TransactionPendingError``, retriable). May be repeated; of two stages of a group the later counts.
    ``ProducerFencedError`` if the transaction has ended here; ``TransactionTooLargeError`` and
    ``TooManyTransactionsError`` by the partition's bounds.
    """

    answer_type: ClassVar[Any] = None
    producer_id: ProducerId
    epoch: Epoch
    group: str
    generation: int
    offsets: dict[int, int]
    """Lane to the offset of the next record to read."""
    metadata: bytes = b""
    seal: bytes = b""
    """Of the grant, as for ``Commit``."""


class StageAcks(Call, frozen=True, kw_only=True):
    """Let these jobs of a lease be done once the transaction is committed. If it is aborted they have failed, and are
    tried again by the queue's rules. Until then nobody else gets them, however long the lease lasts.

    Answers which of them are not the worker's any more: abort, for their work will be done again. May be repeated.
    """

    answer_type: ClassVar[Any] = Settled
    producer_id: ProducerId
    epoch: Epoch
    worker: Worker
    token: Token
    jobs: Runs


class MarkTransaction(Call, frozen=True, kw_only=True):
    """End a transaction in this partition, as the coordinator has decided. Answers whether it was open here.

    The first marker of a transaction counts, and there is only one kind for each; a repetition changes nothing.
    ``UnknownTransactionError`` if the seal is not the coordinator's.
    """

    answer_type: ClassVar[Any] = bool
    producer_id: ProducerId
    epoch: Epoch
    commit: bool
    seal: bytes


class GetTransactions(Call, frozen=True, kw_only=True):
    """The open transactions of this partition, the oldest first."""

    answer_type: ClassVar[Any] = tuple[OpenTransaction, ...]


PartitionTransactionCall = StageOffsets | StageAcks | MarkTransaction | GetTransactions
