"""Transactions as an operator sees them: which are open, for how long and whose; and the end of one that hangs."""

from __future__ import annotations

from rayqueue.errors import UnknownTransactionError
from rayqueue.net.interfaces import Routes
from rayqueue.protocol.transactions import AbortTransaction, ListTransactions, TransactionInfo


async def list_transactions(routes: Routes) -> list[TransactionInfo]:
    """Of all transactional ids, by name."""
    found: tuple[TransactionInfo, ...] = await routes.coordinator.call(ListTransactions())
    return sorted(found, key=lambda each: each.transactional_id)


async def abort_transaction(routes: Routes, transactional_id: str) -> bool:
    """End what an id has open now, and nothing that it begins later. False if that had ended meanwhile."""
    for each in await list_transactions(routes):
        if each.transactional_id == transactional_id:
            call = AbortTransaction(transactional_id=transactional_id, producer_id=each.producer_id, epoch=each.epoch)
            ended: bool = await routes.coordinator.call(call)
            return ended
    raise UnknownTransactionError(
        f"there is no transactional id {transactional_id!r}", transactional_id=transactional_id
    )
