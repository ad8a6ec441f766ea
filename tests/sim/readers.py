"""Readers of the simulated partition, and the bits that flip on the disks which they read.

A reader goes through the log from its beginning, lane by lane or in the order
of offsets, asks whoever leads or anybody, and believes what it is told. What
it is told is compared with the committed log at once: the bytes that were
committed there, in order, without a gap, and nothing that is not committed.

A bit may flip in an entry, in a row or in the write-ahead file of a replica,
of a minority of the replicas at most. Then nobody may get wrong bytes, the
damaged replica leads no more once it noticed, the keeper replaces it, and
after healing readers and producers come to their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.errors import OffsetOutOfRangeError, RayQueueError
from rayqueue.partition import Fetched
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.data import ANY_LANE, Cursor

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

MAX_BYTES = 600
_TIMEOUT_S = 1.0


class SimReader:
    """One fetch at a time; a new one whenever there was something, otherwise when it is told to look."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        by_lane = world.partition_settings.lanes > 1 and rng.random() < 0.6
        lanes = range(world.partition_settings.lanes) if by_lane else (ANY_LANE,)
        self.positions = dict.fromkeys(lanes, 0)
        self._asked = 0
        self._waits = False

    @property
    def is_at_end(self) -> bool:
        ends = self.world.checker.reads.lane_ends
        return all(
            offset >= (max(ends.values(), default=0) if lane == ANY_LANE else ends.get(lane, 0))
            for lane, offset in self.positions.items()
        )

    def look(self) -> None:
        nodes = [node for node in self.world.nodes.values() if node.alive and not node.removed]
        if self._waits or not nodes:
            return
        leaders = [node for node in nodes if node.engine.is_leader]
        node = self.rng.choice(leaders if leaders and self.rng.random() < 0.7 else nodes)
        cursors = tuple(Cursor(lane, offset) for lane, offset in self.positions.items())
        self._waits = True
        self._asked += 1
        asked = self._asked
        node.fetch(cursors, MAX_BYTES, lambda result: self._answered(asked, node, cursors, result))
        self.world.clock.after(_TIMEOUT_S, lambda: self._give_up(asked))

    def drain(self) -> None:
        """Look for whatever comes, from now on."""
        if not self.is_at_end:
            self.look()
        self.world.clock.after(0.1, self.drain)

    def _give_up(self, asked: int) -> None:
        if asked == self._asked:
            self._waits = False

    def _answered(self, asked: int, node: SimNode, cursors: Sequence[Cursor], result: Any) -> None:
        if not isinstance(result, RayQueueError):
            self.world.checker.reads.check(node, cursors, result)
        if asked != self._asked:
            return
        self._waits = False
        if isinstance(result, OffsetOutOfRangeError):
            start = result.details["start"]
            self.positions = {lane: max(offset, start) for lane, offset in self.positions.items()}
        elif not isinstance(result, RayQueueError) and result:
            self._advance(result)
            self.world.clock.after(self.rng.uniform(0.001, 0.05), self.look)

    def _advance(self, found: Sequence[Fetched]) -> None:
        for base, count, _ in found:
            lane = ANY_LANE if ANY_LANE in self.positions else self.world.checker.reads.lane_of(base)
            self.positions[lane] = max(self.positions[lane], base + count)


def flip_a_bit(node: SimNode, rng: Random) -> None:
    """Somewhere on this replica's disk; nowhere if there is nothing yet."""
    disk = node.disk.disk
    bit = rng.randrange(1 << 16)
    tables = [table for table in PARTITION.tables if len(disk.tables[table])]
    entries = sorted(index for index in disk.entries if index > disk.base_index)
    kind = rng.choice(("entry", "entry", "row", "row", "ahead"))
    if kind == "entry" and entries:
        disk.rot_entry(rng.choice(entries), bit)
    elif kind == "row" and tables:
        table = rng.choice(tables)
        disk.rot_row(table, rng.choice(disk.tables[table].range(b"", None))[0], bit)
    elif kind == "ahead":
        content = disk.wal.content
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        disk.wal.writes += 1
