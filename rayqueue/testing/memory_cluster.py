"""A cluster in memory: the coordinator's group, the groups of all partitions, and the directory that finds them.

Does what the keeper does on a Ray cluster: partitions that the coordinator's
metadata names are made, told their settings and, once their topic is deleted,
ended. Belongs to the loop of the client's I/O thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from pydantic import SecretStr

from rayqueue.cluster.commands import (
    AnyCommand,
    CreateCluster,
    FinishTransactions,
    PutBroker,
    ReplicasMade,
    ReplicasRemoved,
    encode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.cluster.transactions import unfinished
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, RayQueueError, UnknownPartitionError, UnknownTopicError
from rayqueue.ids import COORDINATOR as COORDINATOR_GROUP
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.net.directory import ClusterDirectory, ReplicaName
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings
from rayqueue.partition.transactions.commands import end_transaction_command
from rayqueue.protocol.topics import TopicInfo
from rayqueue.protocol.transactions import OpenFor, ResolveTransactions
from rayqueue.replica.coordinator_service import CoordinatorService
from rayqueue.testing.memory_group import MemoryGroup, MemoryPartition

_MAINTAIN_EVERY_S = 1.0
_CARRY_AFTER_MS = 5_000


def _answered(partition: MemoryPartition, asked: tuple[OpenFor, ...], fates: Any) -> None:
    if not isinstance(fates, RayQueueError):
        partition.settling.answered(asked, fates)


def with_secret(settings: Settings) -> Settings:
    """The settings with a secret, with which the coordinator seals. It stays in this process."""
    if settings.transport.secret is not None:
        return settings
    transport = settings.transport.model_copy(update={"secret": SecretStr(secrets.token_hex(16))})
    return settings.model_copy(update={"transport": transport})


class MemoryCluster(ClusterDirectory):
    """Made in the loop that it belongs to."""

    def __init__(self, settings: Settings, brokers: int) -> None:
        self.closed = False
        self._settings = settings
        self.coordinator = MemoryGroup(COORDINATOR_GROUP, ["c1"], COORDINATOR, settings)
        self.machine = ClusterMachine(self.coordinator.store)
        this: Any = self.coordinator
        service = self._service = CoordinatorService(this, self.machine, settings, self._reconcile)
        self._partitions: dict[str, MemoryPartition] = {}
        self.coordinator.serve_with(self.machine, service)
        alive = [AliveBroker(f"b{number}", f"memory-{number}") for number in range(1, brokers + 1)]
        self._change(CreateCluster("memory"))
        for each in alive:
            self._change(PutBroker(each.broker, each.host, each.ray_node))
        service.set_brokers(alive)
        _maintain_later(weakref.ref(self))

    def _change(self, command: AnyCommand) -> None:
        answer = self.coordinator.apply(encode_command(command))
        if isinstance(answer, RayQueueError):
            raise answer

    # -- the directory -------------------------------------------------------------------------

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        return self._group(group_id).endpoint(replica_id)

    async def coordinators(self) -> tuple[str, ...]:
        return self.coordinator.replica_ids

    async def open(self, endpoint: Endpoint, settings: Settings) -> Channel:
        for group in (self.coordinator, *self._partitions.values()):
            if group.port == endpoint.port:
                return await group.connect(endpoint, settings)
        raise OutcomeUnknownError(f"{endpoint.replica_id} does not serve any more", replica_id=endpoint.replica_id)

    async def statuses(self, replicas: Iterable[ReplicaName]) -> dict[ReplicaName, Any]:
        found: dict[ReplicaName, Any] = {}
        for group_id, replica_id in replicas:
            try:
                found[group_id, replica_id] = self._group(group_id).status_of(ReplicaId(replica_id))
            except OutcomeUnknownError as error:
                found[group_id, replica_id] = error
        return found

    def _group(self, group_id: str) -> MemoryGroup:
        group = self.coordinator if group_id == COORDINATOR_GROUP else self._partitions.get(group_id)
        if group is None:
            raise OutcomeUnknownError(f"nobody serves {group_id}")
        return group

    # -- the keeper ----------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """The metadata changed: let there be what it says."""
        wanted: dict[str, tuple[TopicInfo, tuple[str, ...]]] = {}
        for info in self.machine.topics.values():
            for partition in info.partitions:
                wanted[partition.group_id] = info, tuple(replica.replica_id for replica in partition.replicas)
        for group_id in self._partitions.keys() - wanted.keys():
            self._partitions.pop(group_id).close()
        for group_id, (info, replica_ids) in wanted.items():
            told = PartitionSettings.of(info.settings, info.version)
            if group_id in self._partitions:
                self._partitions[group_id].configure(told)
            else:
                self._partitions[group_id] = MemoryPartition(group_id, replica_ids, told, self._settings)
        if self.machine.unmade:
            self._change(ReplicasMade(tuple((key.group_id, key.replica_id) for key in self.machine.unmade)))
        if self.machine.doomed:
            self._change(ReplicasRemoved(tuple((key.group_id, key.replica_id) for key in self.machine.doomed)))

    def settle_transactions(self) -> None:
        """Let partitions and the coordinator ask each other about transactions that nobody ends."""
        for group_id, partition in self._partitions.items():
            asked = partition.settling.questions()
            if asked:
                call = ResolveTransactions(group_id=group_id, transactions=asked)
                self._service.ask(call, partial(_answered, partition, asked))
        for row in unfinished(self.machine.transactions.commits, time.time_ns() // 1_000_000, _CARRY_AFTER_MS):
            for group_id in row.waiting:
                if group_id in self._partitions:
                    self._partitions[group_id].commit(end_transaction_command(*row.key, commit=True))
            self._change(FinishTransactions((row.key,)))

    # -- for tests -----------------------------------------------------------------------------

    def partitions(self, topic: str | None, number: int | None) -> list[MemoryPartition]:
        """Of one topic, or of all; all its partitions, or one."""
        if topic is None:
            return list(self._partitions.values())
        info = self.machine.topics.get(topic)
        if info is None:
            raise UnknownTopicError(f"there is no topic {topic!r}", topic=topic)
        found = [each for each in info.partitions if number in (None, each.number)]
        if not found:
            raise UnknownPartitionError(f"{topic} has {len(info.partitions)} partitions; there is no {number}")
        return [self._partitions[each.group_id] for each in found]

    def apply_retention(self) -> None:
        for partition in self._partitions.values():
            partition.apply_retention()

    def close(self) -> None:
        self.closed = True
        for group in (*self._partitions.values(), self.coordinator):
            group.close()


def _maintain_later(cluster: weakref.ref[MemoryCluster]) -> None:
    """Once per second, for as long as somebody has it."""

    def maintain() -> None:
        known = cluster()
        if known is not None and not known.closed:
            known.apply_retention()
            known.settle_transactions()
            _maintain_later(cluster)

    asyncio.get_running_loop().call_later(_MAINTAIN_EVERY_S, maintain)
