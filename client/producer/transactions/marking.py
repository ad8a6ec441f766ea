"""Decisions, shown to whoever has to know them: producers and the bridges' drivers do it for their own.

Nothing here is needed for a transaction to end. A partition that was not told asks
the coordinator, and the coordinator tells those that do not ask (ADR 38).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayqueue.errors import RayQueueError, TopicError
from rayqueue.net.interfaces import Routes, ask
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import (
    MAX_AT_ONCE,
    FinishTransactions,
    ForgetTransactionalId,
    MarkTransaction,
    Transaction,
)

_log = logging.getLogger(__name__)

_FINISH_MS = 2_000


async def marked(routes: Routes, place: TopicPartition, topic_id: int, call: MarkTransaction, *, whose: str) -> bool:
    """Whether this partition knows, or is gone. ``whose``: for the log."""
    try:
        await ask(routes, place, call, topic_id=topic_id)
    except TopicError:
        return True  # it is gone, and so is what was written there
    except RayQueueError as error:
        _log.warning("%s has no marker of %s yet, and will ask for it: %s", place, whose, error)
        return False
    return True


async def forgotten(routes: Routes, name: str, attempt: str) -> None:
    """Give back an id that was drawn for this run."""
    try:
        await routes.coordinator.call(
            ForgetTransactionalId(transactional_id=name, attempt=attempt), timeout_ms=_FINISH_MS
        )
    except RayQueueError as error:  # it expires
        _log.info("the transactional id %r was not given back: %s", name, error)


async def finished(routes: Routes, name: str, transactions: Sequence[Transaction]) -> None:
    """Tell the coordinator that all participants of these know. ``name``: the transactional id, or the write."""
    for first in range(0, len(transactions), MAX_AT_ONCE):
        call = FinishTransactions(transactional_id=name, finished=tuple(transactions[first : first + MAX_AT_ONCE]))
        try:
            await routes.coordinator.call(call, timeout_ms=_FINISH_MS)
        except RayQueueError as error:  # it finds out by itself
            _log.info("the coordinator was not told that %d transactions are done: %s", len(call.finished), error)
