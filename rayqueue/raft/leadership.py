"""What a leader keeps for the length of one term.

Owns the followers' progress, the numbered rounds that prove leadership, and a
pending transfer. It is made when the term is won and thrown away when it is
lost, so nothing of an older term can leak into a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rayqueue.config import RaftSettings
from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import Index, NodeId, Term
from rayqueue.log.store import Entry, LogStore
from rayqueue.raft.members import Members
from rayqueue.raft.messages import AppendEntries, AppendReply, InstallSnapshot, Message
from rayqueue.raft.progress import Pace, Progress


@dataclass(slots=True)
class Transfer:
    """Leadership is on its way to ``target``; given up at ``deadline_s``."""

    target: NodeId
    deadline_s: float
    context: Any
    asked: bool = False


class Leadership:
    """One won term."""

    def __init__(self, term: Term, store: LogStore, peers: Iterable[NodeId], settings: RaftSettings) -> None:
        self.term = term
        self.inherited = store.last_index
        """The last entry that it has from others."""
        self.progress: dict[NodeId, Progress] = {}
        self.round = 0
        self.transfer: Transfer | None = None
        self.uncommitted_bytes = 0
        self.waiting: dict[Index, tuple[Any, int]] = {}
        self.confirming: list[tuple[int, Index, Any]] = []
        self.full_peers: frozenset[NodeId] = frozenset()
        """Those whose disks have room for small entries only."""
        self.commit_before = Index(0)
        """The commit index at the last heartbeat."""
        self._store = store
        self._settings = settings
        self._snapshot_retry_s = settings.snapshot_retry_ms / 1000
        self.set_peers(peers)

    def set_peers(self, peers: Iterable[NodeId]) -> None:
        peers = set(peers)
        for gone in self.progress.keys() - peers:
            del self.progress[gone]
        self.full_peers = frozenset(self.full_peers & peers)
        for peer in sorted(peers - self.progress.keys()):
            self.progress[peer] = Progress(self._store.last_index + 1, self._settings.window_bytes)

    def take_reply(self, peer: NodeId, reply: AppendReply) -> Index:
        """An answer of this very term from a member. Returns how far its log matches."""
        progress = self.progress[peer]
        if reply.full != progress.full:
            progress.full = reply.full
            self.full_peers = frozenset(each for each, known in self.progress.items() if known.full)
        progress.acked_round = max(progress.acked_round, reply.round)
        if not reply.success:
            progress.refused(reply.prev_index, reply.match)
        elif reply.match > self._store.last_index:
            raise InvariantBrokenError(f"{peer} claims to match entry {reply.match}, which does not exist")
        else:
            progress.confirmed(reply.match)
        return progress.match

    def has_use_for(self, peer: NodeId, reply: AppendReply) -> bool:
        """False if this answer gives the leader nothing to do: all is sent, and nobody waits for a round."""
        progress = self.progress[peer]
        return (
            not reply.success
            or progress.pace is not Pace.PIPELINE
            or progress.next <= self._store.last_index
            or bool(self.confirming)
            or self.transfer is not None
        )

    # -- sending -----------------------------------------------------------------

    def outgoing(
        self, commit: Index, now: float, heartbeat: bool, unreachable: set[NodeId]
    ) -> Iterator[tuple[NodeId, Message]]:
        """Everything that may be sent now. With ``heartbeat``, at least one message for each peer."""
        for peer, progress in self.progress.items():
            if peer in unreachable:
                continue
            silent = True
            for message in self._for_peer(progress, commit, now):
                silent = False
                yield peer, message
            if silent and heartbeat:
                # The question about prev also finds out what was lost on the way.
                prev = Index(max(progress.next - 1, self._store.base_index))
                yield peer, self._entries(prev, commit, ())

    def _for_peer(self, progress: Progress, commit: Index, now: float) -> Iterator[Message]:
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
                entries = self._next_entries(progress)
                if not entries:
                    return
                message = self._entries(Index(progress.next - 1), commit, entries)
                progress.sent(entries[-1].index, sum(len(entry.payload) for entry in entries))
                yield message
            else:
                return

    def _next_entries(self, progress: Progress) -> tuple[Entry, ...]:
        """What the follower can take next; nothing if its disk has no room for it."""
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

    def confirmed(self, self_id: NodeId, members: Members, applied: Index) -> list[Any]:
        """Contexts of the questions that a majority has answered, once all that was committed then is applied."""
        done = []
        while self.confirming:
            round_, commit, context = self.confirming[0]
            answered = [peer for peer, progress in self.progress.items() if progress.acked_round >= round_]
            if applied < commit or not members.is_majority([self_id, *answered]):
                break
            done.append(context)
            self.confirming.pop(0)
        return done

    def abandoned(self) -> list[Any]:
        """Contexts of the questions that will not be answered any more."""
        return [context for _, _, context in self.confirming]
