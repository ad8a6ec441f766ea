"""The Raft engine of one replica: messages and time in, messages and answers out.

The engine does no I/O, reads no clock and rolls no dice of its own. The
replica's loop (``rayqueue.replica.loop``), in a thread or in the simulator,
repeats one step:

    engine.receive(now, event)          any number of events
    engine.propose(payload, context)    any number of proposals
    ready = engine.step(now)
    send ready.early                    before the disk
    answer ready.done
    store.sync()                        if store.must_sync
    engine.synced(); send ready.late    only after the disk

What must be durable before what is sent:

- ``late`` messages are promises: votes, requests for votes, acknowledgements.
  They must not leave before ``sync`` returned. If the disk is full they are
  dropped and ``disk_full`` is called, which gives up the entries that were not
  durable, and ``sync`` is tried again: what is left is small.
- ``early`` messages promise nothing. A leader's entries are among them, so the
  followers write while the leader does. That is safe because the leader counts
  itself as one of the majority only in a later step, after its own ``sync``.

PySyncObj (``_pysyncobj.StockRaft``) runs elections, commit and step-down. The
remedies for what it does wrong (docs/raft.md) are here and in the modules this one uses: ``election``
(pre-vote, loyalty, one vote each), ``doubt`` (a restored store), ``follower`` (never truncate a match),
``progress`` (probe, then pipeline), ``leadership`` (nothing outlives its term),
``replicated_log`` (who belongs to the group is said by the log).

Damage is the one failure that is not fatal. Whoever finds that stored bytes are
not what was written, the engine itself or anybody who reads beside it, says so
to ``damaged``: from then on this replica leads nobody, now and after a restart.
Any other exception out of these methods is fatal: the caller ends the process.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec import Struct

from rayqueue.config import RaftSettings
from rayqueue.errors import (
    ChangeInProgressError,
    DamagedLogError,
    InvariantBrokenError,
    LeadershipLostError,
    LearnerBehindError,
    MembershipError,
    NotInSyncError,
    NotLeaderError,
    QueueFullError,
    RayQueueError,
    StorageError,
    TransferFailedError,
)
from rayqueue.ids import Index, ReplicaId
from rayqueue.log.store import Entry, LogStore
from rayqueue.raft._pysyncobj import FOLLOWER, LEADER, MEMBERSHIP, NO_OP
from rayqueue.raft.leadership import LIVE_HEARTBEATS, Leadership, Transfer
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.messages import (
    Account,
    AppendEntries,
    AppendReply,
    Inquiry,
    InstallSnapshot,
    Message,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    VoteReply,
)
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.replicated_log import MEMBERSHIP_TAG, ReplicatedLog
from rayqueue.raft.room import Picture, heir, majority_has_room
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received
from rayqueue.records.checksum import entry_crc


class Done(Struct, frozen=True):
    """The answer to a proposal, a confirmation or a transfer. ``result`` may be an error."""

    context: Any
    result: Any


class Ready(Struct):
    """The wishes of one step to the outside world. See the module's text for the order."""

    early: list[tuple[ReplicaId, Message]] = []
    late: list[tuple[ReplicaId, Message]] = []
    done: list[Done] = []


class RaftEngine(ReplicatedLog):
    """One replica's part in its group."""

    def __init__(self, store: LogStore, machine: StateMachine, settings: RaftSettings, rng: Random, now: float) -> None:
        self._leadership: Leadership | None = None
        self._heartbeat_due = False
        self._proposals: list[tuple[bytes, Any]] = []
        self._confirms: list[Any] = []
        self._unreachable: set[ReplicaId] = set()
        self._disk_full = False
        self._abstains: str | None = None
        self._ready = Ready()
        super().__init__(store, machine, settings, rng, now)
        self.replica_set = self._stored_replica_set(store.last_index)
        self._use_replica_set(self.replica_set)
        self._find_unmarked()
        self._resolve_doubt()  # if there is nobody to ask
        if self._only_voter:  # there is nobody whose word to wait for
            self._elect_now()

    # -- what the outside may ask ---------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if another step would make progress without any event or passing of time."""
        if self._ready.done:
            return True  # answers of a leadership that ended between two steps
        if self.store.damaged is not None or self.silent:
            return False
        if self._proposals:
            return True  # made after the step, by what runs then: retention, the coordinator's clock
        return self.applied < self._may_apply or (self.is_leader and self._only_voter and self.commit < self._durable)

    @property
    def silent(self) -> bool:
        """True while nothing can be written, and so nothing is heard or promised."""
        return self._disk_full or self.halted

    @property
    def next_deadline(self) -> float:
        """When a step is due though nothing happened."""
        if self.silent:
            return float("inf")
        return self.next_heartbeat if self.is_leader else self.election_deadline

    @property
    def next_index(self) -> Index:
        """The index that the next proposal gets, if this replica leads."""
        return Index(self.store.last_index + len(self._proposals) + 1)

    def match_of(self, peer: ReplicaId) -> Index:
        """The index up to which a follower's log is known to match, on the leader."""
        return self._leading().progress[peer].match

    @property
    def peers(self) -> frozenset[ReplicaId]:
        """Those that it must be able to talk to: the others of its group, and whoever it asks in doubt of itself."""
        return (self.replica_set.everyone | self.asked) - {self.replica_id}

    @property
    def forgetful(self) -> frozenset[ReplicaId]:
        """On the leader: replicas that have lost what they had confirmed to it."""
        return self._leadership.forgetful if self._leadership is not None else frozenset()

    @property
    def in_sync(self) -> frozenset[ReplicaId]:
        """On the leader: the replicas that are near the end of its log, itself included."""
        leadership = self._leadership
        return frozenset() if leadership is None else leadership.in_sync(self.now) | {self.replica_id}

    @property
    def lags(self) -> dict[ReplicaId, int]:
        """On the leader: how many entries each of the others is not known to have."""
        return {} if self._leadership is None else self._leadership.lags()

    def propose(self, payload: bytes, context: Any) -> None:
        """Append an entry. Raises before anything is written; afterwards the answer comes as ``Done``."""
        leadership = self._leading()
        if leadership.transfer is not None:
            target = leadership.transfer.target
            raise NotLeaderError(f"leadership is moving to {target}; ask there", leader=target)
        if leadership.uncommitted_bytes + len(payload) > self.settings.max_uncommitted_bytes:
            raise QueueFullError(
                f"{leadership.uncommitted_bytes} bytes wait for a majority already; retry later",
                waiting_bytes=leadership.uncommitted_bytes,
            )
        if len(payload) >= self.settings.append_batch_bytes:
            raise InvariantBrokenError("an entry must be smaller than an append batch; the caller should have checked")
        leadership.uncommitted_bytes += len(payload)
        self._proposals.append((payload, context))
        self._stirred = True

    def confirm_leadership(self, context: Any) -> None:
        """Ask a majority whether this replica still leads: the answer is None, or the error that it does not.

        With the answer None, everything that was committed when it was asked is applied here: read away.
        """
        self._leading()
        self._confirms.append(context)
        self._stirred = True

    def change_replicas(self, replica_set: ReplicaSet, context: Any) -> None:
        """Replace the replica set. One voter at a time, and never the leader itself."""
        leadership = self._leading()
        moved = replica_set.voters ^ self.replica_set.voters
        if len(moved) > 1:
            raise MembershipError("only one voter may change at a time", moved=sorted(moved))
        if self.replica_id not in replica_set.voters:
            raise MembershipError("a leader cannot remove itself: transfer the leadership first")
        if self._change_in_progress():
            raise ChangeInProgressError("the change before this one is not committed yet; retry")
        for replica_id in replica_set.voters - self.replica_set.voters:
            known = leadership.progress.get(replica_id)
            lag = self.store.last_index - known.match if known is not None and known.match else None
            if lag is None or lag > self.settings.promote_lag_entries:
                lacks = "all" if lag is None else lag
                raise LearnerBehindError(f"{replica_id} lacks {lacks} entries; wait", replica_id=replica_id)
            if not self._answers(replica_id):
                # Beside a voter that is lost, one that is dead when it becomes a voter may leave no majority.
                raise LearnerBehindError(f"{replica_id} has not answered lately; wait", replica_id=replica_id)
        for replica_id in self.replica_set.voters - replica_set.voters:
            if not replica_set.is_majority(each for each in replica_set.voters if self._answers(each)):
                # One that is well leaves, one that is dead stays: the rest could not even decide this.
                why = "those that answer are no majority of the rest; wait"
                raise NotInSyncError(f"without {replica_id} {why}", replica_id=replica_id)
        if any(payload[:1] == MEMBERSHIP_TAG for payload, _ in self._proposals):
            raise ChangeInProgressError("the change before this one is not written yet; retry")
        self.propose(MEMBERSHIP_TAG + replica_set.encode(), context)

    def _answers(self, replica_id: ReplicaId) -> bool:
        """It has, to this leader and lately."""
        if replica_id == self.replica_id:
            return True
        leadership = self._leading()
        known = leadership.progress.get(replica_id)
        patience_s = LIVE_HEARTBEATS * self.settings.heartbeat_ms / 1000
        return known is not None and known.match > 0 and leadership.silent_s(replica_id, self.now) <= patience_s

    def _change_in_progress(self) -> bool:
        """True while a membership may still be undone: its entry, or this leader's first one, is not committed.

        The second half matters as much: a new leader may hold a membership that a majority never saw.
        """
        return self.commit < self.noop_index or self.replica_set_version is None

    def transfer_leadership(self, target: ReplicaId, now: float, context: Any) -> None:
        """Hand the leadership to a voter: it catches up, then is told to start an election.

        Answered with None once this replica leads no more, or with the error that it still does. Nothing is taken
        meanwhile, so one that is far behind, or away, is refused at once (``NotInSyncError``).
        """
        leadership = self._leading()
        if target == self.replica_id or target not in self.replica_set.voters:
            raise MembershipError(f"{target} cannot take over: it is not another voter", replica_id=target)
        if leadership.transfer is not None:
            raise ChangeInProgressError(f"leadership is moving to {leadership.transfer.target} already")
        lag = max(0, self.commit - leadership.progress[target].match)
        if target in self._unreachable or lag > self.settings.promote_lag_entries:
            why = "cannot be reached" if target in self._unreachable else f"lacks {lag} committed entries"
            raise NotInSyncError(f"{target} {why}; it cannot lead now", replica_id=target, lag=lag)
        leadership.transfer = Transfer(target, now + self.settings.election_timeout_min_ms / 1000, context)
        self._stirred = True

    def hand_over(self, now: float, context: Any) -> None:
        """Let the voter lead that can take over soonest, before this replica is stopped on purpose.

        Answered with None once this replica leads no more, at once if it does not lead; or with the error that it
        still does, which a planned stop does not wait for.
        """
        leadership = self._leadership
        if leadership is None:
            self._answer(context, None)
            return
        able = {
            peer: progress
            for peer, progress in leadership.progress.items()
            if peer in self.replica_set.voters and peer not in self._unreachable
        }
        if not able:
            raise TransferFailedError("no other voter can be reached")
        # One whose disk is full would have to hand it on.
        target = min(able, key=lambda peer: (able[peer].full, -able[peer].match, peer))
        self.transfer_leadership(target, now, context)

    # -- the step ----------------------------------------------------------------------

    def receive(self, now: float, event: Event) -> None:
        """Take one event of the transport."""
        self.now = now
        if type(event) is Received:
            self._unreachable.discard(event.sender)
            if not self.silent:
                try:
                    self._take(event.sender, event.message)
                except DamagedLogError as error:
                    self.damaged(str(error))
            return
        self._stirred = self._tick_wanted = True
        match event:
            case PeerUp(peer):
                self._unreachable.discard(peer)
                self._inquire(peer)
                if self._leadership is not None and peer in self._leadership.progress:
                    self._leadership.progress[peer].lost()
                self._peer_came(peer)
            case PeerDown(peer, dead):
                self._unreachable.add(peer)
                if self._leadership is not None and peer in self._leadership.progress:
                    self._leadership.progress[peer].lost()
                if dead and peer == self.leader:
                    self._leader_died()

    def step(self, now: float) -> Ready:
        """Let time pass, write the proposals, and say what to send."""
        self.now = now
        if not self.silent and (self._stirred or now > self.next_deadline or self.busy):
            self._stirred = False
            try:
                self._advance()
            except DamagedLogError as error:
                self.damaged(str(error))
        ready, self._ready = self._ready, Ready()
        return ready

    def _advance(self) -> None:
        if self._tick_wanted or self.now > self.next_deadline:
            self._tick_wanted = False
            self._prepare_election()
            self.stock_tick()
            self._transferred = self._transferred and self._campaign
        elif self.applied < self._may_apply:
            self.apply_committed()
        if self._leadership is not None:
            self._lead(self._leadership)

    def _lead(self, leadership: Leadership) -> None:
        self._write_proposals()
        self._finish_confirmations()
        if leadership.transfer is not None:
            self._drive_transfer()
        if self._heartbeat_due:
            leadership.on_heartbeat(self.now)
            self._yield_for_space(leadership)
        self._replicate()

    def synced(self) -> None:
        """The store's buffer is durable. ``StorageError``: what must be remembered beside it is not. Then nothing new
        counts, and nothing may be promised."""
        self._mark_growth()
        self._durable = self.store.last_index
        if self._disk_full or self._only_voter:
            # A group of one commits by its own disk alone.
            self._stirred = self._tick_wanted = True
        self._disk_full = False
        self._settle_doubt()

    def disk_full(self) -> None:
        """``sync`` failed. Entries that are not durable are given up: nobody was promised that they are here.
        Promise nothing, lead nobody, until ``synced``."""
        if not self._disk_full:
            self._disk_full = True
            self.set_role(FOLLOWER)
            self.leader = None
        # A group of one counts its first entry of a term before it is durable. That entry is small, and stays.
        kept = max(self._durable, self.commit) if self._only_voter else self._durable
        first = Index(kept + 1)
        if self.store.last_index >= first:
            self.store.truncate_from(first)
            self._forget_replica_set(first)
            self.commit = min(self.commit, self.store.last_index)  # whoever leads will say it again

    @property
    def refuses_records(self) -> bool:
        """True if this replica leads and what takes space could not be stored by a majority. Small entries can."""
        leadership = self._leadership
        if leadership is None or not (self.store.full or leadership.full_peers):
            return False
        return self.store.full or not majority_has_room(self.replica_set, leadership.full_peers)

    def _full_replicas(self, leadership: Leadership) -> frozenset[ReplicaId]:
        return leadership.full_peers | {self.replica_id} if self.store.full else leadership.full_peers

    def damaged(self, why: str) -> None:
        """Stored bytes are not what was written. Others have them: this replica stops leading at once, answers what
        waits, and never leads again. It still votes for others and takes what the leader sends."""
        try:
            self.store.mark_damaged(why)
        except (StorageError, OSError):
            self.halted = True  # a restart would not know it, so from here on nothing may be written or promised
        self._ready.early.clear()  # what it was about to say as the leader
        if self.role != FOLLOWER:
            self.set_role(FOLLOWER)
            self.leader = None

    def abstain(self, why: str) -> None:
        """Nothing is damaged, but this replica can go on with its group no more. What it has stays as it is."""
        self.halted, self._abstains = True, why
        self._ready.early.clear()
        if self.role != FOLLOWER:
            self.set_role(FOLLOWER)
        self.leader = None

    @property
    def doubted(self) -> str | None:
        return self._abstains or super().doubted

    def halt(self, why: str) -> None:
        """Damage that ends writing, too: the replica also votes and acknowledges no more."""
        self.halted = True
        self.damaged(why)

    # -- leading, and not any more ---------------------------------------------------------

    def on_role_change(self, role: int) -> None:
        super().on_role_change(role)
        if role == LEADER:
            peers = self.replica_set.everyone - {self.replica_id}
            self._leadership = Leadership(self.term, self.store, peers, self.settings)
            self._leadership.set_learners(self.replica_set.learners)
        elif self._leadership is not None:
            self._lose_leadership(self._leadership)

    def _lose_leadership(self, lost: Leadership) -> None:
        self._leadership = None
        error = LeadershipLostError(
            f"{self.replica_id} stopped leading before the outcome was known; ask the new leader"
        )
        for context, _ in lost.waiting.values():
            self._answer(context, error)
        for context in lost.abandoned() + self._confirms:
            self._answer(context, error)
        refusal = self._not_leader()
        for _, context in self._proposals:
            self._answer(context, refusal)
        if lost.transfer is not None:
            self._answer(lost.transfer.context, None)
        self._proposals, self._confirms = [], []

    # -- messages ----------------------------------------------------------------------

    def _take(self, sender: ReplicaId, message: Message) -> None:
        if self._doubt is not None and self._doubt.floor is None and not isinstance(message, Inquiry | Account):
            self._overheard(sender)
            return
        # The two that come with every batch first.
        if type(message) is AppendEntries:
            self._stirred = True
            self._on_append(sender, message)
            return
        if type(message) is AppendReply:
            self._on_append_reply(sender, message)
            return
        self._stirred = self._tick_wanted = True
        match message:
            case PreVote():
                self._on_pre_vote(sender, message)
            case RequestVote():
                self._on_request_vote(sender, message)
            case InstallSnapshot():
                self._on_snapshot(sender, message)
            case PreVoteReply() | VoteReply():
                if message.term > self.term:
                    self._take_term(message.term)
                elif isinstance(message, PreVoteReply):
                    self._on_pre_vote_reply(sender, message)
                else:
                    self._on_vote_reply(sender, message)
            case TimeoutNow():
                self._on_timeout_now(sender, message)
            case Inquiry():
                self._on_inquiry(sender, message)
            case Account():
                self._on_account(sender, message)

    def _on_append_reply(self, sender: ReplicaId, reply: AppendReply) -> None:
        leadership = self._leadership
        if reply.term > self.term:
            self._stirred = self._tick_wanted = True
            self._take_term(reply.term)
        elif leadership is not None and sender in leadership.progress and self._is_current(reply):
            forgetful = leadership.forgetful
            match = leadership.take_reply(sender, reply)
            if leadership.forgetful is not forgetful:
                self.peer_forgot(sender)
            self.peer_answered(sender, self._counted(sender, match))
            if match > self.commit:
                self._stirred = self._tick_wanted = True
            elif leadership.has_use_for(sender, reply):
                self._stirred = True

    def _is_current(self, reply: AppendReply) -> bool:
        """An answer to an earlier leadership of ours says nothing about the log as it is now."""
        return reply.term == self.term

    # -- the leader's side --------------------------------------------------------------

    def _write_proposals(self) -> None:
        proposals, self._proposals = self._proposals, []
        if not proposals:
            return
        leadership = self._leading()
        index, term, entries = self.store.last_index, self.term, []
        for payload, context in proposals:
            index = Index(index + 1)
            entries.append(Entry(index, term, payload, entry_crc(index, term, payload)))
            leadership.waiting[index] = (context, len(payload))
        self.store.append(entries)
        for budget in leadership.budgets.values():
            budget.grant(entries)
        for entry in entries:
            self._note_replica_set(entry)

    def on_heartbeat_due(self) -> None:
        self._heartbeat_due = True

    def _replicate(self) -> None:
        if self._leadership is not None:
            outgoing = self._leadership.outgoing(self.commit, self.now, self._heartbeat_due, self._unreachable)
            self._ready.early.extend(outgoing)
        self._heartbeat_due = False

    def _finish_confirmations(self) -> None:
        if self._leadership is None:
            return
        # Before its first own entry is committed, a leader does not know what was committed before it.
        if self._confirms and self.commit >= self.noop_index:
            for context in self._confirms:
                self._leadership.confirm(self.commit, context)
            self._confirms = []
            self._heartbeat_due = True
        if not self._leadership.confirming:
            return
        for context in self._leadership.confirmed(self.replica_id, self.replica_set, self.applied):
            self._answer(context, None)

    def _drive_transfer(self) -> None:
        leadership = self._leadership
        if leadership is None or leadership.transfer is None:
            return
        transfer = leadership.transfer
        if self.now > transfer.deadline_s or transfer.target not in self.replica_set.voters:
            leadership.transfer = None
            self._answer(transfer.context, TransferFailedError(f"{transfer.target} did not take over in time"))
        elif leadership.progress[transfer.target].match == self.store.last_index and (
            self._heartbeat_due or not transfer.asked
        ):
            transfer.asked = True
            self._ready.early.append((transfer.target, TimeoutNow(self.term)))

    def _yield_for_space(self, leadership: Leadership) -> None:
        """Once per heartbeat: let another lead, where a full disk stands in the way."""
        stuck, leadership.commit_before = leadership.commit_before == self.commit, self.commit
        if leadership.transfer is not None or not (self.store.full or leadership.full_peers):
            return
        match = {peer: known.match for peer, known in leadership.progress.items() if peer not in self._unreachable}
        full = self._full_replicas(leadership)
        picture = Picture(self.replica_id, self.replica_set, full, match, self.commit, self.store.last_index, stuck)
        target = heir(picture)
        if target is not None:
            self._ready.early.append((target, TimeoutNow(self.term)))

    # -- applying ------------------------------------------------------------------------

    @property
    def _may_apply(self) -> Index:
        """The last index to apply. Entries of others wait until they are durable here: a full disk may give them up
        until then. So do all in a group of one. Else nothing of a leader's own is committed before its own sync."""
        leadership = self._leadership
        if leadership is not None and self._durable >= leadership.inherited and not self._only_voter:
            return self.commit
        return min(self.commit, self._durable)

    def apply_committed(self) -> None:
        """Apply what is committed, a bounded piece at a time."""
        until = self._may_apply
        if self.applied >= until or self.store.damaged is not None:
            return
        waiting = self._leadership.waiting if self._leadership is not None else {}
        for entry in self.store.entries(Index(self.applied + 1), self.settings.apply_batch_bytes):
            if entry.index > until:
                break
            kind = entry.payload[0]
            result = None if kind in (NO_OP, MEMBERSHIP) else self.machine.apply(entry.index, entry.payload)
            self.applied = entry.index
            self._bytes_since_checkpoint += len(entry.payload)
            if entry.index in waiting:
                context, size_bytes = waiting.pop(entry.index)
                self._leading().uncommitted_bytes -= size_bytes
                self._answer(context, result)
        self.store.set_applied(self.applied)

    def _answer(self, context: Any, result: Any) -> None:
        if context is not None:
            self._ready.done.append(Done(context, result))

    def _use_replica_set(self, replica_set: ReplicaSet) -> None:
        super()._use_replica_set(replica_set)
        if self._leadership is not None:
            self._leadership.set_peers(replica_set.everyone - {self.replica_id})
            self._leadership.set_learners(replica_set.learners)

    # -- small things ------------------------------------------------------------------------

    def _leading(self) -> Leadership:
        if self._leadership is None:
            raise self._not_leader()
        return self._leadership

    def _not_leader(self) -> RayQueueError:
        where = f"; ask {self.leader}" if self.leader else "; no leader is known yet, retry"
        return NotLeaderError(f"{self.replica_id} does not lead{where}", leader=self.leader)

    def send_after_sync(self, peer: ReplicaId, message: Message) -> None:
        self._ready.late.append((peer, message))
