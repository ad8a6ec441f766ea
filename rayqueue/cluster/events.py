"""Events: what happened to brokers and replicas, for whoever looks after the cluster.

``changes`` compares two looks at the cluster and says what happened between
them: pure, so that nobody else has to remember to report anything. The keeper
of the coordinator that leads writes the events to its log (one form for all,
``line``) and into the coordinator's table, which keeps the last ``KEPT``. A new
leader begins with its first look, so what happens while leaders change may be
missing; what *is* at any moment is in the metadata, not here.

``Events`` owns these rows of the META table: z<number>.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import msgspec

from rayqueue.cluster.moves import Move
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.tables import META
from rayqueue.log.store import LogStore
from rayqueue.protocol.topics import TopicInfo

KEPT = 256
MAX_TEXT = 500

_EVENT = b"z"

KINDS = (
    "broker_joined",
    "broker_away",
    "broker_back",
    "broker_given_up",
    "broker_draining",
    "node_draining",
    "broker_forgotten",
    "replica_lost",
    "replica_found",
    "replica_replaced",
    "move_begun",
    "move_undone",
    "group_recovered",
    "under_replicated",
    "fully_replicated",
)
"""Every kind there is: the tag of the counter ``rayqueue_events``."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    at_ms: int
    kind: str
    subject: str
    """The broker, or the Raft group."""
    text: str
    number: int = 0
    """They are counted from 1. Given when it is written down."""


class Look(NamedTuple):
    """What the keeper saw at one moment."""

    brokers: Mapping[str, bool]
    """All that are known, and whether each is draining."""
    here: Set[str]
    given_up: Mapping[str, str]
    """Brokers that are not waited for any longer, and why."""
    topics: Mapping[str, TopicInfo]
    lost: Mapping[tuple[str, str], str]
    moves: Mapping[str, Move]
    recoveries: Mapping[str, Recovery]
    leaving: Mapping[str, str] = {}
    """Brokers whose nodes Ray drains, and what becomes of their replicas."""


def under_replicated(look: Look) -> dict[str, str]:
    """Partitions that have fewer copies in service than they should, by Raft group, and why."""
    found: dict[str, str] = {}
    for info in look.topics.values():
        for partition in info.partitions:
            away = [each for each in partition.replicas if each.broker not in look.here]
            lost = [each for each in partition.replicas if (partition.group_id, each.replica_id) in look.lost]
            ill = {each.replica_id for each in (*away, *lost)}
            wanted, well = info.settings.replication, len(partition.replicas) - len(ill)
            if well < wanted:
                why = [f"{each.broker} is away" for each in away]
                why += [f"{each.replica_id} on {each.broker} has lost its data" for each in lost]
                found[partition.group_id] = f"{well} of {wanted} copies: " + ("; ".join(why) or "being made")
    return found


def changes(before: Look, after: Look, now_ms: int) -> list[Event]:
    """In the order in which an operator wants to read them: causes first."""
    told: list[tuple[str, str, str]] = [*_of_brokers(before, after)]
    for (group_id, replica_id), why in sorted(after.lost.items()):
        if (group_id, replica_id) not in before.lost:
            told.append(("replica_lost", group_id, f"{replica_id}: {why}"))
    told += _of_moves(before, after)
    for group_id, replica_id in sorted(before.lost.keys() - after.lost.keys()):
        if replica_id in (_replicas(after, group_id) or ()):
            told.append(("replica_found", group_id, f"{replica_id} runs again with all its data"))
    for group_id, recovery in sorted(after.recoveries.items()):
        known = before.recoveries.get(group_id)
        if known is None or known.epoch < recovery.epoch:
            told.append(("group_recovered", group_id, recovery.said))
    was, now = under_replicated(before), under_replicated(after)
    told += [("under_replicated", group_id, why) for group_id, why in sorted(now.items()) if was.get(group_id) != why]
    there = {partition.group_id for info in after.topics.values() for partition in info.partitions}
    told += [
        ("fully_replicated", group_id, "all copies are in service")
        for group_id in sorted((was.keys() - now.keys()) & there)
    ]
    return [Event(now_ms, kind, subject, text[:MAX_TEXT]) for kind, subject, text in told]


def _of_brokers(before: Look, after: Look) -> Iterable[tuple[str, str, str]]:
    for broker, draining in sorted(after.brokers.items()):
        if broker not in before.brokers:
            yield "broker_joined", broker, "it is new here"
        elif broker in before.here and broker not in after.here:
            yield "broker_away", broker, "its node is gone"
        elif broker not in before.here and broker in after.here:
            yield "broker_back", broker, "its node is here again"
        if draining and not before.brokers.get(broker, False):
            yield "broker_draining", broker, "it is being emptied"
        if broker in after.leaving and broker not in before.leaving:
            yield "node_draining", broker, f"Ray drains its node: {after.leaving[broker]}"
        if broker in after.given_up and broker not in before.given_up:
            yield "broker_given_up", broker, f"its replicas are made anew elsewhere: {after.given_up[broker]}"
    for broker in sorted(before.brokers.keys() - after.brokers.keys()):
        yield "broker_forgotten", broker, "nothing is in service there, and its node is gone"


def _of_moves(before: Look, after: Look) -> Iterable[tuple[str, str, str]]:
    for group_id, move in sorted(before.moves.items()):
        if after.moves.get(group_id) == move:
            continue
        held = _replicas(after, group_id)
        if held is None:
            continue  # its topic was deleted
        if move.add in held or (not move.broker and move.remove not in held):
            yield "replica_replaced", group_id, _told(move)
        else:
            yield "move_undone", group_id, f"not after all: {_told(move)}"
    for group_id, move in sorted(after.moves.items()):
        if before.moves.get(group_id) != move:
            yield "move_begun", group_id, _told(move)


def _told(move: Move) -> str:
    """One more copy, one less, or one for another."""
    if not move.broker:
        what = f"without {move.remove}"
    else:
        what = f"{move.add} on {move.broker}" + (f" instead of {move.remove}" if move.remove else "")
    return f"{what}: {move.reason.value}, {move.why}"


def _replicas(look: Look, group_id: str) -> set[str] | None:
    for info in look.topics.values():
        for partition in info.partitions:
            if partition.group_id == group_id:
                return {each.replica_id for each in partition.replicas}
    return None


def line(event: Event) -> str:
    """The form of every event in a log."""
    return f"event={event.kind} subject={event.subject} {event.text}"


class Events:
    """The last ones, in the coordinator's table."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.load()

    def load(self) -> None:
        rows = self._store.scan(META, _EVENT, bytes([_EVENT[0] + 1]))
        self.known: list[Event] = [msgspec.msgpack.decode(row, type=Event) for _, row in rows]

    def add(self, events: Iterable[Event]) -> None:
        number = self.known[-1].number if self.known else 0
        for event in events:
            number += 1
            kept = msgspec.structs.replace(event, number=number)
            self.known.append(kept)
            self._store.put(META, _key(number), msgspec.msgpack.encode(kept))
        for old in self.known[:-KEPT]:
            self._store.delete(META, _key(old.number))
        del self.known[:-KEPT]


def _key(number: int) -> bytes:
    return _EVENT + number.to_bytes(8, "big")
