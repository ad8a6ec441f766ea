"""What must hold in every schedule, checked while it runs and after it.

While it runs:
- one leader per term, and it holds everything that was committed before that term;
- an entry that one replica committed at an index is the one that every replica commits there;
- an acknowledged batch is on the disk of a majority of the voters at that moment;
- a confirmed leader knows everything that was acknowledged before it was asked.

After healing:
- everything that was sent is acknowledged, and the members agree;
- replaying the committed log gives the state that each of them has: nothing was applied twice or left out;
- each acknowledged batch is there once, where its answer said, in its producer's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayqueue.errors import DamagedLogError
from rayqueue.ids import GroupId, Index, NodeId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.ops import Append
from rayqueue.log.store import Entry, Table
from rayqueue.log.wal import Wal
from rayqueue.partition import Appended, Partition
from rayqueue.raft.members import Members
from rayqueue.records import BatchHeader
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.node import EngineNode, SimNode
    from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Ack:
    producer_id: int
    sequence: int
    base_offset: int
    count: int


class OnDisk:
    """What a loss of power at this moment would leave of the logs: the tables, and what the write-ahead file adds."""

    def __init__(self) -> None:
        self._seen: dict[NodeId, tuple[object, dict[Index, Term]]] = {}

    def has(self, store: MemoryStore, index: Index, term: Term) -> bool:
        disk = store.disk
        if index <= disk.base_index:
            return True
        stored = disk.entries.get(index)
        found = stored.term if stored is not None else self._ahead(store).get(index)
        return found == term

    def _ahead(self, store: MemoryStore) -> dict[Index, Term]:
        disk = store.disk
        version = (disk.wal, disk.txn_id, disk.wal.writes)
        known = self._seen.get(store.node_id)
        if known is None or known[0] != version:
            try:
                records = list(Wal(disk.wal).replay(disk.txn_id))
            except DamagedLogError as error:
                raise BrokenError(Invariant.OPENS, f"{store.node_id} could not be opened now: {error}") from error
            terms = {op.entry.index: op.entry.term for ops in records for op in ops if isinstance(op, Append)}
            known = self._seen[store.node_id] = version, terms
        return known[1]


class LogChecker:
    """What holds of every group's log, whatever it means."""

    def __init__(self) -> None:
        self.committed: dict[Index, Entry] = {}
        self.last_committed = Index(0)
        self.committed_in: dict[Index, int] = {}
        """The term in which an entry was committed at the latest: that of whoever was first seen to know it."""
        self.leaders: dict[int, NodeId] = {}

    def after_step(self, node: EngineNode) -> None:
        engine = node.engine
        if engine.is_leader:
            first = self.leaders.get(engine.term)
            if first is None:
                self.leaders[engine.term] = node.node_id
                self.on_new_leader(node)
            elif first != node.node_id:
                raise BrokenError(Invariant.ONE_LEADER, f"{first} and {node.node_id} both lead term {engine.term}")
        self.watch_commit(node)

    def on_new_leader(self, node: EngineNode) -> None:
        """It may have won late, when a newer term has begun already: what was committed there is not asked of it."""
        term, store = node.engine.term, node.disk
        for index in range(store.base_index + 1, self.last_committed + 1):
            known = self.committed.get(Index(index))
            if known is not None and self.committed_in[known.index] < term and store.term_at(known.index) != known.term:
                raise BrokenError(
                    Invariant.LEADER_COMPLETENESS,
                    f"{node.node_id} leads term {term} and lacks entry {index} of term {known.term}, "
                    f"which was committed in term {self.committed_in[known.index]}",
                )

    def watch_commit(self, node: EngineNode) -> None:
        """Compare what this replica committed since the last look with what anybody committed there."""
        engine, store = node.engine, node.disk
        if engine.commit < node.checked_commit:
            node.checked_commit = engine.commit  # it restarted with an older hint
        index = Index(max(node.checked_commit, store.base_index) + 1)
        while index <= engine.commit:
            entry = store.entry(index)
            known = self.committed.setdefault(index, entry)
            self.committed_in.setdefault(index, engine.term)
            if (known.term, known.crc) != (entry.term, entry.crc):
                raise BrokenError(
                    Invariant.ONE_LOG,
                    f"{node.node_id} committed entry {index} of term {entry.term}, somebody else one of {known.term}",
                )
            index = Index(index + 1)
        node.checked_commit = engine.commit
        self.last_committed = max(self.last_committed, engine.commit)


class Checker(LogChecker):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.acks: dict[tuple[int, int], Ack] = {}
        self.acked_index = Index(0)
        self.on_disk = OnDisk()

    # -- while it runs -----------------------------------------------------------------

    def acknowledged(self, node: SimNode, ack: Ack) -> None:
        known = self.acks.setdefault((ack.producer_id, ack.sequence), ack)
        if known != ack:
            raise BrokenError(Invariant.ONE_ANSWER, f"two answers for one batch: {known} and {ack}")
        # The entry that holds the batch: the answer's own row says which.
        row = node.machine.locate(ack.base_offset)
        if row is None:
            return  # trimmed already
        entry = self.committed.get(row)
        if entry is None:
            raise BrokenError(
                Invariant.ON_A_MAJORITY, f"{ack} was acknowledged by {node.node_id} before it was committed"
            )
        self.acked_index = max(self.acked_index, row)
        holders = [
            other.node_id for other in self.world.nodes.values() if self.on_disk.has(other.disk, row, entry.term)
        ]
        # A membership that is in the log but came after the commit does not count against it.
        memberships = [Members.decode(row) for _, row in node.disk.scan(Table.MEMBERS, reverse=True)][:2]
        if not any(members.is_majority(holders) for members in memberships):
            voters = sorted(memberships[0].voters)
            raise BrokenError(
                Invariant.ON_A_MAJORITY, f"{ack} was acknowledged, but only {holders} of {voters} have it on disk"
            )

    # -- after healing --------------------------------------------------------------------

    def finally_agree(self, nodes: list[SimNode]) -> None:
        last = self.last_committed
        reference = MemoryStore(GroupId("sim-0"), NodeId("reference"))
        machine = Partition(reference, self.world.partition_settings)
        accepted: list[tuple[int, BatchHeader]] = []
        for index in range(1, last + 1):
            entry = self.committed.get(Index(index))
            if entry is None:
                raise BrokenError(Invariant.ONE_LOG, f"nobody remembers committed entry {index} of {last}")
            reference.append([entry])
            if entry.payload[0] < 4:
                continue
            result = machine.apply(Index(index), entry.payload)
            if isinstance(result, Appended) and not result.duplicate:
                accepted.append((result.base_offset, BatchHeader.parse(entry.payload)))
        expected = machine.checkpoint()
        for node in nodes:
            if node.engine.applied != last:
                raise BrokenError(Invariant.PROGRESS, f"{node.node_id} applied {node.engine.applied} of {last}")
            if node.machine.checkpoint() != expected:
                raise BrokenError(Invariant.SAME_STATE, f"{node.node_id} has another state than the log gives")
            self._check_rows(node, reference)
        self._check_acks(accepted)

    def _check_rows(self, node: SimNode, reference: MemoryStore) -> None:
        if node.machine.first_needed() <= node.disk.base_index:
            raise BrokenError(Invariant.READABLE, f"{node.node_id} trimmed what readers may still ask for")
        # Rows before the first readable batch are swept a few at a time, so replicas may differ there.
        start = node.machine.start_offset
        first = next(reference.scan(Table.OFFSETS, stop=(start + 1).to_bytes(8, "big"), reverse=True), (b"", b""))[0]
        for table, begin in ((Table.OFFSETS, first), (Table.PRODUCERS, b""), (Table.GROUPS, b"")):
            if list(node.disk.scan(table, begin)) != list(reference.scan(table, begin)):
                raise BrokenError(Invariant.SAME_STATE, f"{node.node_id} has other {table.name} than the log gives")

    def _check_acks(self, accepted: list[tuple[int, BatchHeader]]) -> None:
        where: dict[tuple[int, int], int] = {}
        newest: dict[int, int] = {}
        offset = 0
        for base_offset, header in accepted:
            key = (header.producer_id, header.sequence)
            if key in where:
                raise BrokenError(Invariant.IN_PLACE, f"batch {key} is there twice, at {where[key]} and {base_offset}")
            if base_offset != offset:
                raise BrokenError(Invariant.IN_PLACE, f"offsets are not dense: {base_offset} follows {offset}")
            if header.sequence <= newest.get(header.producer_id, -1):
                raise BrokenError(Invariant.IN_PLACE, f"batch {key} is out of its producer's order")
            where[key] = base_offset
            newest[header.producer_id] = header.sequence
            offset += header.count
        for key, ack in self.acks.items():
            if where.get(key) != ack.base_offset:
                raise BrokenError(Invariant.IN_PLACE, f"{ack} was acknowledged and is at {where.get(key)} now")
