"""A group that begins with one replica and becomes three, and older copies of its disks, also from when it was alone.

The only voter has nobody to ask, so a copy of its disk goes on alone. One that is
put into its place after others have joined would do so beside them: two leaders,
both of which acknowledge. It must know that others have joined, and wait for them.

A copy takes the place of a disk only once it is committed that others vote, and of
one replica at a time: what the only voter alone had would simply be lost.
"""

from __future__ import annotations

from rayqueue.log.memory_store import MemoryDisk
from rayqueue.raft._pysyncobj import MEMBERSHIP
from rayqueue.raft.replica_set import ReplicaSet
from tests.sim.world import RESTORE, ROT, World

COPIES = 3
LOOK_EVERY_S = 0.5


class GrownWorld(World):
    """Whatever else the seed draws, but for disks that are lost or damaged."""

    def __init__(self, seed: int, faults: frozenset[str] | None = None, ending: str | None = None) -> None:
        super().__init__(seed, faults, 1, ending)
        self.faults = (self.faults - {ROT, "wipe", "members"}) | {RESTORE}
        self.size = COPIES
        self.mover.loses_learners = False
        self.alone: MemoryDisk | None = None
        """The only voter's disk, as it was just before others joined."""
        self.clock.at(self.backup_rng.uniform(2, 8), self._grow)

    def _grow(self) -> None:
        leader = self.operator.leader()
        if self.mover.move is None and leader is not None and len(leader.engine.replica_set.voters) < COPIES:
            if self.alone is None:
                self.alone = leader.disk.disk.copy()
            self.mover.grow()
        self.clock.after(LOOK_EVERY_S, self._grow)

    def _back_up(self) -> None:
        """Half of all backups are older than that."""
        super()._back_up()
        first = min(self.nodes)
        if self.alone is not None and self.backup_rng.random() < 0.5:
            self.backups[first] = self.alone.copy()

    def _restore(self) -> None:
        found = [node for node in self._voters() if node.replica_id in self.backups]
        if found and len(self._committed_members().voters) > 1 and self._nothing_lost():
            self._replace_by_copy(self.backup_rng.choice(found))

    def _committed_members(self) -> ReplicaSet:
        for index in range(self.checker.last_committed, 0, -1):
            entry = self.checker.committed.get(index)  # type: ignore[call-overload]
            if entry is not None and entry.payload[0] == MEMBERSHIP:
                return ReplicaSet.decode(entry.payload[1:])
        return ReplicaSet.of(())
