"""Applications in virtual time: the real producer and the real consumer, in processes that can be killed.

A producer sends numbered records and waits for each outcome. A consumer belongs
to a group: it polls, works, commits, seeks, leaves and comes back, and tells the
history what it was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.producer.producer import Producer
from rayqueue.client.routes import ClusterRoutes
from rayqueue.client.twins import run_awaiting
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, StaleGenerationError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.directory import ClusterDirectory, ReplicaName
from rayqueue.net.endpoint import Endpoint
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from tests.sim.history import Acked, Assignment, GroupHistory, Sent
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.process import SimIo

if TYPE_CHECKING:
    from tests.sim.app_world import AppWorld

TOPIC = "orders"


class SimDirectory(ClusterDirectory):
    """Where replicas serve now, as their actors would say."""

    def __init__(self, world: AppWorld) -> None:
        self._world = world

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        await asyncio.sleep(self._world.internet.delay())
        return self._world.group(group_id).endpoint(replica_id)

    async def coordinators(self) -> tuple[str, ...]:
        await asyncio.sleep(self._world.internet.delay())
        return tuple(sorted(self._world.coordinators.nodes))

    async def statuses(self, replicas: Iterable[ReplicaName]) -> Mapping[ReplicaName, Any]:
        raise NotImplementedError("for administrators only")


class App:
    """A process with a connection of its own: what a client takes for ``RayQueue``."""

    def __init__(self, world: AppWorld, name: str, settings: Settings) -> None:
        self.world = world
        self.name = name
        self.settings = settings
        self.process = world.new_process(name)
        self.io: Any = SimIo(self.process)
        self.routes = ClusterRoutes(SimDirectory(world), settings)


class SimSender(App):
    """One producer. ``want`` makes it send more."""

    def __init__(self, world: AppWorld, name: str, settings: Settings, rng: Random) -> None:
        super().__init__(world, name, settings)
        self._rng = rng
        self._producer: Producer[Any, Any] = Producer(self)
        self.process.on_killed.append(self._producer._leaving.detach)  # a killed process says nothing any more
        self._numbers: dict[tuple[int, int], int] = {}
        self._wanted = 0
        self.waiting = 0
        self.process.start(self._main())

    @property
    def idle(self) -> bool:
        return self._wanted == self.waiting == 0 or self.process.killed

    def want(self, records: int) -> None:
        self._wanted += records

    async def _main(self) -> None:
        # Of calls of send_async that wait for the topic together, which is first is not promised.
        while True:
            try:
                await run_awaiting(self._producer._find(TOPIC))
                break
            except RayQueueError:
                await asyncio.sleep(0.1)
        while True:
            await asyncio.sleep(self._rng.uniform(0.01, 0.1))
            wanted, self._wanted = self._wanted, 0
            await self._send_all(wanted)

    async def _send_all(self, records: int) -> None:
        self.waiting += records
        for _ in range(records):
            partition = self._rng.randrange(self.world.partitions)
            lane = self._rng.randrange(self.world.lanes)
            number = self._numbers[partition, lane] = self._numbers.get((partition, lane), -1) + 1
            sent = Sent(self.name, number, partition, lane)
            value = f"{self.name} {partition} {lane} {number}".encode()
            self.world.producers.sent[value] = sent
            self.process.start(self._send(value, sent))
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def _send(self, value: bytes, sent: Sent) -> None:
        try:
            told = await self._producer.send_async(TOPIC, value, partition=sent.partition, priority=sent.lane)
        except RayQueueError as error:
            sent.outcome = error
        else:
            assert told.offset is not None
            sent.outcome = Acked(told.partition, told.offset)
        self.waiting -= 1


@dataclass(frozen=True, slots=True)
class Manners:
    """How a group's consumers read."""

    delivery: Literal["at_least_once", "at_most_once"] = "at_least_once"
    auto_commit: bool = True
    by_record: bool = False
    seeks: bool = False
    listened: bool = True
    slow: bool = False
    """They take longer than a session for what they are handed."""

    @classmethod
    def drawn(cls, rng: Random) -> Manners:
        if rng.random() < 0.2:
            return cls("at_most_once", listened=rng.random() < 0.7)
        return cls(
            auto_commit=rng.random() < 0.6,
            by_record=rng.random() < 0.3,
            seeks=rng.random() < 0.3,
            listened=rng.random() < 0.7,
        )


class SimConsumer(App):
    """One consumer of a group, until it leaves or is killed."""

    def __init__(
        self, world: AppWorld, name: str, settings: Settings, group: GroupHistory, manners: Manners, rng: Random
    ) -> None:
        super().__init__(world, name, settings)
        self.group = group
        self._manners = manners
        self._rng = rng
        self._assigned: dict[int, Assignment] = {}
        self._handed: list[Record] = []
        """What the application was handed and is not through with."""
        self._leaving = False
        self.left = False
        self._consumer: Consumer[Any, Any] = Consumer(
            self,
            [TOPIC],
            group=group.name,
            delivery=manners.delivery,
            auto_commit=manners.auto_commit,
            ack="record" if manners.by_record else "poll",
            listener=self if manners.listened else None,
            client=name,
        )
        self.process.on_killed.append(self._consumer._given_up.detach)
        self.process.start(self._main())

    @property
    def at_work(self) -> bool:
        """With what it was handed, and has not committed."""
        return bool(self._handed)

    def leave(self) -> None:
        self._leaving = True

    # -- Listener ------------------------------------------------------------------------

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._assigned[each.partition] = Assignment()

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            if self._assigned.pop(each.partition, None) is None:
                raise BrokenError(Invariant.ASSIGNED, f"{self.name} lost {each}, which it was not told that it reads")

    lost = revoked

    # -- its work ------------------------------------------------------------------------

    async def _main(self) -> None:
        rng = self._rng
        while not self._leaving:
            self._through_with_handed()
            try:
                records = await self._consumer.poll_async(max_records=rng.choice((1, 3, 100)), timeout_ms=300)
            except RayQueueError as error:
                if not error.retriable and not isinstance(error, StaleGenerationError):
                    raise
                continue
            self._take(records)
            if rng.random() < (0.9 if self._manners.slow else 0.3):
                await asyncio.sleep(rng.uniform(0, 1.5 if self._manners.slow else 0.3))
            if self._manners.by_record:
                self._ack_some()
            if not self._manners.auto_commit and rng.random() < 0.5:
                await self._commit()
            if self._manners.seeks and rng.random() < 0.05:
                self._seek()
        await self._consumer.close_async()
        self.left = True

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            assignment = self._assigned.get(record.partition)
            if assignment is None and self._manners.listened:
                raise BrokenError(Invariant.ASSIGNED, f"{self.name} was handed {record} of what it does not read")
            self.group.hand(self.name, record, self._generation(record), assignment)
            self._handed.append(record)
            if assignment is not None and self._manners.delivery == "at_least_once":
                assignment.handed[record.lane] = record.offset + 1

    def _generation(self, record: Record) -> int:
        """Of the grant by which this record was read."""
        reads = self._consumer._sub.assigned.get(TopicPartition(record.topic, record.partition))
        return 0 if reads is None else reads.generation

    def _through_with_handed(self) -> None:
        """To ask for more means that all is done, unless records are acknowledged one by one."""
        if not self._manners.by_record:
            for record in self._handed:
                self._done(record)
            self._handed.clear()

    def _done(self, record: Record) -> None:
        self.group.done[record.partition].add(record.offset)

    def _ack_some(self) -> None:
        left: list[Record] = []
        for record in self._handed:
            if self._rng.random() < 0.8:
                self._done(record)
                self._consumer.ack(record)
            else:
                left.append(record)
        self._handed = left

    async def _commit(self) -> None:
        self._through_with_handed()
        before = {number: dict(each.handed) for number, each in self._assigned.items()}
        held, rewinds = dict(self._assigned), self.group.rewinds
        try:
            await self._consumer.commit_async()
        except RayQueueError:
            return
        if self._manners.by_record or rewinds != self.group.rewinds:
            return
        for number, done in before.items():
            if self._assigned.get(number) is held[number]:
                self.group.check_commit(self.name, number, done, self.world.reference(number))

    def _seek(self) -> None:
        for each in sorted(self._consumer.assignment()):
            assignment = self._assigned.get(each.partition)
            if self._manners.listened and assignment is None:
                continue
            end = len(self.world.logs[each.partition].grow())
            offset = self._rng.randint(0, end)
            self.group.rewinds += 1
            for lane in range(self.world.lanes):
                self.group.excuse(each.partition, lane, offset)
                if assignment is not None:
                    assignment.at[lane] = offset
                    assignment.handed.pop(lane, None)
            self._handed = [record for record in self._handed if record.partition != each.partition]
            self._consumer.seek(each, offset)
