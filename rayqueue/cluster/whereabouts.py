"""The whereabouts of groups' members: on which Ray node each reads. Heartbeats tell it; memory only."""

from __future__ import annotations

from rayqueue.cluster.machine import ClusterMachine
from rayqueue.protocol.calls import Heartbeat

MAX_RAY_NODE = 128
"""Characters of a Ray node's id."""


class Whereabouts:
    def __init__(self, machine: ClusterMachine) -> None:
        self._machine = machine
        self._places: dict[str, dict[str, str]] = {}
        """By group and member."""

    def forget(self) -> None:
        self._places = {}

    def note(self, call: Heartbeat) -> None:
        """Of members only: whoever else names a place is not remembered."""
        group = self._machine.groups.get(call.group)
        if call.ray_node and group is not None and call.member in group.members:
            self._places.setdefault(call.group, {})[call.member] = call.ray_node[:MAX_RAY_NODE]

    def readers(self) -> dict[tuple[str, int], dict[str, int]]:
        """How many members read each partition on each Ray node, by topic and number."""
        found: dict[tuple[str, int], dict[str, int]] = {}
        places, self._places = self._places, {}
        for name, of_group in places.items():
            group = self._machine.groups.get(name)
            for member in () if group is None else group.info().members:
                node = of_group.get(member.member)
                if node is None:
                    continue
                self._places.setdefault(name, {})[member.member] = node
                for grant in member.grants:
                    at = found.setdefault((grant.topic, grant.partition), {})
                    at[node] = at.get(node, 0) + 1
        return found
