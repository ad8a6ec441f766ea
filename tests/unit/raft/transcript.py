"""Transcripts of a Raft group: events in, messages out, as text that can be read in review.

A line that begins at the margin is an event; the indented lines after it are what
came of it. A line that begins with ``#`` is a remark. Events:

    group n1 n2 n3          a new group of these voters
    new n4                  a replica that belongs to no group yet
    elect n1                n1 becomes the leader; how is told elsewhere
    timeout n1              n1 has heard of no leader for as long as it waits, and stands itself
    patience n2             n2 has heard of no leader for so long that it is loyal to none, and stands a little later
    heartbeat n1            n1's next heartbeat is due
    propose n1 a            a client gives entry "a" to n1
    n1 -> n2                the oldest message on this way arrives
    lose n1 -> n2           all messages on this way are lost
    hold n1 -> n2           the oldest message on this way is delayed ...
    late n1 -> n2           ... and arrives now
    settle                  all messages arrive, those that they cause too
    settle n1 n2            the same between these only
    learner n1 n4           n1 is asked to add n4 to its group; so promote and remove
    transfer n1 n2          n1 is asked to hand its leadership to n2
    trim n1 5               n1 may forget its log before 5
    restart n1              as after kill -9
    quietly ...             any of these; only what the replicas are after it is shown

Of a replica's turn are shown: messages that leave before the disk, ``writes`` when
it must write, messages that had to wait for that, answers, and what it is then, if
that has changed: ``n1 = leader, term 1, log 1-3, committed 3``. Entries are
index/term. Each replica has a clock of its own, which stands still but for
``timeout``, ``patience`` and ``heartbeat``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rayqueue.errors import RayQueueError
from rayqueue.ids import Index, ReplicaId
from rayqueue.log.store import Entry
from rayqueue.raft._pysyncobj import MEMBERSHIP, NO_OP
from rayqueue.raft.engine import RaftEngine
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
from rayqueue.raft.transport import Received
from rayqueue.replica.loop import Written
from tests.unit.raft.engines import Engines

_TAG = b"\x20"
"""Of entries that are the machine's."""
_MOMENT_S = 0.001


class Transcript:
    """One group, and what its replicas said."""

    def __init__(self) -> None:
        self._engines = Engines()
        self._clocks: dict[ReplicaId, float] = {}
        self._ways: dict[tuple[ReplicaId, ReplicaId], deque[Message]] = {}
        self._held: dict[tuple[ReplicaId, ReplicaId], deque[Message]] = {}
        self._shown: dict[ReplicaId, list[str]] = {}
        self._told: list[str] = []

    def play(self, text: str) -> str:
        """The same text, with what the replicas make of its events now."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("  "):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                self._told = []
                self._take(line.split())
                lines += ["  " + each for each in self._told]
        return "\n".join(lines) + "\n"

    # -- events ------------------------------------------------------------------------------

    def _take(self, words: list[str]) -> None:
        match words:
            case ["quietly", *event]:
                before = {node: shown[0] for node, shown in self._shown.items()}
                self._take(event)
                after = {node: shown[0] for node, shown in sorted(self._shown.items())}
                self._told = [f"{node} = {state}" for node, state in after.items() if state != before.get(node)]
            case ["group", *names]:
                for name in names:
                    self._add(name, ReplicaSet.of(names))
                self._told = []
            case ["new", name]:
                self._add(name, None)
            case ["timeout", name]:
                self._wait_until(ReplicaId(name), self._engine(name).election_deadline)
            case ["heartbeat", name]:
                self._wait_until(ReplicaId(name), self._engine(name).next_heartbeat)
            case ["patience", name]:
                engine = self._engine(name)
                least_s = engine.settings.election_timeout_min_ms / 1000
                self._clocks[ReplicaId(name)] = max(engine._leader_heard + least_s, self._clocks[ReplicaId(name)])
            case ["settle", *names]:
                self._settle(names or list(self._clocks))
            case ["elect", name]:
                for event in (["timeout", name], ["settle"], ["heartbeat", name], ["settle"]):
                    self._take(event)
                self._told = [f"{node} = {shown[0]}" for node, shown in sorted(self._shown.items())]
            case ["lose", sender, "->", peer]:
                self._way(sender, peer).clear()
            case ["hold", sender, "->", peer]:
                self._held.setdefault((ReplicaId(sender), ReplicaId(peer)), deque()).append(
                    self._way(sender, peer).popleft()
                )
            case ["late", sender, "->", peer]:
                way = ReplicaId(sender), ReplicaId(peer)
                self._arrive(*way, self._held[way].popleft())
            case [sender, "->", peer]:
                self._arrive(ReplicaId(sender), ReplicaId(peer), self._way(sender, peer).popleft())
            case ["restart", name]:
                self._engines.restart(ReplicaId(name))
                self._turn(ReplicaId(name))
            case ["trim", name, index]:
                self._trim(ReplicaId(name), Index(int(index)))
            case [what, name, other]:
                self._ask(what, ReplicaId(name), ReplicaId(other))
            case _:
                raise ValueError(f"no event: {' '.join(words)}")

    def _settle(self, names: Sequence[str]) -> None:
        while ways := [way for way, sent in sorted(self._ways.items()) if sent and set(way) <= set(names)]:
            self._arrive(*ways[0], self._ways[ways[0]].popleft())

    def _add(self, name: str, members: ReplicaSet | None) -> None:
        self._clocks[ReplicaId(name)] = 0.0
        self._turn(self._engines.add(name, members))

    def _wait_until(self, node: ReplicaId, when_s: float) -> None:
        self._clocks[node] = when_s + _MOMENT_S
        self._turn(node)

    def _arrive(self, sender: ReplicaId, peer: ReplicaId, message: Message) -> None:
        self._tell(f"{sender} -> {peer} arrives: {_text(message)}")
        self._engine(peer).receive(self._clocks[peer], Received(sender, message))
        self._turn(peer)

    def _trim(self, node: ReplicaId, index: Index) -> None:
        self._engines.machines[node].needed = index
        self._engine(node).maintain(1, 1000)
        self._turn(node)

    def _ask(self, what: str, node: ReplicaId, other: ReplicaId) -> None:
        engine = self._engine(node)
        context = f"{what} {other}"
        try:
            match what:
                case "propose":
                    engine.propose(_TAG + other.encode(), context)
                case "learner":
                    engine.change_replicas(engine.replica_set.with_learner(other), context)
                case "promote":
                    engine.change_replicas(engine.replica_set.with_voter(other), context)
                case "remove":
                    engine.change_replicas(engine.replica_set.without(other), context)
                case "transfer":
                    engine.transfer_leadership(other, self._clocks[node], context)
                case _:
                    raise ValueError(f"no event: {what}")
        except RayQueueError as error:
            self._tell(f"{node} refuses: {type(error).__name__}: {error}")
        self._turn(node)

    # -- a replica's turn --------------------------------------------------------------------

    def _turn(self, node: ReplicaId) -> None:
        engine, loop, now = self._engine(node), self._engines.loops[node], self._clocks[node]
        while True:
            loop.first_half(now, ())
            self._sent()
            if loop.must_write:
                self._tell(f"{node} writes")
            if loop.write(now, tables=not loop.must_write) is Written.ALL:
                loop.second_half()
            self._sent()
            for context, result in self._engines.answers.items():
                told = f"{type(result).__name__}: {result}" if isinstance(result, RayQueueError) else "done"
                self._tell(f"{node} answers {context!r}: {told}")
            self._engines.answers.clear()
            if not engine.busy:
                break
        state, before = self._state(node), self._shown.get(node, ["", ""])
        self._shown[node] = state
        for now_so, was_so, sign in zip(state, before, "=:", strict=True):
            if now_so != was_so:
                self._tell(f"{node} {sign} {now_so}")

    def _sent(self) -> None:
        # To whom first is no rule; the order on each way is.
        for sender, peer, message in sorted(self._engines.sent, key=lambda sent: sent[1]):
            self._tell(f"{sender} -> {peer}: {_text(message)}")
            self._way(sender, peer).append(message)
        self._engines.sent.clear()

    def _state(self, node: ReplicaId) -> list[str]:
        """What it is, and who belongs to its group."""
        engine, store = self._engine(node), self._engines.stores[node]
        role = "leader" if engine.is_leader else f"follower of {engine.leader}" if engine.leader else "without leader"
        log = f"log {store.base_index + 1}-{store.last_index}" if store.last_index > store.base_index else "empty log"
        return [f"{role}, term {engine.term}, {log}, committed {engine.commit}", _members(engine.replica_set)]

    def _engine(self, name: str) -> RaftEngine:
        return self._engines.engines[ReplicaId(name)]

    def _way(self, sender: str, peer: str) -> deque[Message]:
        return self._ways.setdefault((ReplicaId(sender), ReplicaId(peer)), deque())

    def _tell(self, line: str) -> None:
        self._told.append(line)


def _text(message: Message) -> str:
    match message:
        case PreVote(term, index, last_term):
            return f"PreVote for term {term}, last {index}/{last_term}"
        case PreVoteReply(term, for_term, granted):
            return f"PreVoteReply {'yes' if granted else 'no'} for term {for_term}, from term {term}"
        case RequestVote(term, index, last_term, transfer):
            return f"RequestVote term {term}, last {index}/{last_term}{', by transfer' if transfer else ''}"
        case VoteReply(term, granted):
            return f"VoteReply {'yes' if granted else 'no'}, term {term}"
        case AppendEntries(term, prev, prev_term, commit, number, entries):
            what = ", ".join(map(_entry, entries)) or "nothing"
            return f"AppendEntries term {term}, after {prev}/{prev_term}, commit {commit}, round {number}: {what}"
        case AppendReply(term, success, prev, match, number, _):
            what = f"match {match}" if success else f"no {prev} here, try {match}"
            return f"AppendReply term {term}, round {number}: {what}"
        case InstallSnapshot(term, index, index_term, number, members, state):
            of = _members(ReplicaSet.decode(members))
            return f"InstallSnapshot term {term}, {index}/{index_term}, round {number}: state {state.decode()}, {of}"
        case TimeoutNow(term):
            return f"TimeoutNow term {term}"
        case Inquiry(term, _):
            return f"Inquiry, from term {term}"
        case Account(term, _, index, last_term, _, members):
            return f"Account, last {index}/{last_term}, from term {term}, {_members(ReplicaSet.decode(members))}"


def _entry(entry: Entry) -> str:
    kind, rest = entry.payload[0], entry.payload[1:]
    what = (
        "no-op" if kind == NO_OP else _members(ReplicaSet.decode(rest)) if kind == MEMBERSHIP else repr(rest.decode())
    )
    return f"{entry.index}/{entry.term} {what}"


def _members(members: ReplicaSet) -> str:
    if not members.everyone:
        return "no group"
    learners = f", learners {' '.join(sorted(members.learners))}" if members.learners else ""
    return f"voters {' '.join(sorted(members.voters))}{learners}"
