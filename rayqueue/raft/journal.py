"""PySyncObj's Journal, kept in a LogStore.

PySyncObj sees a journal as a list of ``(command, index, term)`` that is never
empty. Here position 0 is the base: the entry before the first one kept, of
which only index and term are known.

Truncation and compaction of the stock engine are replaced (they drop entries
that were acknowledged, see docs/raft.md), so their entrances are closed.
"""

from __future__ import annotations

from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.store import Entry, HardState, LogStore
from rayqueue.records.checksum import entry_crc


class StoreJournal:
    """The names are PySyncObj's; the store is ours."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return self._store.last_index - self._store.base_index + 1

    def __getitem__(self, position: int) -> tuple[bytes, int, int]:
        if position == -1:
            return b"", self._store.last_index, self._store.last_term
        term = self._store.term_at(Index(self._store.base_index + position))
        if position < 0 or term is None:
            raise IndexError(position)
        return b"", self._store.base_index + position, term

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._store.append([Entry(Index(idx), Term(term), command, entry_crc(idx, term, command))])

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        hard = self._store.hard
        if raftCommitIndex != hard.commit:
            self._store.set_hard(HardState(hard.term, hard.voted_for, Index(raftCommitIndex)))

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        # The stored commit index is a hint and may be older than what the tables show was applied.
        return max(self._store.hard.commit, self._store.applied)

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        vote = None if votedForNodeId is None else ReplicaId(votedForNodeId)
        self._store.set_hard(HardState(Term(term), vote, self._store.hard.commit))

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._store.hard.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._store.hard.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Nothing is saved by the clock; ``sync`` saves."""

    def clear(self) -> None:
        raise InvariantBrokenError("the stock engine tried to clear the journal")

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        raise InvariantBrokenError("the stock engine tried to truncate the journal")

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        raise InvariantBrokenError("the stock engine tried to compact the journal")

    def _destroy(self) -> None:
        """The store's owner closes it."""
