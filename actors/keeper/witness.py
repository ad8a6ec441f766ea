"""The witness: says what happened to brokers and replicas, in the log, in the coordinator's table and in figures.

Part of the keeper, and speaks where the keeper acts. It compares each look with
the one before (``rayqueue.cluster.events``), so that no step of the keeper or of
its mover has to report itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.metrics import ClusterMetrics
from rayqueue.cluster.commands import NoteEvents
from rayqueue.cluster.events import Look, changes, line, under_replicated
from rayqueue.errors import UpgradeUnfinishedError
from rayqueue.ids import ReplicaId

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView

_log = logging.getLogger(__name__)

_AT_ONCE = 64
"""Events of one look that are written down; the rest of a flood is in the log only."""


class Witness:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands, replica_id: ReplicaId) -> None:
        self._hands = hands
        self._metrics = ClusterMetrics(replica_id)
        self._before: Look | None = None

    def lead_no_more(self) -> None:
        if self._before is not None:
            self._before = None
            self._metrics.report(0, 0, 0, 0, 0)

    async def look(
        self, view: ClusterView, here: Collection[str], given_up: Mapping[str, str], leaving: Mapping[str, str]
    ) -> None:
        brokers = {name: row.draining for name, row in view.brokers.items()}
        now = Look(brokers, set(here), dict(given_up), view.topics, view.lost, view.moves, view.recoveries, leaving)
        away = len(brokers.keys() - now.here)
        self._metrics.report(len(under_replicated(now)), len(now.moves), len(now.lost), away, len(view.commits))
        before, self._before = self._before, now
        events = [] if before is None or before == now else changes(before, now, int(time.time() * 1000))
        for event in events:
            _log.warning("%s", line(event))
            self._metrics.count(event.kind)
        if events:
            rows = tuple((each.at_ms, each.kind, each.subject, each.text) for each in events[:_AT_ONCE])
            try:
                await self._hands.change(NoteEvents(rows))
            except UpgradeUnfinishedError as error:
                _log.info("the events are in the log only: %s", error)
