"""Two losses at a time: of five voters one disk is lost for good while an older copy takes the place of another.

A copy neither votes nor acknowledges before every other voter has answered it (ADR
34), and a lost one never answers. So the group lives on the three that are left, and only
when the lost one has been replaced can the copy be a voter again.
"""

from __future__ import annotations

from rayqueue.ids import ReplicaId
from tests.sim.node import SimNode
from tests.sim.world import RESTORE, ROT, World

MAY_LOSE = 2
"""Of five: a majority has lost nothing."""


class LossWorld(World):
    """Whatever else the seed draws, disks are lost and restored."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, size=5)
        self.faults = (self.faults - {ROT}) | {"wipe", RESTORE}

    def _may_lose(self, node: SimNode) -> bool:
        """Whether the voters that have lost something and are neither replaced nor brought up to date would be few
        enough with this one."""
        voters: set[ReplicaId] = set()
        for each in self.nodes.values():
            if not each.removed:
                voters |= each.engine.replica_set.voters
        lost = {each for each in voters if self.nodes[each].removed or self.nodes[each].disk.copied}
        return len(lost | {node.replica_id}) <= MAY_LOSE

    def _can_spare(self, node: SimNode) -> bool:
        return self._may_lose(node)

    def _restore(self) -> None:
        found = [node for node in self._voters() if node.replica_id in self.backups and self._may_lose(node)]
        if found:
            self._replace_by_copy(self.backup_rng.choice(found))
