"""The leading coordinator's brokers: who is there, who is missing, and how many replicas each can take.

Memory only, no clock of its own. Two rules decide whether replicas are placed
now:

- Brokers that the metadata knows and that are not there yet are waited for, if
  without them copies of a partition would share a broker or a host: after a
  start of everything they come one by one, and what is placed stays where it is.
  The wait for each ends ``broker_wait_ms`` after this leader missed it first.
- A replica is a process of ``replica_memory_bytes``, whether it is a partition's
  or the coordinator's. A broker takes as many as fit into
  ``replica_memory_percent`` of its host's memory, which it shares with the other
  brokers there. ``max_replicas_per_broker`` takes the place of that, if it is
  set. A broker whose memory is not known has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.placement import AliveBroker, NoRoomError, Placement, place
from rayqueue.config import ClusterSettings
from rayqueue.errors import CapacityError, NoBrokerError


class Sites:
    def __init__(self, machine: ClusterMachine, settings: ClusterSettings) -> None:
        self._machine = machine
        self._settings = settings
        self._told = False
        self._led_since_s = 0.0
        self._missing_since_s: dict[str, float] = {}
        self.alive: Mapping[str, AliveBroker] = {}

    def lead(self, now_s: float) -> None:
        """Nothing is known of the brokers until the keeper has looked."""
        self._led_since_s = now_s
        self._missing_since_s = {}

    def set_alive(self, now_s: float, alive: Sequence[AliveBroker]) -> None:
        self._told = True
        self.alive = {each.broker: each for each in alive}
        known = self._machine.brokers.keys()
        before = self._missing_since_s
        self._missing_since_s = {broker: before.get(broker, now_s) for broker in known - self.alive.keys()}

    # -- whom to wait for --------------------------------------------------------------------

    def wait_until_s(self, replication: int) -> float:
        """Until when a placement of so many copies should wait for brokers that are missing; the past if not at all."""
        wait_s = self._settings.broker_wait_ms / 1000
        if not self._told:
            return self._led_since_s + wait_s
        if not self._shares_needlessly(replication):
            return float("-inf")
        since_s = [
            self._missing_since_s.get(broker, self._led_since_s)
            for broker in self._machine.brokers
            if broker not in self.alive
        ]
        return max(since_s, default=float("-inf")) + wait_s

    def _shares_needlessly(self, replication: int) -> bool:
        """Copies would share a broker or a host that need not, if all that are known were there."""
        hosts = {each.host for each in self.alive.values()}
        known = {name: row.host for name, row in self._machine.brokers.items()}
        all_hosts = hosts | {host for name, host in known.items() if name not in self.alive}
        all_brokers = self.alive.keys() | known.keys()
        return len(hosts) < min(replication, len(all_hosts)) or len(self.alive) < min(replication, len(all_brokers))

    # -- how many fit --------------------------------------------------------------------------

    def room(self) -> dict[str, int]:
        """How many more replicas each broker takes; those without a bound are not named."""
        settings = self._settings
        on_host: dict[str, int] = {}
        for each in self.alive.values():
            on_host[each.host] = on_host.get(each.host, 0) + 1
        counts = self._machine.replica_counts()
        room: dict[str, int] = {}
        for broker, each in self.alive.items():
            most = settings.max_replicas_per_broker
            if most is None:
                if not each.memory_bytes:
                    continue
                usable_bytes = each.memory_bytes * settings.replica_memory_percent // 100
                most = usable_bytes // settings.replica_memory_bytes // on_host[each.host]
            room[broker] = max(0, most - counts.get(broker, 0) - each.coordinators)
        return room

    def place(self, partitions: int, replication: int) -> Placement:
        """``NoBrokerError``, or ``CapacityError`` that says what fits and which setting decides."""
        if not self.alive:
            raise NoBrokerError("no node is there that could take a replica; retry")
        alive = [self.alive[broker] for broker in sorted(self.alive)]
        machine, room = self._machine, self.room()
        try:
            return place(partitions, replication, alive, machine.replica_counts(), machine.leader_counts(), room)
        except NoRoomError:
            raise self._refusal(partitions, replication, room) from None

    def _refusal(self, partitions: int, replication: int, room: Mapping[str, int]) -> CapacityError:
        settings = self._settings
        counts = self._machine.replica_counts()
        there = sum(counts.get(broker, 0) + each.coordinators for broker, each in self.alive.items())
        left = sum(room.values())
        bound = (
            f"cluster.max_replicas_per_broker = {settings.max_replicas_per_broker}"
            if settings.max_replicas_per_broker is not None
            else f"each takes about {settings.replica_memory_bytes >> 20} MiB (cluster.replica_memory_bytes) of "
            f"{settings.replica_memory_percent} % of a host's memory (cluster.replica_memory_percent)"
        )
        return CapacityError(
            f"{partitions} partitions with {replication} copies each do not fit: {there} replicas are on "
            f"{len(self.alive)} brokers and {left} more fit, no two copies of a partition on one broker where that can "
            f"be; {bound}. Ask for fewer, add nodes, or change the setting",
            wanted=partitions * replication,
            there=there,
            left=left,
        )
