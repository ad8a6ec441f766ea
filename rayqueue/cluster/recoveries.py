"""Recoveries: groups that went on without a majority because an operator said so, as the coordinator remembers them.

A row per group, its last one, for ever: it is the record of who gave up what, and
says in which epoch the group is, so that no replica of an older one is ever
started (``rayqueue.raft.recovery``). It is written before anything is done. The
keeper of whoever leads then starts the survivor alone, and strikes the
recovery out as soon as that one leads (``RecoverySettled``).

Owns these rows of the META table: y<group id>.
"""

from __future__ import annotations

import msgspec

from rayqueue.cluster.tables import META
from rayqueue.log.store import LogStore

_RECOVERY = b"y"


class Recovery(msgspec.Struct, frozen=True, array_like=True):
    """The audit record of one unsafe recovery."""

    group_id: str
    epoch: int
    survivor: str
    abandoned: tuple[tuple[str, str], ...]
    """The replicas that were given up, and the broker that each was on."""
    at_ms: int
    said: str
    """What may be lost, as it was told to whoever confirmed it."""
    settled: bool = False
    """The survivor leads in the new epoch."""
    begins_at: int | None = None
    """Nobody was left who could go on: the survivor is a new replica, which begins empty, at this offset."""


class Recoveries:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.load()

    def load(self) -> None:
        rows = self._store.scan(META, _RECOVERY, bytes([_RECOVERY[0] + 1]))
        found = (msgspec.msgpack.decode(row, type=Recovery) for _, row in rows)
        self.known: dict[str, Recovery] = {each.group_id: each for each in found}

    def epoch(self, group_id: str) -> int:
        known = self.known.get(group_id)
        return 0 if known is None else known.epoch

    def put(self, recovery: Recovery) -> Recovery:
        self.known[recovery.group_id] = recovery
        self._store.put(META, _RECOVERY + recovery.group_id.encode(), msgspec.msgpack.encode(recovery))
        return recovery

    def settle(self, group_id: str, epoch: int) -> None:
        known = self.known.get(group_id)
        if known is not None and known.epoch == epoch and not known.settled:
            self.put(msgspec.structs.replace(known, settled=True))
