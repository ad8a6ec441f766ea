"""The status of a running replica, kept where other threads see it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rayqueue.ids import Offset
from rayqueue.log.store import LogStore
from rayqueue.raft.clients import ClientTransport
from rayqueue.raft.engine import RaftEngine
from rayqueue.replica.measures import SyncTimes
from rayqueue.replica.room import Room
from rayqueue.replica.scrub import Scrub
from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)


class StatusBoard:
    """Any thread may read ``status``; the rest belongs to the engine's."""

    status: Status
    """As of about a second ago at most. Who leads, and whether all is well, as it is now."""

    def __init__(
        self,
        engine: RaftEngine,
        store: LogStore,
        transport: ClientTransport,
        room: Room,
        syncs: SyncTimes,
        scrub: Scrub,
        bounds: Callable[[], tuple[Offset, Offset]],
    ) -> None:
        self._engine = engine
        self._store = store
        self._transport = transport
        self._room = room
        self._syncs = syncs
        self._scrub = scrub
        self._bounds = bounds
        self._seen: tuple[object, ...] = ()
        self.renew()

    @property
    def role(self) -> str:
        engine = self._engine
        if engine.is_leader:
            return "leader"
        return "follower" if self._store.replica_id in engine.replica_set.voters else "learner"

    def look(self) -> None:
        """Renew it if something is another that others must know at once."""
        engine = self._engine
        damaged = self._store.damaged
        doubted = engine.doubted
        seen = (engine.term, engine.leader, engine.is_leader, engine.replica_set, self._room.full, damaged, doubted)
        if seen != self._seen:
            self._seen = seen
            status = self.renew()
            who = status.group_id, status.replica_id
            _log.info("%s %s: %s of term %d, leader %s", *who, status.role, status.term, status.leader)
            if doubted is not None:
                _log.warning("%s %s: %s", *who, doubted)

    def renew(self) -> Status:
        engine, store, syncs = self._engine, self._store, self._syncs
        start_offset, high_watermark = self._bounds()
        self.status = Status(
            group_id=store.group_id,
            replica_id=store.replica_id,
            role=self.role,
            leader=engine.leader,
            term=engine.term,
            start_offset=start_offset,
            high_watermark=high_watermark,
            base_index=store.base_index,
            last_index=store.last_index,
            commit=engine.commit,
            applied=engine.applied,
            voters=tuple(sorted(engine.replica_set.voters)),
            learners=tuple(sorted(engine.replica_set.learners)),
            address=self._transport.address,
            size_bytes=store.size_bytes(),
            read_only=self._room.full,
            damaged=store.damaged,
            forgetful=tuple(sorted(engine.forgetful)),
            doubted=engine.doubted,
            in_sync=tuple(sorted(engine.in_sync)),
            lags=tuple(sorted(engine.lags.items())),
            scrubbed=self._scrub.progress,
            acknowledged=store.waymark.records,
            settled=engine.replica_set_settled,
            syncs=syncs.count,
            sync_ms=syncs.total_s * 1000,
            last_term=store.last_term,
            epoch=engine.replica_set.epoch,
            peers=tuple(sorted(engine.peers)),
            connected=tuple(sorted(self._transport.connected)),
        )
        return self.status
