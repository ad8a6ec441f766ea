"""The plan of a rebalance: which replicas are still to be moved, as rows of the coordinator's table.

Owns these rows of META, beside the catalog's:

    p<group id>\\0<replica> a replica that is still to be moved
    r                      the rebalance that is under way

Whoever leads takes the moves from here, one after the other. A stop forgets
those that were not begun; another rebalance plans the rest anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from rayqueue.cluster.commands import BeginRebalance
from rayqueue.cluster.moves import Planned
from rayqueue.cluster.tables import META
from rayqueue.errors import ChangeInProgressError, RayQueueError
from rayqueue.log.store import LogStore
from rayqueue.protocol.topics import PartitionInfo

_PLANNED = b"p"
_REBALANCE = b"r"

_encode = msgspec.msgpack.Encoder().encode


class Rebalance(msgspec.Struct, frozen=True, array_like=True):
    """A row: the rebalance that is under way. What it has still to do are the planned moves."""

    number: int
    """Of no other one."""
    moves: int
    """As many were planned."""
    size_bytes: int
    begun_ms: int = 0


class Plans:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.rebalance: Rebalance | None = None
        """The one that is under way."""
        self.planned: dict[tuple[str, str], Planned] = {}
        """By the replica that is to go: Raft group, id."""

    def load(self) -> None:
        """Become what the table says."""
        self.planned = {}
        for _, row in self._store.scan(META, _PLANNED, bytes([_PLANNED[0] + 1])):
            planned = msgspec.msgpack.decode(row, type=Planned)
            self.planned[planned.group_id, planned.remove] = planned
        under_way = self._store.get(META, _REBALANCE)
        self.rebalance = None if under_way is None else msgspec.msgpack.decode(under_way, type=Rebalance)

    def begin(
        self,
        command: BeginRebalance,
        number: int,
        partition: Callable[[str], PartitionInfo | None],
        brokers: Collection[str],
    ) -> Rebalance | RayQueueError:
        if self.rebalance is not None:
            return ChangeInProgressError("a rebalance is under way already; stop it, or wait for its end")
        for group_id, remove, broker, size_bytes in command.moves:
            found = partition(group_id)
            held = {} if found is None else {each.replica_id: each.broker for each in found.replicas}
            key = group_id, remove
            if remove in held and broker in brokers and broker not in held.values() and key not in self.planned:
                self.planned[key] = Planned(group_id, remove, broker, size_bytes)
                self._store.put(META, _row_key(key), _encode(self.planned[key]))
        total_bytes = sum(each.size_bytes for each in self.planned.values())
        begun = self.rebalance = Rebalance(number, len(self.planned), total_bytes, command.now_ms)
        self._store.put(META, _REBALANCE, _encode(begun))
        return begun

    def end(self, number: int) -> None:
        """0 is whichever is under way."""
        if self.rebalance is not None and number in (0, self.rebalance.number):
            self.drop(tuple(self.planned))
            self.rebalance = None
            self._store.delete(META, _REBALANCE)

    def drop(self, replicas: Iterable[tuple[str, str]]) -> None:
        """These are moved, gone, or cannot be moved as planned any more."""
        for group_id, replica_id in replicas:
            if self.planned.pop((group_id, replica_id), None) is not None:
                self._store.delete(META, _row_key((group_id, replica_id)))


def _row_key(replica: tuple[str, str]) -> bytes:
    return _PLANNED + replica[0].encode() + b"\0" + replica[1].encode()
