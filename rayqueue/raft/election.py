"""Elections: PySyncObj's, behind a pre-vote and loyalty to a living leader.

PySyncObj starts an election when its deadline passes, counts the votes and
keeps term and vote. Around that:

- A replica asks first whether it would win (pre-vote) and only then raises its
  term, so one that was away does not depose a healthy leader when it is back.
- Whoever heard from a leader lately refuses candidates (loyalty), unless the
  leader itself asked for the election (a transfer).
- Votes count once per voter and term.
- A leader known to be dead is replaced at once, without waiting for a timeout;
  the only voter of a group leads as soon as it runs; and where nobody leads, as
  after a restart of everything, whoever hears of another voter asks soon.
"""

from __future__ import annotations

from random import Random
from typing import Any

from rayqueue.config import RaftSettings
from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import ReplicaId, Term
from rayqueue.log.store import LogStore
from rayqueue.raft._pysyncobj import CANDIDATE, FOLLOWER, LEADER, StockRaft
from rayqueue.raft.journal import StoreJournal
from rayqueue.raft.messages import Message, PreVote, PreVoteReply, RequestVote, TimeoutNow, VoteReply
from rayqueue.raft.replica_set import ReplicaSet

_NEVER = float("-inf")


class Elections(StockRaft):
    """The part of the engine that decides who leads. ``RaftEngine`` adds what a leader does."""

    replica_set: ReplicaSet

    def __init__(self, store: LogStore, settings: RaftSettings, rng: Random, now: float) -> None:
        self.store = store
        self.settings = settings
        self.replica_id = store.replica_id
        self._rng = rng
        # Who just started knows no leader. Asking soon harms nobody: if there is one, the others refuse.
        self._hurried_elections = settings.fast_election_rounds
        self._leader_heard = _NEVER
        self._pre_votes: set[ReplicaId] = set()
        self._pre_vote_term = Term(0)
        self._campaign = False  # an election is wanted at the next tick, and allowed
        self._transferred = False  # the election was asked for by the leader itself
        self.took_over = False
        """The last candidacy was one that the leader before had asked for."""
        self._votes: set[ReplicaId] = set()
        super().__init__(
            store.replica_id,
            StoreJournal(store),
            store.applied,
            now,
            heartbeat_s=settings.heartbeat_ms / 1000,
            fallback_s=settings.leader_fallback_ms / 1000,
        )

    @property
    def is_leader(self) -> bool:
        return self.role == LEADER

    def send_after_sync(self, peer: ReplicaId, message: Message) -> None:
        """Say something that is a promise, and so must wait for the disk."""
        raise NotImplementedError

    def election_timeout_s(self) -> float:
        if self._hurried_elections > 0:
            return self._rng.uniform(1, 2) * self.settings.fast_election_max_ms / 1000
        return self._rng.uniform(self.settings.election_timeout_min_ms, self.settings.election_timeout_max_ms) / 1000

    @property
    def _only_voter(self) -> bool:
        return len(self.replica_set.voters) == 1 and self.replica_id in self.replica_set.voters

    def _may_campaign(self) -> bool:
        return self.replica_id in self.replica_set.voters and self.store.damaged is None

    def _leader_died(self) -> None:
        """Nobody needs to wait for a timeout to learn what is known. A few quick rounds, then the usual pace."""
        self.leader = None
        self._leader_heard = _NEVER
        self._hurried_elections = self.settings.fast_election_rounds
        self.election_deadline = self.now + self._rng.uniform(0, self.settings.fast_election_max_ms / 1000)

    def _peer_came(self, peer: ReplicaId) -> None:
        """A voter has come. If nobody is known to lead, it may be the one that was missing: an election soon. If
        somebody leads after all, the others refuse."""
        if self.leader is None and not self.is_leader and peer in self.replica_set.voters:
            soon = self.now + self._rng.uniform(0, self.settings.fast_election_max_ms / 1000)
            self.election_deadline = min(self.election_deadline, soon)

    def _loyal(self) -> bool:
        """True while a leader lives: then candidates are refused, so that a replica that comes back disturbs nobody."""
        return self.is_leader or self.now - self._leader_heard < self.settings.election_timeout_min_ms / 1000

    def _prepare_election(self) -> None:
        """The stock engine starts an election once its deadline has passed; here that deadline is guarded."""
        if self.is_leader or self.election_deadline >= self.now:
            return
        if not self._may_campaign():
            self._postpone_election()
        elif not self._campaign:
            self._start_pre_vote()

    def _elect_now(self) -> None:
        self.election_deadline = _NEVER

    def _postpone_election(self) -> None:
        self._campaign = self._transferred = False
        self.election_deadline = self.now + self.election_timeout_s()

    def _start_pre_vote(self) -> None:
        self.leader = None
        self._hurried_elections = max(0, self._hurried_elections - 1)
        self._pre_vote_term = Term(self.term + 1)
        self._pre_votes = {self.replica_id}
        self.election_deadline = self.now + self.election_timeout_s()
        for peer in sorted(self.replica_set.voters - {self.replica_id}):
            self.send_after_sync(peer, PreVote(self._pre_vote_term, self.store.last_index, self.store.last_term))
        self._count_pre_votes()

    def _count_pre_votes(self) -> None:
        if self.replica_set.is_majority(self._pre_votes):
            self._campaign = True
            self._elect_now()

    def _on_pre_vote(self, sender: ReplicaId, message: PreVote) -> None:
        granted = (
            message.term > self.term
            and not self._loyal()
            and (message.last_term, message.last_index) >= (self.store.last_term, self.store.last_index)
        )
        self.send_after_sync(sender, PreVoteReply(self.term, message.term, granted))

    def _on_pre_vote_reply(self, sender: ReplicaId, message: PreVoteReply) -> None:
        if message.granted and message.for_term == self._pre_vote_term == self.term + 1 and self.role != LEADER:
            self._pre_votes.add(sender)
            self._count_pre_votes()

    def _on_request_vote(self, sender: ReplicaId, message: RequestVote) -> None:
        if self._loyal() and not message.transfer:
            return
        if message.term < self.term:
            self.send_after_sync(sender, VoteReply(self.term, granted=False))
        elif message.term == self.term and self.vote == sender:
            self.send_after_sync(sender, VoteReply(self.term, granted=True))  # the first answer was lost
        else:
            if message.term > self.term:
                self._take_term(message.term)
            self.stock_receive(
                sender,
                {
                    "type": "request_vote",
                    "term": message.term,
                    "last_log_index": message.last_index,
                    "last_log_term": message.last_term,
                },
            )

    def _on_vote_reply(self, sender: ReplicaId, message: VoteReply) -> None:
        if (
            message.granted
            and message.term == self.term
            and self.role == CANDIDATE
            and sender in self.replica_set.voters
            and self._is_new_vote(sender)
        ):
            self._votes.add(sender)
            self.stock_receive(sender, {"type": "response_vote", "term": message.term})

    def _is_new_vote(self, sender: ReplicaId) -> bool:
        """The stock engine counts votes without looking whose they are."""
        return sender not in self._votes

    def _on_timeout_now(self, sender: ReplicaId, message: TimeoutNow) -> None:
        if message.term == self.term and sender == self.leader and self._may_campaign():
            self._campaign = self._transferred = True
            self._elect_now()

    def on_role_change(self, role: int) -> None:
        self._campaign = False
        if role == CANDIDATE:
            self._votes = {self.replica_id}
            self.took_over = self._transferred
        elif role == LEADER:
            self._hurried_elections = 0

    def on_stock_message(self, peer: ReplicaId, message: dict[str, Any]) -> None:
        match message["type"]:
            case "request_vote":
                self.send_after_sync(
                    peer,
                    RequestVote(
                        message["term"], message["last_log_index"], message["last_log_term"], self._transferred
                    ),
                )
            case "response_vote":
                self.send_after_sync(peer, VoteReply(message["term"], granted=True))
            case other:
                raise InvariantBrokenError(f"the stock engine sent {other}")

    def _take_term(self, term: Term) -> None:
        """Somebody is ahead of us: follow."""
        self.set_term(term, None)
        self.set_role(FOLLOWER)
        self.leader = None
        if self._campaign:
            self._postpone_election()

    def _follow(self, sender: ReplicaId, term: Term) -> bool:
        """The sender says it leads ``term``. False if that is over."""
        if term < self.term:
            return False
        if term > self.term:
            self._take_term(term)
        if self.is_leader:
            raise InvariantBrokenError(f"{sender} and {self.replica_id} both lead term {term}")
        if self.role != FOLLOWER:
            self.set_role(FOLLOWER)
        if self.leader != sender:
            self.leader = sender
        self._leader_heard = self.now
        self._hurried_elections = 0
        if not self._transferred:
            self._postpone_election()
        return True
