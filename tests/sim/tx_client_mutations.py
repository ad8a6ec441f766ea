"""Each rule of a client's transactions, switched off: the simulator must notice every time."""

from __future__ import annotations

from typing import Any

from rayqueue.client.consumer.subscription import Subscription
from rayqueue.client.producer.transactions.life import aborted
from rayqueue.client.producer.transactions.tasks import TransactionTasks
from rayqueue.client.producer.transactions.transaction import Transaction
from rayqueue.errors import OutcomeUnknownError, TransactionAbortedError
from rayqueue.protocol.transactions import Decided, EndTransaction
from tests.sim.invariants import BrokenRule, Invariant
from tests.sim.tx_mutations import Replaced, TxMutation


async def _end_at_once(tasks: TransactionTasks) -> list[Any]:
    """The end is asked for before all is acknowledged, and nobody minds what is not."""
    tasks._accumulator.refuse(tasks._no_transaction)
    tasks._sender.drop(aborted(tasks.transactional_id))
    tasks.life._doom = None
    return tasks.life.flushed(tasks._touched())


async def _unsure_is_aborted(tasks: TransactionTasks, call: EndTransaction) -> Decided:
    """A commit that the coordinator has not answered is taken for an abort."""
    try:
        return await tasks._routes.coordinator.call(call, idempotent=False)  # type: ignore[no-any-return]
    except OutcomeUnknownError as error:
        raise TransactionAbortedError(str(error)) from None


def _stay(tx: Transaction, *, committed: bool) -> None:
    """After an abort the consumer goes on, and not back."""
    tx._over = True
    for staging in filter(None, tx._readers.values()):
        staging.committed()


def _keep_quiet(subscription: Subscription) -> set[Any]:
    """What was polled of a partition that has gone to another member counts."""
    _take_forfeited(subscription)
    return set()


_take_forfeited = Subscription.take_forfeited


def _real(
    name: str, finding: str, breaks: Invariant, replaced: Replaced, *also: Invariant, faults: Any, first_seed: int = 0
) -> TxMutation:
    rule = BrokenRule(breaks, frozenset(also))
    return TxMutation(name, finding, rule, replaced, faults=frozenset(faults), first_seed=first_seed, real=True)


_NETWORK = ("partition", "kill", "transfer", "app_cut", "app_reset", "slow")

TX_CLIENT_MUTATIONS = (
    _real(
        "ends-before-all-is-acknowledged",
        "a transaction is committed without what was on its way",
        Invariant.TRUE_FATE,
        (TransactionTasks, "_flush", _end_at_once),
        Invariant.EXACTLY_ONCE,
        faults=_NETWORK,
    ),
    _real(
        "unsure-is-aborted",
        "a producer is told that a transaction is aborted which is committed",
        Invariant.TRUE_FATE,
        (TransactionTasks, "_decision", _unsure_is_aborted),
        Invariant.EXACTLY_ONCE,
        faults=("kill", "app_reset"),
        first_seed=7,
    ),
    _real(
        "goes-on-after-an-abort",
        "what was polled for a transaction that was aborted is not polled again",
        Invariant.EXACTLY_ONCE,
        (Transaction, "_ended", _stay),
        faults=("kill", "transfer"),
    ),
    _real(
        "lost-partitions-count",
        "results are committed of what another member has taken over",
        Invariant.EXACTLY_ONCE,
        (Subscription, "take_forfeited", _keep_quiet),
        faults=("app_pause", "app_cut", "app_zombie"),
        first_seed=6,
    ),
)
