"""The checker of the partition's world: what must hold in every schedule, while it runs and after it.

While it runs:
- one leader per term, and it holds everything that was committed before that term;
- an entry that one replica committed at an index is the one that every replica commits there;
- an acknowledged batch is on the disk of a majority of the voters at that moment;
- a reader, of any replica, gets the committed batches, without a gap, and nothing else (``readers``);
- a replica that knows that its disk is damaged does not lead;
- a confirmed leader knows everything that was acknowledged before it was asked.

After healing:
- everything that was sent is acknowledged, and the members agree;
- replaying the committed log gives the state that each of them has: nothing was applied twice or left out;
- each acknowledged batch is there once, where its answer said, in its producer's order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rayqueue.errors import DamagedLogError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.ops import Append
from rayqueue.log.store import MEMBERS, Entry
from rayqueue.log.wal import Wal
from rayqueue.partition import Appended, Fetched, Partition, PartitionSettings
from rayqueue.partition.tables import GROUPS, OFFSETS, PARTITION, PRODUCERS
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import BatchHeader
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.node import EngineNode, SimNode
    from tests.sim.world import World


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ack:
    producer_id: int
    sequence: int
    base_offset: int
    count: int


class OnDisk:
    """What a loss of power at this moment would leave of the logs: the tables, and what the write-ahead file adds."""

    def __init__(self) -> None:
        self._seen: dict[ReplicaId, tuple[object, dict[Index, Term]]] = {}

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
        known = self._seen.get(store.replica_id)
        if known is None or known[0] != version:
            try:
                records = list(Wal(disk.wal).replay(disk.txn_id, PARTITION.by_number))
            except DamagedLogError as error:
                raise BrokenError(Invariant.OPENS, f"{store.replica_id} could not be opened now: {error}") from error
            terms = {op.entry.index: op.entry.term for ops in records for op in ops if isinstance(op, Append)}
            known = self._seen[store.replica_id] = version, terms
        return known[1]


def _undamaged(node: EngineNode, look: Callable[[], T], otherwise: T) -> T:
    """What the replica has there; ``otherwise`` if that bit of its disk flipped, which is not for us to notice."""
    try:
        return look()
    except DamagedLogError:
        if not node.is_spoiled:
            raise
        return otherwise


def _has(store: MemoryStore, entry: Entry) -> bool:
    return store.term_at(entry.index) == entry.term


class LogChecker:
    """What holds of every group's log, whatever it means."""

    def __init__(self) -> None:
        self.committed: dict[Index, Entry] = {}
        self.last_committed = Index(0)
        self.committed_in: dict[Index, int] = {}
        """The term in which an entry was committed at the latest: that of whoever was first seen to know it."""
        self.leaders: dict[int, ReplicaId] = {}

    def after_step(self, node: EngineNode) -> None:
        engine = node.engine
        if engine.is_leader:
            first = self.leaders.get(engine.term)
            if first is None:
                self.leaders[engine.term] = node.replica_id
                self.on_new_leader(node)
            elif first != node.replica_id:
                raise BrokenError(Invariant.ONE_LEADER, f"{first} and {node.replica_id} both lead term {engine.term}")
        self.watch_commit(node)

    def on_new_leader(self, node: EngineNode) -> None:
        """It may have won late, when a newer term has begun already: what was committed there is not asked of it."""
        term, store = node.engine.term, node.disk
        for index in range(store.base_index + 1, self.last_committed + 1):
            known = self.committed.get(Index(index))
            if known is None or self.committed_in[known.index] >= term:
                continue
            if not _undamaged(node, partial(_has, store, known), True):
                raise BrokenError(
                    Invariant.LEADER_COMPLETENESS,
                    f"{node.replica_id} leads term {term} and lacks entry {index} of term {known.term}, "
                    f"which was committed in term {self.committed_in[known.index]}",
                )

    def watch_commit(self, node: EngineNode) -> None:
        """Compare what this replica committed since the last look with what anybody committed there."""
        engine, store = node.engine, node.disk
        if engine.commit < node.checked_commit:
            node.checked_commit = engine.commit  # it restarted with an older hint
        index = Index(max(node.checked_commit, store.base_index) + 1)
        while index <= engine.commit:
            entry: Entry | None = _undamaged(node, partial(store.entry, index), None)
            if entry is None:
                break
            known = self.committed.setdefault(index, entry)
            self.committed_in.setdefault(index, engine.term)
            if (known.term, known.crc) != (entry.term, entry.crc):
                raise BrokenError(
                    Invariant.ONE_LOG,
                    f"{node.replica_id} committed entry {index} of term {entry.term}, another one of {known.term}",
                )
            index = Index(index + 1)
        node.checked_commit = engine.commit
        self.last_committed = max(self.last_committed, engine.commit)


class ReadChecker:
    """The batches of the committed log, from a machine beside the replicas', and what readers are told of them."""

    def __init__(self, settings: PartitionSettings) -> None:
        self.store = MemoryStore(GroupId("sim-0"), ReplicaId("reference"), PARTITION)
        self.machine = Partition(self.store, settings)
        self.applied = Index(0)
        self.batches: list[Fetched] = []
        self.lane_ends: dict[int, int] = {}
        self.on_applied: Callable[[Entry, Any], None] = lambda entry, answer: None
        self._bases: list[int] = []
        self._lanes: list[int] = []

    def apply(self, committed: Mapping[Index, Entry]) -> None:
        while (entry := committed.get(Index(self.applied + 1))) is not None:
            self.applied = entry.index
            self.store.append([entry])
            if entry.payload[0] < 4:
                continue
            result = self.machine.apply(entry.index, entry.payload)
            self.on_applied(entry, result)
            if isinstance(result, Appended) and not result.duplicate:
                lane = BatchHeader.parse(entry.payload).lane if self.machine.settings.lanes > 1 else 0
                self.batches.append(Fetched(result.base_offset, result.count, entry.payload))
                self._bases.append(result.base_offset)
                self._lanes.append(lane)
                self.lane_ends[lane] = result.base_offset + result.count

    def lane_of(self, base_offset: int) -> int:
        return self._lanes[bisect_left(self._bases, base_offset)]

    def check(self, node: EngineNode, cursors: Sequence[Cursor], found: Sequence[Fetched]) -> None:
        """Of each lane that was asked for, the next batches after its cursor and no others."""
        left = list(found)
        for lane, offset in cursors:
            at = max(bisect_right(self._bases, offset) - 1, 0)
            expected = [
                batch
                for batch, its_lane in zip(self.batches[at:], self._lanes[at:], strict=True)
                if lane in (ANY_LANE, its_lane) and batch.base_offset + batch.count > offset
            ]
            mine = [batch for batch in left if batch in expected]
            if mine != expected[: len(mine)]:
                bases = [batch.base_offset for batch in mine]
                raise BrokenError(Invariant.READS, f"{node.replica_id} left out batches of lane {lane}: {bases}")
            left = [batch for batch in left if batch not in mine]
        if left:
            raise BrokenError(
                Invariant.READS, f"{node.replica_id} answered {cursors} with what nobody committed: {left}"
            )


class Checker(LogChecker):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.acks: dict[tuple[int, int], Ack] = {}
        self.acked_index = Index(0)
        self.on_disk = OnDisk()
        self.reads = ReadChecker(world.partition_settings)

    # -- while it runs -----------------------------------------------------------------

    def after_step(self, node: EngineNode) -> None:
        super().after_step(node)
        if node.disk.damaged is not None and node.engine.is_leader:
            raise BrokenError(Invariant.DAMAGED_FOLLOWS, f"{node.replica_id} leads and knows: {node.disk.damaged}")

    def watch_commit(self, node: EngineNode) -> None:
        super().watch_commit(node)
        self.reads.apply(self.committed)

    def acknowledged(self, node: SimNode, ack: Ack) -> None:
        known = self.acks.setdefault((ack.producer_id, ack.sequence), ack)
        if known != ack:
            raise BrokenError(Invariant.ONE_ANSWER, f"two answers for one batch: {known} and {ack}")
        # The entry that holds the batch: the answer's own row says which.
        row = _undamaged(node, lambda: node.machine.locate(ack.base_offset), None)
        if row is None:
            return  # trimmed already
        entry = self.committed.get(row)
        if entry is None:
            raise BrokenError(
                Invariant.ON_A_MAJORITY, f"{ack} was acknowledged by {node.replica_id} before it was committed"
            )
        self.acked_index = max(self.acked_index, row)
        holders = [other.replica_id for other in self.world.nodes.values() if self._holds(other, row, entry.term)]
        # A membership that is in the log but came after the commit does not count against it.
        memberships = _undamaged(
            node,
            lambda: [ReplicaSet.decode(row) for _, row in node.disk.scan(MEMBERS, reverse=True)][:2],
            [node.engine.replica_set],
        )
        if not any(members.is_majority(holders) for members in memberships):
            voters = sorted(memberships[0].voters)
            raise BrokenError(
                Invariant.ON_A_MAJORITY, f"{ack} was acknowledged, but only {holders} of {voters} have it on disk"
            )

    def _holds(self, node: SimNode, index: Index, term: Term) -> bool:
        """Where bits have flipped, what the replica believes to have: that much of a minority may be gone. And what an
        older copy lacks is on others, which it waits for."""
        if node.disk.copied:
            return True
        if not node.is_spoiled:
            return self.on_disk.has(node.disk, index, term)
        return not node.alive or _undamaged(
            node, lambda: index <= node.disk.base_index or node.disk.term_at(index) == term, True
        )

    # -- after healing --------------------------------------------------------------------

    def finally_agree(self, nodes: list[SimNode]) -> None:
        last = self.last_committed
        self.reads.apply(self.committed)
        if self.reads.applied != last:
            raise BrokenError(Invariant.ONE_LOG, f"nobody remembers committed entry {self.reads.applied + 1} of {last}")
        reference, machine = self.reads.store, self.reads.machine
        expected = machine.checkpoint()
        for node in nodes:
            if node.engine.applied != last:
                raise BrokenError(Invariant.PROGRESS, f"{node.replica_id} applied {node.engine.applied} of {last}")
            if node.machine.checkpoint() != expected:
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} has another state than the log gives")
            if not node.is_spoiled:
                self._check_rows(node, reference)
        self._check_acks([(batch.base_offset, BatchHeader.parse(batch.payload)) for batch in self.reads.batches])

    def _check_rows(self, node: SimNode, reference: MemoryStore) -> None:
        if node.machine.first_needed() <= node.disk.base_index:
            raise BrokenError(Invariant.READABLE, f"{node.replica_id} trimmed what readers may still ask for")
        # Rows before the first readable batch are swept a few at a time, so replicas may differ there.
        start = node.machine.start_offset
        first = next(reference.scan(OFFSETS, stop=(start + 1).to_bytes(8, "big"), reverse=True), (b"", b""))[0]
        for table, begin in ((OFFSETS, first), (PRODUCERS, b""), (GROUPS, b"")):
            if list(node.disk.scan(table, begin)) != list(reference.scan(table, begin)):
                raise BrokenError(Invariant.SAME_STATE, f"{node.replica_id} has other {table.name} than the log gives")

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
