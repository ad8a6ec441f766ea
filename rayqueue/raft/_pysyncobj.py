"""PySyncObj's insides under public names: the only file that knows them.

PySyncObj runs the elections, counts votes and matches, advances the commit
index, steps down without a quorum and keeps term and vote. What is unsafe in
it is overridden by the engine (docs/raft.md tells each finding). Python's name
mangling makes that possible without a fork: a private method ``__x`` of
``SyncObj`` is the attribute ``_SyncObj__x``, and a subclass that defines that
name is called instead.

Those names are nobody's promise. So the version is checked at import, and so
is every name used here: a release that renames one is refused, not
misunderstood.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pysyncobj.syncobj as _stock
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.version import VERSION

from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.raft.journal import StoreJournal
from rayqueue.records.checksum import crc32c

WRITTEN_FOR = "0.3.17"

OVERRIDDEN = (
    "applyLogEntries",
    "connectedToAnyone",
    "generateRaftTimeout",
    "getEntries",
    "onBecomeLeader",
    "sendAppendEntries",
    "setState",
    "tryLogCompaction",
)
CALLED = ("onMessageReceived", "setCurrentTerm", "onLeaderChanged")

if VERSION != WRITTEN_FOR:
    raise ImportError(
        f"rayqueue.raft was written for pysyncobj {WRITTEN_FOR}, found {VERSION}. Install pysyncobj=={WRITTEN_FOR}."
    )
for _name in OVERRIDDEN + CALLED:
    if not callable(getattr(SyncObj, f"_SyncObj__{_name}", None)):
        raise ImportError(f"pysyncobj {VERSION} has no SyncObj.__{_name}; it is not the release rayqueue.raft knows")


# Time is handed in with every step. The stock engine asks a module-level function for it, so that function
# answers with the time of the step that runs on this thread, and with the real clock to anybody else.
_step = threading.local()
_real_monotonic = time.monotonic


def _monotonic() -> float:
    now: float | None = getattr(_step, "now", None)
    return _real_monotonic() if now is None else now


_stock.monotonicTime = _monotonic

FOLLOWER: int = _stock._RAFT_STATE.FOLLOWER
CANDIDATE: int = _stock._RAFT_STATE.CANDIDATE
LEADER: int = _stock._RAFT_STATE.LEADER

NO_OP: int = _stock._COMMAND_TYPE.NO_OP
MEMBERSHIP: int = _stock._COMMAND_TYPE.MEMBERSHIP


class Peer(Node):  # type: ignore[misc]  # pysyncobj has no types
    """A node whose hash, and so its place in the stock engine's sets, is the same in every process."""

    def __init__(self, replica_id: ReplicaId) -> None:
        super().__init__(replica_id)
        self._hash = crc32c(replica_id.encode())

    def __hash__(self) -> int:
        return self._hash


class _NoPoller:
    """The engine is driven from outside and owns no sockets."""

    def poll(self, timeout: float) -> None:
        pass


class _Outlet:
    """The stock engine's transport, as it thinks: hands each message to the subclass."""

    ready = True

    def __init__(self, owner: StockRaft) -> None:
        self._owner = owner

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        self._owner.on_stock_message(ReplicaId(node.id), message)
        return True

    def _ignore(self, *_: object) -> None:
        pass

    setOnNodeConnectedCallback = _ignore  # noqa: N815
    setOnNodeDisconnectedCallback = _ignore  # noqa: N815
    setOnMessageReceivedCallback = _ignore  # noqa: N815
    setOnReadonlyNodeConnectedCallback = _ignore  # noqa: N815
    setOnReadonlyNodeDisconnectedCallback = _ignore  # noqa: N815
    setOnUtilityMessageCallback = _ignore  # noqa: N815
    destroy = _ignore


class _JournalSlot:
    """A data descriptor in the place of the stock engine's journal attribute.

    ``SyncObj.__init__`` creates a journal of its own kind and assigns it. The
    descriptor lets that assignment pass by and answers with ours.
    """

    def __get__(self, owner: StockRaft, _: type | None = None) -> StoreJournal:
        return owner.journal

    def __set__(self, owner: StockRaft, value: object) -> None:
        pass


class StockRaft(SyncObj):  # type: ignore[misc]  # pysyncobj has no types
    """``SyncObj`` with public names, driven by hand. The engine subclasses it."""

    _SyncObj__raftLog = _JournalSlot()

    def __init__(
        self,
        replica_id: ReplicaId,
        journal: StoreJournal,
        applied: Index,
        now: float,
        *,
        heartbeat_s: float,
        fallback_s: float,
    ) -> None:
        self.journal = journal
        self.now = now
        self._known: dict[ReplicaId, Peer] = {}
        _step.now = now
        try:
            super().__init__(
                Peer(replica_id),
                [],
                conf=SyncObjConf(
                    autoTick=False,
                    dynamicMembershipChange=False,
                    appendEntriesPeriod=heartbeat_s,
                    leaderFallbackTimeout=fallback_s,
                    # Elections ask election_timeout_s() instead; these only have to pass the stock checks.
                    raftMinTimeout=heartbeat_s * 4,
                    raftMaxTimeout=heartbeat_s * 5,
                    connectionTimeout=heartbeat_s * 6,
                    useFork=False,
                    pollerType="poll",
                ),
                transport=_Outlet(self),
            )
        finally:
            _step.now = None
        self._poller = _NoPoller()
        self._SyncObj__raftLastApplied = applied

    def __dir__(self) -> list[str]:
        # The stock constructor looks for replicated methods by reading every attribute, among them properties
        # that have no value yet. There are no such methods here.
        return list(super().__dir__()) if "_SyncObj__properies" in self.__dict__ else []

    # -- for the engine to define --------------------------------------------

    def on_stock_message(self, peer: ReplicaId, message: dict[str, Any]) -> None:
        """The stock engine wants to say something."""
        raise NotImplementedError

    def on_role_change(self, role: int) -> None:
        """The role is another now, or a candidate starts over."""
        raise NotImplementedError

    def on_heartbeat_due(self) -> None:
        raise NotImplementedError

    def apply_committed(self) -> None:
        raise NotImplementedError

    def election_timeout_s(self) -> float:
        raise NotImplementedError

    # -- the stock methods that are replaced -----------------------------------

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        return self.election_timeout_s()

    def _SyncObj__connectedToAnyone(self) -> bool:  # noqa: N802
        return True  # whether an election makes sense is the pre-vote's question

    def _SyncObj__setState(self, new: int) -> None:  # noqa: N802
        old = self.role
        SyncObj._SyncObj__setState(self, new)
        if old != new or new == CANDIDATE:
            self.on_role_change(new)

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        SyncObj._SyncObj__onBecomeLeader(self)
        if self.noop_index != self.journal[-1][1]:
            raise InvariantBrokenError("a new leader's first entry is not the last of its log")

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        self._SyncObj__newAppendEntriesTime = self.now + self._SyncObj__conf.appendEntriesPeriod
        self.on_heartbeat_due()

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        self.apply_committed()
        return False

    def _SyncObj__getEntries(  # noqa: N802
        self,
        fromIDx: int,  # noqa: N803
        count: int | None = None,
        maxSizeBytes: int | None = None,  # noqa: N803
    ) -> list[tuple[bytes, int, int]]:
        # The only stock caller left asks for one entry's term before it commits it.
        if count != 1:
            raise InvariantBrokenError("the stock engine asked for entries")
        return [self.journal[fromIDx - self.journal[0][1]]]

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        """Stock compaction drops the log up to the applied index, and that is the messages."""

    # -- running it ---------------------------------------------------------------

    def stock_tick(self) -> None:
        """Election if due, commit, step down without quorum, apply, heartbeat if due."""
        _step.now = self.now
        try:
            self._onTick(0.0)
        finally:
            _step.now = None

    def stock_receive(self, sender: ReplicaId, message: dict[str, Any]) -> None:
        _step.now = self.now
        try:
            SyncObj._SyncObj__onMessageReceived(self, self._peer(sender), message)
        finally:
            _step.now = None

    def _peer(self, replica_id: ReplicaId) -> Peer:
        known = self._known.get(replica_id)
        if known is None:
            known = self._known[replica_id] = Peer(replica_id)
        return known

    def set_peers(self, voters: Iterable[ReplicaId], learners: Iterable[ReplicaId]) -> None:
        """Set the other replicas of the group."""
        self._known.clear()
        self._SyncObj__otherNodes = {self._peer(peer) for peer in sorted(voters)}
        self._SyncObj__readonlyNodes = {self._peer(peer) for peer in sorted(learners)}
        everyone = self._SyncObj__otherNodes | self._SyncObj__readonlyNodes
        for table, default in (
            (self._SyncObj__raftMatchIndex, 0),
            (self._SyncObj__raftNextIndex, self.journal[-1][1] + 1),
            (self._SyncObj__lastResponseTime, self.now),
        ):
            for node in [node for node in table if node not in everyone]:
                del table[node]
            for node in everyone:
                table.setdefault(node, default)

    def peer_answered(self, peer: ReplicaId, match: Index) -> None:
        """A member's answer came, and its log matches up to there."""
        node = self._peer(peer)
        self._SyncObj__lastResponseTime[node] = self.now
        if match > self._SyncObj__raftMatchIndex[node]:
            self._SyncObj__raftMatchIndex[node] = match

    def peer_forgot(self, peer: ReplicaId) -> None:
        """A peer has lost its log: what it has confirmed before counts no more."""
        self._SyncObj__raftMatchIndex[self._peer(peer)] = 0

    def set_term(self, term: Term, vote: ReplicaId | None) -> None:
        SyncObj._SyncObj__setCurrentTerm(self, term, vote)

    def set_role(self, role: int) -> None:
        self._SyncObj__setState(role)

    # -- its state -------------------------------------------------------------------

    @property
    def role(self) -> int:
        role: int = self._SyncObj__raftState
        return role

    @property
    def term(self) -> Term:
        return Term(self._SyncObj__raftCurrentTerm)

    @property
    def vote(self) -> ReplicaId | None:
        vote: ReplicaId | None = self._SyncObj__votedForNodeId
        return vote

    @property
    def leader(self) -> ReplicaId | None:
        node = self._SyncObj__raftLeader
        return None if node is None else ReplicaId(node.id)

    @leader.setter
    def leader(self, leader: ReplicaId | None) -> None:
        self._SyncObj__raftLeader = None if leader is None else self._peer(leader)

    @property
    def commit(self) -> Index:
        return Index(self._SyncObj__raftCommitIndex)

    @commit.setter
    def commit(self, index: Index) -> None:
        self._SyncObj__raftCommitIndex = index
        self.journal.setRaftCommitIndex(index)

    @property
    def applied(self) -> Index:
        return Index(self._SyncObj__raftLastApplied)

    @applied.setter
    def applied(self, index: Index) -> None:
        self._SyncObj__raftLastApplied = index

    @property
    def noop_index(self) -> int:
        """Index of the first entry of this leadership."""
        index: int = self._SyncObj__noopIDx
        return index

    @property
    def election_deadline(self) -> float:
        deadline: float = self._SyncObj__raftElectionDeadline
        return deadline

    @election_deadline.setter
    def election_deadline(self, deadline: float) -> None:
        self._SyncObj__raftElectionDeadline = deadline

    @property
    def next_heartbeat(self) -> float:
        at: float = self._SyncObj__newAppendEntriesTime
        return at
