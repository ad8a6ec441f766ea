"""Each rule of transactions, switched off: the simulator must notice every time.

As in ``mutations``, methods are replaced while a schedule runs; ``faults`` narrows
what happens to what the rule is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from rayqueue.cluster import transactions as cluster
from rayqueue.cluster.commands import FinishTransactions, InitTransactions, JoinWrite
from rayqueue.cluster.fates import Fates
from rayqueue.cluster.ledger import Ledger
from rayqueue.cluster.transactions import CommitRow, IdRow
from rayqueue.cluster.writes import Writes
from rayqueue.ids import Index, Offset
from rayqueue.partition import Partition, reader
from rayqueue.partition.answers import Staged
from rayqueue.partition.producers import Producers
from rayqueue.partition.transactions import open as opened
from rayqueue.partition.transactions.commands import StageOffsets
from rayqueue.partition.transactions.endings import Endings
from rayqueue.partition.transactions.open import StagedPosition
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.transactions import AbortTransaction, ResolveTransactions, Transaction
from rayqueue.replica import appends
from rayqueue.replica.carrying import Carrier
from rayqueue.replica.tail import Tail
from tests.sim.app_world import MIXED
from tests.sim.frame import Mutation
from tests.sim.invariants import BrokenRule, Invariant
from tests.sim.tx_world import TxWorld

Key = tuple[int, int]
Replaced = tuple[Any, str, Any]

_APPS = frozenset(("app_pause", "app_kill", "app_zombie", "take_over"))
_ALL = _APPS | {"partition", "kill", "transfer", "pause", "app_cut", "app_reset"}


_BESIDE = ("together", "careless", "operated", "trimmed", "queued", "fresh", "expiring", "real")


class TxMutation(Mutation):
    """``beside``: another rule that is switched off with it, without which nobody would notice. ``narrowed``: what
    there is in the world besides producers and readers, as ``TxWorld`` has it."""

    make = TxWorld

    def __init__(
        self,
        name: str,
        finding: str,
        rule: BrokenRule,
        replaced: Replaced,
        *beside: Replaced,
        faults: Any = _ALL,
        **narrowed: Any,
    ) -> None:
        there: Any = dict.fromkeys(_BESIDE, False) | narrowed
        super().__init__(name, finding, rule, *replaced, faults, **there)
        self._beside = beside

    @contextmanager
    def active(self) -> Iterator[None]:
        with super().active(), ExitStack() as stack:
            for each in self._beside:
                stack.enter_context(patch.object(*each))
            yield


def _forget_aborted(tail: Tail, lanes: Any, aborted: Any) -> None:
    tail.grown.update(lanes)


def _end_as_committed(known: opened.Transactions, key: Key, *, commit: bool) -> Any:
    """The index keeps nothing of what was aborted."""
    return _end(known, key, commit=True)


_end = opened.Transactions.end


def _unfenced(producers: Producers, producer_id: int, epoch: int, index: Index, settings: Any) -> None:
    """A marker leaves the producer's epoch as it is."""


def _same_pair(known: cluster.Transactions, key: Key) -> Key:
    """All transactions of a producer have one epoch."""
    return key


def _no_room(known: cluster.Transactions, row: CommitRow) -> None:
    """A commit is not kept until all know it."""


def _finish_unmarked(carrier: Carrier, group_id: str, rows: list[CommitRow], partitions: Mapping[str, Any]) -> Any:
    """Commits are forgotten before their participants know them."""
    return carrier._change(FinishTransactions(tuple([row.key for row in rows]), group_id))


def _take_along(known: cluster.Transactions, command: InitTransactions, now_ms: int) -> Any:
    """A newer producer goes on where the older one is."""
    row = known.ids.get(command.transactional_id)
    if row is None:
        return _init(known, command, now_ms)
    known._put(replace(row, attempt=command.attempt))
    return Transaction(*row.key)


_init = cluster.Transactions.init


def _tell_unwritten(fates: Fates, now_s: float, call: ResolveTransactions, reply: Callable[[Any], None]) -> None:
    """What is late is said to be aborted, and nobody has decided it."""

    def told() -> tuple[str, ...]:
        late, known = fates._late(call.transactions), fates._machine.transactions
        keys = [(each.producer_id, each.epoch) for each in call.transactions]
        return tuple(["aborted" if key in late else known.fate(key, call.group_id) for key in keys])

    fates._read(told, reply)


def _stage_anyway(endings: Endings, index: Index, key: Key, command: StageOffsets) -> Staged:
    """Positions are staged whatever generation has been here."""
    position = StagedPosition(command.generation, command.offsets, command.metadata)
    endings._partition.transactions.stage_position(key, command.group, position)
    return Staged()


def _nothing_open(known: opened.Transactions, lane: int | None = None) -> Offset | None:
    return None


def _some_parts(known: cluster.Transactions, write: str, parts: Any, now_ms: int) -> None:
    """What is not the write's any more is passed over, and the rest is committed."""
    for producer_id, epoch, participants in parts:
        row = known.current((producer_id, epoch))
        if row is not None and row.write == write:
            known._put_commit(CommitRow(write, *row.key, participants, now_ms))
            known._go_on(replace(row, used_ms=now_ms))


def _lend_again(known: cluster.Transactions, command: JoinWrite, now_ms: int) -> Transaction:
    """An id goes from one task to the next with the epoch that it had."""
    if not known.free:
        return _join(known, command, now_ms)
    row = known.ids[min(known.free)]
    lent = replace(row, epoch=row.epoch - 1, timeout_ms=command.timeout_ms, used_ms=now_ms, write=command.write)
    known._put(lent)
    return Transaction(*lent.key)


_join = cluster.Transactions.join


def _join_anyway(writes: Writes, command: JoinWrite, now_ms: int) -> Transaction:
    return writes._transactions.join(command, now_ms)


def _committed_for_all(known: cluster.Transactions, key: Key, group_id: str) -> str:
    """What is committed is so wherever something of it is."""
    fate = _fate(known, key, group_id)
    return "committed" if fate == "aborted" and key in known.commits else fate


_fate = cluster.Transactions.fate


def _again_with_others(known: cluster.Transactions, row: IdRow, commit: bool, named: int) -> Any:
    """A repetition may name other participants."""
    return _again(known, row, commit, row.last_named)


_again = cluster.Transactions._again


def _abort_unwritten(fates: Fates, call: AbortTransaction, reply: Callable[[Any], None]) -> None:
    """An operator is told that a transaction is aborted, and nobody has decided it."""
    row = fates._machine.transactions.current((call.producer_id, call.epoch))
    reply(row is not None and row.transactional_id == call.transactional_id)


def _tell_unsure(fates: Fates, now_s: float, call: ResolveTransactions, reply: Callable[[Any], None]) -> None:
    """A coordinator that does not know that it was deposed tells what it knows."""
    with patch.object(fates, "_read", lambda find, told: told(find())):
        _resolve(fates, now_s, call, reply)


_resolve = Fates._resolve


def _any_seal(seals: Seals, seal: bytes, raft_group: str, producer_id: int, epoch: int, *, commit: bool) -> None:
    """Whoever says that something is decided is believed."""


def _expire_all(known: cluster.Transactions, is_old: Callable[[int], bool]) -> tuple[str, ...]:
    """Ids are forgotten of which a commit is still to be told."""
    commits, known.commits = known.commits, {}
    gone = _expire(known, is_old)
    known.commits = commits
    return gone


_expire = cluster.Transactions.expire


_WRITES = _APPS | {"partition", "transfer"}


_READS = BrokenRule(Invariant.COMMITTED_READS, frozenset({Invariant.EXACTLY_ONCE, Invariant.PROGRESS}))
_ATOMIC = BrokenRule(
    Invariant.ATOMIC,
    frozenset({Invariant.EXACTLY_ONCE, Invariant.TRUE_FATE, Invariant.PROGRESS, Invariant.COMMITTED_READS}),
)

TX_MUTATIONS = (
    TxMutation(
        "tail-forgets-aborted",
        "readers at the end of the log see what was aborted",
        _READS,
        (Tail, "ended", _forget_aborted),
    ),
    TxMutation(
        "tail-shows-open",
        "readers at the end of the log see what is open",
        _READS,
        (opened.Transactions, "first_open", _nothing_open),
    ),
    TxMutation(
        "disk-shows-open",
        "readers of the disk see what is open",
        _READS,
        (reader, "first_open", lambda rows, lane: None),
    ),
    TxMutation(
        "one-epoch-for-all",
        "a late send or marker of one transaction counts for the next (KIP-890)",
        _ATOMIC,
        (cluster.Transactions, "_after", _same_pair),
        (Producers, "fence", _unfenced),
    ),
    TxMutation(
        "commit-is-not-kept",
        "participants without a marker are told that a committed transaction was aborted",
        _ATOMIC,
        (cluster.Transactions, "_put_commit", _no_room),
    ),
    TxMutation(
        "claims-do-not-wait",
        "a new owner begins before the position that a transaction of the old one then commits",
        BrokenRule(Invariant.EXACTLY_ONCE),
        (opened.Transactions, "pending", lambda known, group, generation: None),
    ),
    TxMutation(
        "stage-without-generation",
        "who has lost the partition commits results, and not the position",
        BrokenRule(Invariant.EXACTLY_ONCE),
        (Endings, "_stage_offsets", _stage_anyway),
    ),
    TxMutation(
        "marker-does-not-fence",
        "a send that comes after the marker of its transaction opens it again",
        _ATOMIC,
        (Producers, "fence", _unfenced),
    ),
    TxMutation(
        "finished-without-markers",
        "a commit is forgotten before its participants know it, and they are told that it was aborted",
        _ATOMIC,
        (Carrier, "_carry", _finish_unmarked),
    ),
    TxMutation(
        "late-is-not-decided",
        "one partition is told that a late transaction was aborted, and its producer commits it",
        _ATOMIC,
        (Fates, "_resolve", _tell_unwritten),
    ),
    TxMutation(
        "index-forgets-aborted",
        "readers see what was aborted",
        _READS,
        (opened.Transactions, "end", _end_as_committed),
    ),
    TxMutation(
        "newer-does-not-fence",
        "two producers of one id write in one transaction, and one of them is told what becomes of the other's",
        BrokenRule(Invariant.TRUE_FATE, _ATOMIC.also | {Invariant.ATOMIC}),
        (cluster.Transactions, "init", _take_along),
        faults=frozenset(("app_zombie",)),
    ),
    TxMutation(
        "ledger-is-ignored",
        "a batch is written by each driver that tries it",
        BrokenRule(Invariant.WRITTEN_ONCE, frozenset({Invariant.DROPPED})),
        (Ledger, "span_of", lambda ledger, batch_id: None),
        faults=_WRITES,
        together=True,
    ),
    TxMutation(
        "write-in-part",
        "a write is committed without the tasks whose transactions were over",
        BrokenRule(Invariant.WRITE_WHOLE),
        (cluster.Transactions, "commit_parts", _some_parts),
        faults=_WRITES,
        together=True,
    ),
    TxMutation(
        "others-stay-open",
        "what does not count of a write stays open after its end",
        BrokenRule(Invariant.DROPPED),
        (cluster.Transactions, "drop_parts", lambda known, write, now_ms: ()),
        faults=_WRITES,
        together=True,
    ),
    TxMutation(
        "joins-what-is-over",
        "a task that is late gets a transaction that nobody ends",
        BrokenRule(Invariant.DROPPED),
        (Writes, "join", _join_anyway),
        faults=_WRITES,
        together=True,
    ),
    TxMutation(
        "lent-as-it-is",
        "two tasks write in one transaction",
        BrokenRule(Invariant.ONE_TASK),
        (cluster.Transactions, "join", _lend_again),
        faults=_WRITES,
        together=True,
    ),
    TxMutation(
        "committed-for-all",
        "what is late of a committed transaction counts where nobody has waited for it",
        BrokenRule(Invariant.ATOMIC),
        (cluster.Transactions, "fate", _committed_for_all),
        careless=True,
    ),
    TxMutation(
        "ends-with-others",
        "a partition that was not named is shown a commit",
        BrokenRule(Invariant.ATOMIC),
        (cluster.Transactions, "_again", _again_with_others),
        careless=True,
    ),
    TxMutation(
        "operator-is-told-too-soon",
        "an operator is told that he has ended what is committed then",
        BrokenRule(Invariant.TRUE_FATE),
        (Fates, "_abort", _abort_unwritten),
        operated=True,
    ),
    TxMutation(
        "trims-what-is-open",
        "what is trimmed is committed then, and nobody can read it",
        BrokenRule(Invariant.READABLE),
        (Partition, "_before_open", lambda partition, offset: Offset(offset)),
        trimmed=True,
    ),
    TxMutation(
        "news-to-old-replicas",
        "a batch of a transaction is written while a replica of the release before is in the group",
        BrokenRule(Invariant.UPGRADABLE),
        (appends, "check_all_know", lambda version: None),
        faults=frozenset({MIXED}),
    ),
    TxMutation(
        "deposed-tells-fates",
        "a coordinator that was deposed says that what it has not heard of was aborted",
        _ATOMIC,
        (Fates, "_resolve", _tell_unsure),
        faults=frozenset(("deposed",)),
        first_seed=15,
        fresh=True,
    ),
    TxMutation(
        "any-seal-will-do",
        "a partition believes whoever says that a transaction is committed",
        _ATOMIC,
        (Seals, "check_marker", _any_seal),
        careless=True,
    ),
    TxMutation(
        "ids-expire-with-commits",
        "whoever asks for its commit again is told that its id is unknown",
        BrokenRule(Invariant.FATE_KEPT),
        (cluster.Transactions, "expire", _expire_all),
        expiring=True,
    ),
)
