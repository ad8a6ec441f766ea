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
- A new replica takes ``replica_disk_bytes``, one that is moved what the partition
  has. ``disk_reserve_percent`` of each disk stays free; a broker whose disk has less
  gets nothing at all. What moves under way will still write is as good as written (``disks``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rayqueue.cluster.disks import promised_bytes, reserve, spare_bytes
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.moves import Need, Reason, choose_broker
from rayqueue.cluster.placement import AliveBroker, NoRoomError, Placement, place
from rayqueue.cluster.seen import Seen
from rayqueue.config import ClusterSettings
from rayqueue.errors import CapacityError, NoBrokerError
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo


class Sites:
    def __init__(self, machine: ClusterMachine, settings: ClusterSettings) -> None:
        self._machine = machine
        self.settings = settings
        self.seen = Seen()
        """What the keeper tells of its looks."""
        self._told = False
        self._led_since_s = 0.0
        self._missing_since_s: dict[str, float] = {}
        self.alive: Mapping[str, AliveBroker] = {}

    def lead(self, now_s: float) -> None:
        """Nothing is known of the brokers until the keeper has looked."""
        self.seen = Seen()
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
        wait_s = self.settings.broker_wait_ms / 1000
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
        return room(self.alive.values(), self._machine.replica_counts(), self.settings, self.promised_bytes())

    def spare_bytes(self) -> dict[str, int]:
        return spare_bytes(self.alive.values(), self.settings, self.promised_bytes())

    def promised_bytes(self) -> dict[str, int]:
        moves, seen = self._machine.moves.values(), self.seen
        return promised_bytes(moves, seen.sizes, seen.paces, self.alive.values())

    def check_room(self, broker: str, size_bytes: int = 0) -> None:
        """``CapacityError``, with numbers, unless it takes another replica, of so many bytes."""
        room, spare = self.room(), self.spare_bytes()
        if room.get(broker, 1) > 0 and spare.get(broker, size_bytes) >= size_bytes:
            return
        counts = self._machine.replica_counts()
        of = f" of {size_bytes >> 20:,} MiB" if size_bytes else ""
        raise CapacityError(
            f"broker {broker} takes no further replica{of}: {self._facts(broker, room)}. {self._rule()}",
            wanted=1,
            there=counts.get(broker, 0),
            left=room.get(broker, 0),
            broker=broker,
        )

    def check_copies(self, partitions: Sequence[PartitionInfo], more: int) -> None:
        """``CapacityError`` unless each partition finds so many further brokers, with space for what it has."""
        alive = [each for _, each in sorted(self.alive.items()) if each.stays]
        if not alive:
            raise NoBrokerError("no node is there that could take a replica; retry")
        counts, room, spare = dict(self._machine.replica_counts()), self.room(), self.spare_bytes()
        before, sizes = dict(room), self.seen.sizes
        total_bytes = more * sum(sizes.get(each.group_id, 0) for each in partitions)
        for partition in partitions:
            size_bytes = sizes.get(partition.group_id, 0)
            for _ in range(more):
                broker = choose_broker(Need(partition, "", Reason.GROW, ""), alive, counts, room, spare, size_bytes)
                if broker is None:
                    raise self._refusal(len(partitions), more, before, total_bytes)
                counts[broker] = counts.get(broker, 0) + 1
                if broker in room:
                    room[broker] -= 1
                reserve(spare, alive, broker, size_bytes)
                copy = ReplicaInfo("new", broker)
                partition = PartitionInfo(partition.number, partition.group_id, (*partition.replicas, copy))

    def place(self, partitions: int, replication: int) -> Placement:
        """``NoBrokerError``, or ``CapacityError`` that says what fits and which setting decides."""
        if not self.alive:
            raise NoBrokerError("no node is there that could take a replica; retry")
        alive = [each for _, each in sorted(self.alive.items()) if each.stays]
        if not alive:
            raise NoBrokerError("every node that is there is to be emptied (decommissioned); add one, or let one stay")
        machine, room = self._machine, self.room()
        try:
            return place(partitions, replication, alive, machine.replica_counts(), machine.leader_counts(), room)
        except NoRoomError:
            raise self._refusal(partitions, replication, room) from None

    def _refusal(
        self, partitions: int, replication: int, room: Mapping[str, int], more_bytes: int | None = None
    ) -> CapacityError:
        """``more_bytes``: the partitions are there, and are to have so many copies more, of so many bytes in all."""
        counts = self._machine.replica_counts()
        there = sum(counts.get(broker, 0) + each.coordinators for broker, each in self.alive.items())
        left = sum(room.values())
        told = [f"{broker}: {self._facts(broker, room)}" for broker in sorted(self.alive)]
        rest = f" and {len(told) - _TOLD_BROKERS} more" if len(told) > _TOLD_BROKERS else ""
        wanted = f"{partitions} partitions with {replication} copies each"
        if more_bytes is not None:
            wanted = f"{replication} more copies of each of {partitions} partitions, {more_bytes >> 20:,} MiB in all,"
        return CapacityError(
            f"{wanted} do not fit: {there} replicas are on "
            f"{len(self.alive)} brokers and {left} more fit, no two copies of a partition on one broker where that can "
            f"be ({'; '.join(told[:_TOLD_BROKERS])}{rest}). {self._rule()}. "
            "Ask for fewer, add nodes, or change the setting",
            wanted=partitions * replication,
            there=there,
            left=left,
        )

    def _facts(self, broker: str, room: Mapping[str, int]) -> str:
        """What is there, in numbers."""
        each = self.alive.get(broker)
        there = self._machine.replica_counts().get(broker, 0)
        if each is None:
            return f"{there} replicas, and it is away"
        words = [f"{there + each.coordinators} replicas"]
        if each.memory_bytes:
            words.append(f"{each.memory_bytes >> 20:,} MiB of memory")
        if each.disk_bytes:
            words.append(f"{each.disk_free_bytes >> 20:,} of {each.disk_bytes >> 20:,} MiB of disk free")
        promised_bytes = self.promised_bytes().get(broker, 0)
        if promised_bytes:
            words.append(f"{promised_bytes >> 20:,} MiB of that for what is being moved to it")
        fit = room.get(broker)
        return ", ".join(words) + ("" if fit is None else f", {fit} more fit")

    def _rule(self) -> str:
        settings = self.settings
        memory = (
            f"cluster.max_replicas_per_broker = {settings.max_replicas_per_broker}"
            if settings.max_replicas_per_broker is not None
            else f"each takes about {settings.replica_memory_bytes >> 20} MiB (cluster.replica_memory_bytes) of "
            f"{settings.replica_memory_percent} % of a host's memory (cluster.replica_memory_percent)"
        )
        return (
            f"{memory}, and at least {settings.replica_disk_bytes >> 20} MiB (cluster.replica_disk_bytes) of a disk of "
            f"which {settings.disk_reserve_percent} % stay free (cluster.disk_reserve_percent)"
        )


_TOLD_BROKERS = 5


def room(
    alive: Collection[AliveBroker],
    counts: Mapping[str, int],
    settings: ClusterSettings,
    promised: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """How many more replicas each broker takes; those without a bound are not named. ``promised``: bytes of disks."""
    on_host = Counter(each.host for each in alive)
    hosts = {each.broker: each.host for each in alive}
    left: dict[str, int] = {}
    for each in alive:
        most = settings.max_replicas_per_broker
        if most is None:
            if not each.memory_bytes:
                continue
            usable_bytes = each.memory_bytes * settings.replica_memory_percent // 100
            most = usable_bytes // settings.replica_memory_bytes // on_host[each.host]
        left[each.broker] = max(0, most - counts.get(each.broker, 0) - each.coordinators)
    # Brokers on one host may have one disk.
    for broker, spare in spare_bytes(alive, settings, promised).items():
        fit = spare // settings.replica_disk_bytes // on_host[hosts[broker]]
        left[broker] = min(left.get(broker, fit), fit)
    return left
