"""A leadership: all that a leader keeps for the length of one term.

Owns the followers' progress, the numbered rounds that prove leadership, and a
pending transfer. It is made when the term is won and thrown away when it is
lost, so nothing of an older term can leak into a newer one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rayqueue.config import RaftSettings
from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.store import Entry, LogStore
from rayqueue.raft.budget import Budget
from rayqueue.raft.messages import AppendEntries, AppendReply, InstallSnapshot, Message
from rayqueue.raft.progress import Pace, Progress
from rayqueue.raft.replica_set import ReplicaSet

LIVE_HEARTBEATS = 5
"""Who has not answered for longer is not made a voter, and counts for nothing when another one leaves."""


@dataclass(slots=True)
class Transfer:
    """Leadership is on its way to ``target``; given up at ``deadline_s``."""

    target: ReplicaId
    deadline_s: float
    context: Any
    asked: bool = False


class Leadership:
    """One won term."""

    def __init__(self, term: Term, store: LogStore, peers: Iterable[ReplicaId], settings: RaftSettings) -> None:
        self.term = term
        self.inherited = store.last_index
        """The last entry that it has from others."""
        self.progress: dict[ReplicaId, Progress] = {}
        self.round = 0
        self._heartbeats: deque[tuple[int, float]] = deque(maxlen=2 * LIVE_HEARTBEATS)
        """The rounds that the last heartbeats have begun, and when."""
        self.transfer: Transfer | None = None
        self.uncommitted_bytes = 0
        self.waiting: dict[Index, tuple[Any, int]] = {}
        self.confirming: list[tuple[int, Index, Any]] = []
        self.full_peers: frozenset[ReplicaId] = frozenset()
        """Those whose disks have room for small entries only."""
        self.forgetful: frozenset[ReplicaId] = frozenset()
        """Those that have lost what they had confirmed in this term. They must be replaced: they may have forgotten
        votes, too."""
        self.budgets: dict[ReplicaId, Budget] = {}
        """Of learners, if what they are sent is bounded (``raft.catch_up_bytes_per_s``)."""
        self.commit_before = Index(0)
        """The commit index at the last heartbeat."""
        self._store = store
        self._settings = settings
        self._snapshot_retry_s = settings.snapshot_retry_ms / 1000
        self.set_peers(peers)

    def set_peers(self, peers: Iterable[ReplicaId]) -> None:
        peers = set(peers)
        for gone in self.progress.keys() - peers:
            del self.progress[gone]
        self.full_peers = frozenset(self.full_peers & peers)
        for peer in sorted(peers - self.progress.keys()):
            self.progress[peer] = Progress(self._store.last_index + 1, self._settings.window_bytes)

    def set_learners(self, learners: Iterable[ReplicaId]) -> None:
        bytes_per_s = self._settings.catch_up_bytes_per_s
        if bytes_per_s is not None:
            self.budgets = {each: self.budgets.get(each) or Budget(bytes_per_s) for each in learners}

    def take_reply(self, peer: ReplicaId, reply: AppendReply) -> Index:
        """An answer of this very term from another replica. Returns how far its log matches."""
        progress = self.progress[peer]
        if reply.full != progress.full:
            progress.full = reply.full
            self.full_peers = frozenset(each for each, known in self.progress.items() if known.full)
        progress.acked_round = max(progress.acked_round, reply.round)
        progress.heard = True
        if not reply.success:
            if not progress.denies(reply.prev_index, reply.match):
                progress.refused(reply.prev_index, reply.match)
            elif progress.doubted_in is None:
                self.round += 1
                progress.doubt(self.round)
            elif reply.round >= progress.doubted_in:
                progress.forgot(reply.match)
                self.forgetful |= {peer}
        elif reply.match > self._store.last_index:
            raise InvariantBrokenError(f"{peer} claims to match entry {reply.match}, which does not exist")
        else:
            progress.confirmed(reply.match)
        return progress.match

    def has_use_for(self, peer: ReplicaId, reply: AppendReply) -> bool:
        """False if this answer gives the leader nothing to do: all is sent, and nobody waits for a round."""
        progress = self.progress[peer]
        return (
            not reply.success
            or progress.pace is not Pace.PIPELINE
            or progress.next <= self._store.last_index
            or bool(self.confirming)
            or self.transfer is not None
        )

    def on_heartbeat(self, now: float) -> None:
        """Begin a round, so that answers tell when their question was asked; and see who is near the end."""
        # Questions of others make heartbeats more frequent: those of the last moments would be all that is remembered.
        if not self._heartbeats or now - self._heartbeats[-1][1] >= self._settings.heartbeat_ms / 2000:
            self.round += 1
            self._heartbeats.append((self.round, now))
        for progress in self.progress.values():
            progress.look(now, self._store.last_index)

    def silent_s(self, peer: ReplicaId, now: float) -> float:
        """The time since the last question was asked that it has answered. When the answer was read says nothing: it
        may have waited while this leader was paused, and who gave it died."""
        acked = self.progress[peer].acked_round
        return now - max((begun for round_, begun in self._heartbeats if round_ <= acked), default=float("-inf"))

    def in_sync(self, now: float) -> frozenset[ReplicaId]:
        """Followers that are near the end: each had, ``in_sync_ms`` ago at most, all that the leader had."""
        since = now - self._settings.in_sync_ms / 1000
        return frozenset(peer for peer, progress in self.progress.items() if progress.caught_up_s >= since)

    def lags(self) -> dict[ReplicaId, int]:
        """Entries that each follower is not known to have. Those whose log is not known yet are left out."""
        last = self._store.last_index
        known = {peer: progress.match for peer, progress in self.progress.items() if progress.match}
        return {peer: last - match for peer, match in known.items()}

    # -- sending -----------------------------------------------------------------

    def outgoing(
        self, commit: Index, now: float, heartbeat: bool, unreachable: set[ReplicaId]
    ) -> Iterator[tuple[ReplicaId, Message]]:
        """Everything that may be sent now. With ``heartbeat``, at least one message for each peer."""
        for peer, progress in self.progress.items():
            if peer in unreachable:
                continue
            silent = True
            for message in self._for_peer(progress, commit, now, self.budgets.get(peer)):
                silent = False
                yield peer, message
            if silent and heartbeat:
                # The question about prev also finds out what was lost on the way.
                prev = Index(max(progress.next - 1, self._store.base_index))
                yield peer, self._entries(prev, commit, ())

    def _for_peer(self, progress: Progress, commit: Index, now: float, budget: Budget | None) -> Iterator[Message]:
        store = self._store
        # The log may have been trimmed past what this follower was being asked about.
        if progress.pace is Pace.SNAPSHOT or progress.next <= store.base_index:
            if progress.pace is not Pace.SNAPSHOT or progress.snapshot_age(now) >= self._snapshot_retry_s:
                yield self._snapshot(progress, now)
            return
        while progress.may_send():
            if progress.pace is Pace.PROBE:
                progress.asked = True
                yield self._entries(Index(progress.next - 1), commit, ())
            elif progress.next <= store.last_index:
                if budget is not None and not budget.is_open(now):
                    return
                entries = self._next_entries(progress)
                if not entries:
                    return
                message = self._entries(Index(progress.next - 1), commit, entries)
                progress.sent(entries[-1].index, sum(len(entry.payload) for entry in entries))
                if budget is not None:
                    budget.spend(entries)
                yield message
            else:
                return

    def _next_entries(self, progress: Progress) -> tuple[Entry, ...]:
        """The entries that the follower can take next; none if its disk has no room for them."""
        if not progress.full:
            return tuple(self._store.entries(progress.next, self._settings.append_batch_bytes))
        entries = tuple(self._store.entries(progress.next, self._store.small_bytes))
        return entries if len(entries[0].payload) <= self._store.small_bytes else ()

    def _snapshot(self, progress: Progress, now: float) -> InstallSnapshot:
        checkpoint = self._store.checkpoint
        if checkpoint is None:
            raise InvariantBrokenError("the log is trimmed and has no checkpoint")
        progress.needs_snapshot(checkpoint.index, now)
        return InstallSnapshot(
            self.term, checkpoint.index, checkpoint.term, self.round, checkpoint.members, checkpoint.state
        )

    def _entries(self, prev: Index, commit: Index, entries: tuple[Any, ...]) -> AppendEntries:
        prev_term = self._store.term_at(prev)
        if prev_term is None:
            raise InvariantBrokenError(f"the leader's log has no entry {prev}")
        return AppendEntries(self.term, prev, prev_term, commit, self.round, entries)

    # -- proving leadership ----------------------------------------------------------

    def confirm(self, commit: Index, context: Any) -> None:
        """Ask a majority whether this is still the leader. The next round's answers prove it."""
        self.round += 1
        self.confirming.append((self.round, commit, context))

    def confirmed(self, self_id: ReplicaId, replica_set: ReplicaSet, applied: Index) -> list[Any]:
        """Contexts of the questions that a majority has answered, once all that was committed then is applied."""
        done = []
        while self.confirming:
            round_, commit, context = self.confirming[0]
            answered = [peer for peer, progress in self.progress.items() if progress.acked_round >= round_]
            if applied < commit or not replica_set.is_majority([self_id, *answered]):
                break
            done.append(context)
            self.confirming.pop(0)
        return done

    def abandoned(self) -> list[Any]:
        """Contexts of the questions that will not be answered any more."""
        return [context for _, _, context in self.confirming]
