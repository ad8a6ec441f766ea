"""The log's side of the engine: what a replica takes from its leader, and what follows from what is in its log.

Appends and checkpoints come in by ``follower``'s rule, and are answered once
they are durable. Who belongs to the group is said by the log (the MEMBERS table has a
row per change), from the moment that the entry is there, committed or not. Checkpoints
are saved here, and what nobody needs any more is trimmed.

When others join the only voter of a group, that is remembered beside its store
before it counts (``_mark_growth``): a copy from before would know of nobody whom it
could ask what it has forgotten (``rayqueue.raft.doubt``).
"""

from __future__ import annotations

from itertools import islice
from random import Random

from msgspec.structs import replace

from rayqueue.config import RaftSettings
from rayqueue.errors import DamagedLogError, InvariantBrokenError, MembershipError
from rayqueue.ids import Index, ReplicaId
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, LogStore
from rayqueue.log.waymark import Waymark
from rayqueue.raft._pysyncobj import MEMBERSHIP
from rayqueue.raft.doubt import Membership, WaryElections
from rayqueue.raft.follower import Refused, accept
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.messages import AppendEntries, AppendReply, InstallSnapshot
from rayqueue.raft.replica_set import ReplicaSet

MEMBERSHIP_TAG = bytes([MEMBERSHIP])


class ReplicatedLog(WaryElections):
    """The part of the engine that every replica has, whether it leads or not. ``RaftEngine`` adds the rest."""

    def __init__(self, store: LogStore, machine: StateMachine, settings: RaftSettings, rng: Random, now: float) -> None:
        self.machine = machine
        self._tick_wanted = True  # something came that the stock engine must look at
        self._stirred = True  # something came that may give work
        self.halted = False
        """Nothing may be written any more, for good."""
        self._durable = store.last_index
        self._joining: tuple[ReplicaId, Index] | None = None
        """The voter whom the newest membership adds, and that membership's entry."""
        self._unmarked: Index | None = None
        """The entry by which others joined this replica, until it is remembered beside the store."""
        self._bytes_since_checkpoint = 0
        super().__init__(store, settings, rng, now)

    def damaged(self, why: str) -> None:
        """Stored bytes are not what was written."""
        raise NotImplementedError

    @staticmethod
    def bootstrap(store: LogStore, replica_set: ReplicaSet) -> None:
        """Write a new group's first membership. Once in a group's life, the same at each of its first replicas."""
        if store.last_index or store.hard.term or store.get(MEMBERS, _index_key(Index(0))):
            raise MembershipError(
                f"{store.group_id} exists already at {store.replica_id}; it cannot be bootstrapped again"
            )
        store.put(MEMBERS, _index_key(Index(0)), replica_set.encode())
        store.sync()

    # -- what a leader sends ---------------------------------------------------------------

    def _on_append(self, sender: ReplicaId, message: AppendEntries) -> None:
        if not self._follow(sender, message.term):
            self._answer_the_past(sender)
            return
        full = self.store.full
        if full and sum(len(entry.payload) for entry in message.entries) > self.store.small_bytes:
            message = replace(message, entries=())  # it can be asked what it has; there is no room for more
        outcome = accept(self.store, message, self.commit)
        if isinstance(outcome, Refused):
            self.send_after_sync(
                sender, AppendReply(self.term, False, message.prev_index, outcome.hint, message.round, full)
            )
            return
        if outcome.truncated_from is not None:
            self._durable = min(self._durable, Index(outcome.truncated_from - 1))
            self._forget_replica_set(outcome.truncated_from)
        for entry in outcome.appended:
            self._note_replica_set(entry)
        self.commit = max(self.commit, self._verified_commit(message))
        self.send_after_sync(
            sender, AppendReply(self.term, True, message.prev_index, outcome.match, message.round, full)
        )

    def _answer_the_past(self, sender: ReplicaId) -> None:
        """Tell a leader of an older term that there is a newer one, and nothing else.

        The sender may lead that newer term itself by now. Echoing the round of its old message would then confirm
        a leadership that nobody was asked about.
        """
        self.send_after_sync(sender, AppendReply(self.term, False, Index(0), Index(0), 0))

    def _verified_commit(self, message: AppendEntries) -> Index:
        """The leader's commit index, but never past what this very message proved to match."""
        return min(message.commit, Index(message.prev_index + len(message.entries)))

    def _on_snapshot(self, sender: ReplicaId, message: InstallSnapshot) -> None:
        if not self._follow(sender, message.term):
            self._answer_the_past(sender)
            return
        if message.index > self.commit:
            if self.store.term_at(message.index) == message.index_term:
                self.commit = message.index  # the log has it all; the checkpoint only says that it is committed
            else:
                self._install(message)
        self.send_after_sync(sender, AppendReply(self.term, True, message.index, message.index, message.round))

    def _install(self, message: InstallSnapshot) -> None:
        self.store.install(Checkpoint(message.index, message.index_term, message.members, message.state))
        self.machine.restore(message.state)
        self.applied = self.commit = self._durable = message.index
        self._bytes_since_checkpoint = 0
        self._use_replica_set(ReplicaSet.decode(message.members))

    # -- checkpoints ----------------------------------------------------------------------

    def maintain(self, segment_bytes: int, max_entries: int) -> bool:
        """Save a checkpoint once enough was applied; trim what nobody needs. True if there is more to trim.

        Each replica does this by itself: where its log begins is nobody else's business.
        """
        store = self.store
        if store.damaged is not None or self.halted:
            return False
        try:
            return self._save_and_trim(segment_bytes, max_entries)
        except DamagedLogError as error:
            self.damaged(str(error))
            return False

    def _save_and_trim(self, segment_bytes: int, max_entries: int) -> bool:
        store = self.store
        if self._bytes_since_checkpoint >= segment_bytes:
            term = store.term_at(self.applied)
            if term is None:
                raise InvariantBrokenError(f"applied entry {self.applied} is not in the log")
            replica_set = self._stored_replica_set(self.applied).encode()
            store.save_checkpoint(Checkpoint(self.applied, term, replica_set, self.machine.checkpoint()))
            self._bytes_since_checkpoint = 0
        needed = self.machine.first_needed()
        trimmable = [index for index in store.checkpoints() if index < needed]
        return bool(trimmable) and not store.trim_to(trimmable[-1], max_entries)

    # -- the replica set ----------------------------------------------------------------

    @property
    def replica_set_version(self) -> Index | None:
        """The entry that made the membership what it is, which grows with each change; None if it is not committed."""
        newest = next(self.store.scan(MEMBERS, reverse=True), None)
        index = Index(0) if newest is None else _key_index(newest[0])
        return None if index > self.commit else index

    @property
    def replica_set_settled(self) -> bool:
        """The membership is committed. Where its rows cannot be read, it is not known to be."""
        try:
            return self.replica_set_version is not None
        except DamagedLogError as error:
            self.damaged(str(error))
            return False

    def _stored_replica_set(self, index: Index) -> ReplicaSet:
        """The membership in force at ``index``."""
        for _, row in self.store.scan(MEMBERS, stop=_index_key(Index(index + 1)), reverse=True):
            return ReplicaSet.decode(row)
        return ReplicaSet(frozenset())

    def _membership(self) -> Membership:
        """The voters that may decide: of the newest committed membership, or of one that comes after it."""
        voters: frozenset[ReplicaId] = frozenset()
        learners: frozenset[ReplicaId] = frozenset()
        index = Index(0)
        for key, row in self.store.scan(MEMBERS, reverse=True):
            members = ReplicaSet.decode(row)
            voters, learners = voters | members.voters, learners | members.learners
            if _key_index(key) <= self.commit:
                index = _key_index(key)
                break
        return Membership(index, voters, learners - voters)

    def _note_replica_set(self, entry: Entry) -> None:
        """A membership counts from the moment its entry is in the log, committed or not."""
        if entry.payload[:1] == MEMBERSHIP_TAG:
            self.store.put(MEMBERS, _index_key(entry.index), entry.payload[1:])
            was_alone = self._only_voter
            self._use_replica_set(ReplicaSet.decode(entry.payload[1:]))
            if was_alone and not self._only_voter:
                self._unmarked = entry.index

    def _forget_replica_set(self, first: Index) -> None:
        """The log was cut at ``first``: the memberships after it never happened."""
        if self._unmarked is not None and self._unmarked >= first:
            self._unmarked = None
        keys = [key for key, _ in self.store.scan(MEMBERS, start=_index_key(first))]
        for key in keys:
            self.store.delete(MEMBERS, key)
        if keys:
            self._use_replica_set(self._stored_replica_set(Index(first - 1)))

    # -- growing from one ---------------------------------------------------------------------

    @property
    def must_mark(self) -> bool:
        """Something is to be remembered beside the store before anything else is promised: ``synced`` does it."""
        return self._unmarked is not None

    def _mark_growth(self) -> None:
        """The entry is durable. It does not count before the mark is."""
        if self._unmarked is not None:
            mark = self._mark_at(self._unmarked)
            self.store.set_waymark(mark, durable=True)
            self._unmarked = None

    def _find_unmarked(self) -> None:
        """At a start: the process before may have died in between, or been of a release that left no mark."""
        grown: Index | None = None
        for key, row in self.store.scan(MEMBERS, reverse=True):
            if ReplicaSet.decode(row).voters == {self.replica_id}:
                break
            grown = _key_index(key)
        else:
            return  # it never was alone
        if grown is not None and self._mark_at(grown) > self.store.waymark:
            self._unmarked = grown

    def _mark_at(self, index: Index) -> Waymark:
        """Of a log that was trimmed since, its base: no copy from before reaches that either."""
        index = max(index, self.store.base_index)
        return Waymark(self.store.term_at(index) or 0, index, self.store.waymark.records)

    # -- the membership in force --------------------------------------------------------------

    def _counted(self, voter: ReplicaId, match: Index) -> Index:
        """How much counts of what a voter has confirmed. A new one's word counts once it knows itself that it votes:
        if the leader were restored from an older copy, nobody else might, and what the two had decided would be lost
        (``rayqueue.raft.doubt``)."""
        joining = self._joining
        return Index(0) if joining is not None and joining[0] == voter and match < joining[1] else match

    def _find_joining(self) -> tuple[ReplicaId, Index] | None:
        rows = list(islice(self.store.scan(MEMBERS, reverse=True), 2))
        if len(rows) < 2:
            return None
        (key, newest), (_, before) = rows
        added = ReplicaSet.decode(newest).voters - ReplicaSet.decode(before).voters
        return (min(added), _key_index(key)) if added else None

    def _use_replica_set(self, replica_set: ReplicaSet) -> None:
        self.replica_set = replica_set
        self._joining = self._find_joining()
        self._stirred = self._tick_wanted = True  # another majority may be reached already
        self.set_peers(replica_set.voters - {self.replica_id}, replica_set.learners - {self.replica_id})
        if self._joining is not None and self._joining[0] != self.replica_id:
            self.peer_forgot(self._joining[0])  # what it confirmed as a learner; its next answer says it again


def _index_key(index: Index) -> bytes:
    return index.to_bytes(8, "big")


def _key_index(key: bytes) -> Index:
    return Index(int.from_bytes(key, "big"))
