"""Unsafe recovery: a replica goes on alone after the majority of its group is lost. On a store that nobody drives.

Raft decides nothing without a majority, and that is what keeps acknowledged
records. Where a majority of the disks is gone for good there is nothing left to
wait for: an operator chooses one replica, and accepts that what only the others
had is lost. ``stand_alone`` writes that down as an entry of the replica's own
log: a membership of which it is the only voter. It then leads as any only voter
does, keeps all that its log has, and the group is made whole again from it.

What the others promised to each other must not come back: some of their disks
may be found again, or were never lost but behind a broken network. So the
group has another **epoch** from then on, which is part of every later
membership, and of the name under which replicas prove to each other that they
belong together (``wire_name``). Replicas of different epochs refuse each
other's connections. Epoch 0 is the one in which every group begins.

Where nobody is left who could go on, not even with a part, the group can only
**begin anew**, with a new replica and without any history (``begin_anew``): in
another epoch, too, for the data that was thought to be lost may be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayqueue.errors import InvalidInputError, MembershipError
from rayqueue.ids import GroupId, Index, Term
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, HardState, LogStore
from rayqueue.raft._pysyncobj import MEMBERSHIP
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records.checksum import entry_crc


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a replica, by its own disk."""

    replica_set: ReplicaSet
    term: Term
    last_term: Term
    last_index: Index
    commit: Index
    """What it knows to be committed. More of what it has may be."""


def standing(store: LogStore) -> Standing:
    commit = Index(max(store.hard.commit, store.applied))
    return Standing(replica_set_of(store), store.hard.term, store.last_term, store.last_index, commit)


def replica_set_of(store: LogStore) -> ReplicaSet:
    """As of the end of its log; nobody, if it has not heard of its group yet."""
    for _, row in store.scan(MEMBERS, reverse=True):
        return ReplicaSet.decode(row)
    return ReplicaSet(frozenset())


def wire_name(group_id: GroupId, epoch: int) -> GroupId:
    """The name by which the group's replicas call it when they meet."""
    return group_id if epoch == 0 else GroupId(f"{group_id}!{epoch}")


def stand_alone(store: LogStore, epoch: int, commands: Sequence[bytes] = ()) -> Index:
    """From now on this replica is the only voter of its group, in this epoch. The entry that says so.

    ``commands`` are written behind it, such as the record of what was done. All of it is durable, or nothing.
    """
    known = replica_set_of(store)
    if store.replica_id not in known.voters:
        raise MembershipError(f"{store.replica_id} does not vote in {store.group_id}; it cannot go on alone")
    if store.damaged is not None:
        raise MembershipError(f"{store.replica_id} of {store.group_id} is damaged: {store.damaged}")
    if epoch <= known.epoch:
        raise InvalidInputError(f"{store.group_id} is in epoch {known.epoch} already, not before {epoch}")
    # An older copy does not know the terms that it has forgotten; beside it they may be remembered.
    term = Term(max(store.hard.term, store.last_term, store.waymark.term) + 1)
    alone = ReplicaSet(frozenset({store.replica_id}), epoch=epoch)
    first = index = Index(store.last_index + 1)
    entries: list[Entry] = []
    for payload in (bytes([MEMBERSHIP]) + alone.encode(), *commands):
        entries.append(Entry(index, term, payload, entry_crc(index, term, payload)))
        index = Index(index + 1)
    store.set_hard(HardState(term, store.replica_id, store.hard.commit))
    store.append(entries)
    store.put(MEMBERS, first.to_bytes(8, "big"), alone.encode())
    store.sync()
    return first


def begin_anew(store: LogStore, epoch: int, state: bytes) -> None:
    """A new store is the only voter of its group in this epoch. Its log begins behind a checkpoint of ``state``, from
    which replicas that join are made as well. Not synced yet: the state machine takes the state over before."""
    if store.last_index or store.hard.term or replica_set_of(store).everyone:
        raise MembershipError(f"{store.replica_id} of {store.group_id} is not new; it cannot begin anew")
    alone = ReplicaSet(frozenset({store.replica_id}), epoch=epoch)
    store.set_hard(HardState(Term(1), None, Index(0)))
    store.install(Checkpoint(Index(1), Term(1), alone.encode(), state))
