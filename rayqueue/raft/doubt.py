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

A copy that knows of no other voter has nobody to ask. It has what is remembered
beside its store (``rayqueue.log.waymark``), and if it ends before that, it is silent:
either it was alone, and what it lacks is lost until a newer copy is there or an
operator gives it up (``rayqueue recover --unsafe``); or others have joined since,
who call it sooner or later. It asks whoever does, and learns whom else.

If a voter does not answer, the doubt stays: with one copy restored and another
voter lost, nobody knows any more what was acknowledged, and a group that decided
now could lose it unnoticed. The others may well be a majority without this one.

Whose voters they are is said by the newest membership that anybody has: the
copy's own may be as old as the copy. It may change meanwhile: a voter that was
lost for good is replaced, and then waited for no more. Learners are asked, too:
one that votes by now may be the only one to know it. (One that does not know it
yet has decided nothing: ``ReplicatedLog._counted``.)
"""

from __future__ import annotations

from functools import reduce
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
    learners: frozenset[ReplicaId] = frozenset()

    def joined(self, other: Membership) -> Membership:
        voters = self.voters | other.voters
        return Membership(self.index, voters, (self.learners | other.learners) - voters)


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
        """Nobody who answered reaches the mark."""
        self._memberships: dict[ReplicaId, Membership] = {}
        """By whoever has answered: what it said last."""
        self._ends: dict[ReplicaId, LogEnd] = {}
        self._term = Term(0)
        """The highest that anybody has said."""

    def inquiry(self, term: Term) -> Inquiry:
        return Inquiry(term, self.nonce)

    def take(self, sender: ReplicaId, account: Account) -> bool:
        """True if this is an answer to this very doubt."""
        if account.nonce != self.nonce or self.floor is not None:
            return False
        members = ReplicaSet.decode(account.members)
        self._memberships[sender] = Membership(account.members_index, members.voters, members.learners)
        self._ends[sender] = account.last_term, account.last_index
        self._term = max(self._term, account.term)
        return True

    def newest(self, own: Membership) -> Membership:
        """Who belongs to the group, as far as is known."""
        known = [own, *self._memberships.values()]
        newest = max(each.index for each in known)
        # Of those who agree on what is committed one may have more in its log: its voters may have decided already.
        return reduce(Membership.joined, (each for each in known if each.index == newest))

    def asked(self, me: ReplicaId, own: Membership) -> frozenset[ReplicaId]:
        """Those who have answered, too: that somebody who never will has left the group is theirs to say."""
        return (self._concerned(me, own) | self._memberships.keys()) - {me}

    def missing(self, me: ReplicaId, own: Membership) -> frozenset[ReplicaId]:
        return self._concerned(me, own) - {me} - self._memberships.keys()

    def _concerned(self, me: ReplicaId, own: Membership) -> frozenset[ReplicaId]:
        """Those who must answer. A learner may know that it votes by now, and nobody else but the replica itself had
        that, and has forgotten it. Not where this is the only voter: then the mark would tell."""
        members = self.newest(own)
        return members.voters if members.voters <= {me} else members.voters | members.learners

    def resolve(self, me: ReplicaId, own: Membership, own_end: LogEnd) -> Term | None:
        """The term to take, once everybody has answered."""
        voters, mark = self.newest(own).voters, (Term(self.mark.term), Index(self.mark.entry))
        # Nobody else votes, as far as it knows. But that may be as old as the copy.
        self.is_lost = voters == {me} and own_end < mark
        if self.is_lost or not voters or self.missing(me, own):
            return None
        # What was acknowledged is on voters. A learner may have more, and could never lead those who wait for it.
        longest = max((end for peer, end in self._ends.items() if peer in voters), default=(Term(0), Index(0)))
        self.floor = max(longest, mark)
        self.is_lost = longest < mark
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
                f"acknowledged, this copy ends at entry {self.store.last_index}, and nobody who answered has the rest. "
                "If others have joined its group since, it waits for them. Else restore a newer copy, or give up what "
                "is lost: rayqueue recover --unsafe"
            )
        if doubt.floor is not None:
            return f"{doubt.why}; it is brought up to date to entry {doubt.floor[1]}"
        waits_for = sorted(doubt.missing(self.replica_id, self._membership()))
        return f"{doubt.why}; it neither votes nor acknowledges before {', '.join(waits_for) or 'its group'} answered"

    # -- asking -------------------------------------------------------------------

    @property
    def asked(self) -> frozenset[ReplicaId]:
        """Those whose answer it waits for, or has; whether or not its own log says that they belong to its group."""
        return frozenset() if self._doubt is None else self._doubt.asked(self.replica_id, self._membership())

    def _inquire(self, peer: ReplicaId) -> None:
        if self._doubt is not None and self._doubt.floor is None:
            self.send_after_sync(peer, self._doubt.inquiry(self.term))

    def _overheard(self, sender: ReplicaId) -> None:
        """Who speaks to it belongs to its group, though its log may be older than that."""
        if sender not in self.asked:
            self._inquire(sender)

    def _on_account(self, sender: ReplicaId, account: Account) -> None:
        if self._doubt is not None and self._doubt.take(sender, account):
            self._resolve_doubt()

    def _resolve_doubt(self) -> None:
        """Once everybody has answered: promise again whatever may have been forgotten."""
        doubt = self._doubt
        if doubt is None or doubt.floor is not None:
            return
        heard = doubt.resolve(self.replica_id, self._membership(), self._own_end())
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
        members = ReplicaSet(own.voters, own.learners).encode()
        self.send_after_sync(
            sender, Account(self.term, message.nonce, store.last_index, store.last_term, own.index, members)
        )

    # -- elections ----------------------------------------------------------------

    def _prepare_election(self) -> None:
        if self._doubt is not None and self._doubt.floor is None and self.election_deadline < self.now:
            for peer in sorted(self.asked):
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
