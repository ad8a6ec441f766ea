"""Doubt: what a replica may do whose store may be an older copy of itself.

Such a replica may have voted and acknowledged and not know it. All that it ever
promised, it promised to voters of its group, so it asks every one of them:

    Inquiry   ->   to each other voter, again and again
    Account   <-   its term, the end of its log, and who belongs to the group

Until all have answered it is silent: it neither votes nor acknowledges nor
leads. Then, of what it may have forgotten, it keeps

- every vote and every term: whoever got a promise in a term has that term. It
  takes the highest term that it heard of, and counts as having voted in it;
- every acknowledgement: a committed entry is on another voter, too, or nobody
  has it any more. It votes only for logs that are at least as long as the longest
  it heard of (``floor``), and leads only once its own is.

That is what Raft would have it do if it had forgotten nothing but payloads, which
the leader sends again. Once its own log has reached the floor, it is a replica
like any other, and its store belongs where it is (``LogStore.settle``).

The only voter of a group has nobody to ask. It has what is remembered beside
its store (``rayqueue.log.waymark``): below that it neither leads nor serves, and
says what is lost, until a newer copy is there or an operator gives it up
(``rayqueue recover --unsafe``).

If a voter does not answer, the doubt stays: with one copy restored and another
voter lost, nobody knows any more what was acknowledged, and a group that decided
now could lose it unnoticed. The others may well be a majority without this one.

Whose voters they are is said by the newest membership that anybody has: the
copy's own may be as old as the copy. It may change meanwhile: a voter that was
lost for good is replaced, and then waited for no more.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from rayqueue.config import RaftSettings
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.store import LogStore
from rayqueue.log.waymark import Waymark
from rayqueue.raft.election import Elections
from rayqueue.raft.messages import Account, Inquiry, PreVote, PreVoteReply, RequestVote
from rayqueue.raft.replica_set import ReplicaSet

LogEnd = tuple[Term, Index]
"""Term and index of a log's last entry, in the order in which logs are compared."""


class Membership(Struct, frozen=True):
    """All who vote by the newest committed membership, or by one that may replace it; ``index`` of the former."""

    index: Index
    voters: frozenset[ReplicaId]


class Doubt:
    """The doubt of one start. ``nonce`` tells answers to it from those to an earlier start."""

    def __init__(self, why: str, nonce: int, mark: Waymark | None = None) -> None:
        self.why = why
        self.nonce = nonce
        self.mark = mark or Waymark()
        """What this very replica had acknowledged at least."""
        self.floor: LogEnd | None = None
        """Below this no log is long enough. None until everybody has answered."""
        self.is_lost = False
        """Nobody who answered reaches the floor, which is the mark."""
        self._memberships: dict[ReplicaId, Membership] = {}
        """By whoever has answered: what it said last."""
        self._end: LogEnd = Term(0), Index(0)
        self._term = Term(0)
        """The highest that anybody has said."""

    def inquiry(self, term: Term) -> Inquiry:
        return Inquiry(term, self.nonce)

    def take(self, sender: ReplicaId, account: Account) -> bool:
        """True if this is an answer to this very doubt."""
        if account.nonce != self.nonce or self.floor is not None:
            return False
        self._memberships[sender] = Membership(account.members_index, ReplicaSet.decode(account.members).voters)
        self._end = max(self._end, (account.last_term, account.last_index))
        self._term = max(self._term, account.term)
        return True

    def voters(self, own: Membership) -> frozenset[ReplicaId]:
        """Those who must answer, as far as is known, and the replica itself."""
        known = [own, *self._memberships.values()]
        newest = max(each.index for each in known)
        # Of those who agree on what is committed one may have more in its log: its voters may have decided already.
        return frozenset[ReplicaId]().union(*(each.voters for each in known if each.index == newest))

    def asked(self, me: ReplicaId, own: Membership) -> frozenset[ReplicaId]:
        """Those who have answered, too: that somebody who never will has left the group is theirs to say."""
        return (self.voters(own) | self._memberships.keys()) - {me}

    def missing(self, me: ReplicaId, own: Membership) -> frozenset[ReplicaId]:
        return self.voters(own) - {me} - self._memberships.keys()

    def resolve(self, me: ReplicaId, own: Membership) -> Term | None:
        """The term to take, once everybody has answered."""
        if not self.voters(own) or self.missing(me, own):
            return None
        self.floor = max(self._end, (Term(self.mark.term), Index(self.mark.entry)))
        self.is_lost = self._end < self.floor
        return self._term


class WaryElections(Elections):
    """Elections of a replica that may be in doubt of itself."""

    def __init__(self, store: LogStore, settings: RaftSettings, rng: Random, now: float) -> None:
        self._doubt = None if store.copied is None else Doubt(store.copied, rng.getrandbits(64), store.waymark)
        super().__init__(store, settings, rng, now)

    def _membership(self) -> Membership:
        """Of this replica's own log."""
        raise NotImplementedError

    @property
    def doubted(self) -> str | None:
        """Why this replica may have forgotten what it promised, and what it waits for; None if it has not."""
        doubt = self._doubt
        if doubt is None:
            return None
        if doubt.is_lost and not self._is_long_enough(*self._own_end()):
            return (
                f"{doubt.why}: the records before offset {doubt.mark.records} (entry {doubt.mark.entry}) were "
                f"acknowledged, this copy ends at entry {self.store.last_index}, and nobody else has the rest. Restore "
                "a newer copy, or give up what is lost: rayqueue recover --unsafe"
            )
        if doubt.floor is not None:
            return f"{doubt.why}; it is brought up to date to entry {doubt.floor[1]}"
        waits_for = sorted(doubt.missing(self.replica_id, self._membership()))
        return f"{doubt.why}; it neither votes nor acknowledges before {', '.join(waits_for) or 'its group'} answered"

    # -- asking -------------------------------------------------------------------

    def _inquire(self, peer: ReplicaId) -> None:
        if self._doubt is not None and self._doubt.floor is None:
            self.send_after_sync(peer, self._doubt.inquiry(self.term))

    def _on_account(self, sender: ReplicaId, account: Account) -> None:
        if self._doubt is not None and self._doubt.take(sender, account):
            self._resolve_doubt()

    def _resolve_doubt(self) -> None:
        """Once everybody has answered: promise again whatever may have been forgotten."""
        doubt = self._doubt
        if doubt is None or doubt.floor is not None:
            return
        heard = doubt.resolve(self.replica_id, self._membership())
        if heard is None:
            return
        term = max(heard, self.term)
        self.set_term(term, self.vote if term == self.term and self.vote is not None else self.replica_id)

    def _settle_doubt(self) -> None:
        """All that was written is durable."""
        if self._doubt is not None and self._doubt.floor is not None and self._is_long_enough(*self._own_end()):
            self.store.settle_here()
            self._doubt = None

    def _own_end(self) -> LogEnd:
        return self.store.last_term, self.store.last_index

    def _is_long_enough(self, last_term: Term, last_index: Index) -> bool:
        doubt = self._doubt
        return doubt is None or (doubt.floor is not None and (last_term, last_index) >= doubt.floor)

    # -- answering ----------------------------------------------------------------

    def _on_inquiry(self, sender: ReplicaId, message: Inquiry) -> None:
        store, own = self.store, self._membership()
        members = ReplicaSet(own.voters).encode()
        self.send_after_sync(
            sender, Account(self.term, message.nonce, store.last_index, store.last_term, own.index, members)
        )

    # -- elections ----------------------------------------------------------------

    def _prepare_election(self) -> None:
        if self._doubt is not None and self._doubt.floor is None and self.election_deadline < self.now:
            for peer in sorted(self._doubt.asked(self.replica_id, self._membership())):
                self._inquire(peer)
        super()._prepare_election()

    def _may_campaign(self) -> bool:
        return super()._may_campaign() and self._is_long_enough(*self._own_end())

    def _on_pre_vote(self, sender: ReplicaId, message: PreVote) -> None:
        if self._is_long_enough(message.last_term, message.last_index):
            super()._on_pre_vote(sender, message)
        else:
            self.send_after_sync(sender, PreVoteReply(self.term, message.term, granted=False))

    def _on_request_vote(self, sender: ReplicaId, message: RequestVote) -> None:
        if self._is_long_enough(message.last_term, message.last_index):
            super()._on_request_vote(sender, message)
