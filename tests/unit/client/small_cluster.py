"""A cluster in one event loop: the real coordinator and the real partitions, without replicas, Raft or sockets.

What a test may break is here: a leader that changes, a client that stops, a
connection that is cut, a coordinator that fails over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rayqueue.cluster.coordinator import Coordinator
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.config import ClusterSettings, ConsumerSettings, Settings
from rayqueue.errors import NotLeaderError, RayQueueError, UnknownPartitionError, UnknownTopicError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.net.interfaces import same_topic
from rayqueue.partition import commit_command, forget_group_command, offset_for_time, pin_command, trim_command
from rayqueue.protocol import calls
from rayqueue.protocol.calls import AlterTopic, Call, CreateTopic, DeleteTopic, GetTopics
from rayqueue.protocol.data import FetchAnswer, FetchRequest
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import TopicInfo, TopicPartition, TopicSettings
from tests.unit.client.consumer.consumer_parts import Shelf

SEALS = Seals(b"only for this test")


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "this did not come true in time"
        await asyncio.sleep(0.002)


class LocalPartition:
    """A partition's leader, and the channel to it."""

    def __init__(self, group_id: str, lanes: int) -> None:
        self.group_id = group_id
        self.shelf = Shelf(lanes)
        self.fetches: list[FetchRequest] = []
        self.commits: list[calls.Commit] = []
        self.failures: list[RayQueueError] = []
        self.found_out: list[RayQueueError] = []
        self.gone = False
        """With its topic."""
        self._grown = asyncio.Event()

    def append(self, records: int, lane: int = 0, timestamp: int = 1_000) -> None:
        self.shelf.append(records, lane, timestamp)
        self._grown.set()
        self._grown = asyncio.Event()

    def trim(self, before: int) -> None:
        self.shelf.log.apply(trim_command(before))

    # -- Route and Reader ------------------------------------------------------------------

    @property
    def leader_channel(self) -> LocalPartition:
        return self

    trouble = ""

    async def leader(self) -> LocalPartition:
        return self

    async def any_replica(self, prefer_host: str | None = None) -> LocalPartition:
        return self

    def failed(self, error: RayQueueError) -> None:
        self.found_out.append(error)

    def _check(self) -> None:
        if self.gone:
            raise NotLeaderError("nobody leads", leader=None)

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        self.fetches.append(request)
        return asyncio.ensure_future(self._fetch(request))

    async def _fetch(self, request: FetchRequest) -> FetchAnswer:
        await asyncio.sleep(0)
        self._check()
        if self.failures:
            raise self.failures.pop(0)
        deadline_s = time.monotonic() + request.max_wait_ms / 1000
        while True:
            answer = self.shelf.fetch(request)
            left_s = deadline_s - time.monotonic()
            if answer.batches or left_s <= 0:
                return answer
            grown = self._grown
            try:
                await asyncio.wait_for(grown.wait(), left_s)
            except asyncio.TimeoutError:
                continue

    async def call(self, call: Call, **_: Any) -> Any:
        await asyncio.sleep(0)
        self._check()
        log = self.shelf.log
        partition = log.partition
        answer: Any
        match call:
            case calls.Commit():
                self.commits.append(call)
                SEALS.check_grant(call.seal, call.group, self.group_id, call.generation)
                answer = log.apply(commit_command(call.group, call.generation, call.offsets, rewind=call.rewind))
                answer = answer if isinstance(answer, RayQueueError) else answer.position()
            case calls.Pin():
                answer = log.apply(pin_command(call.group, call.pinned))
            case calls.ForgetGroup():
                SEALS.check_floor(call.seal, call.generation)
                seen = None if call.seen is None else (call.seen.generation, call.seen.offsets)
                answer = log.apply(forget_group_command(call.group, call.generation, seen))
                answer = answer if isinstance(answer, RayQueueError) else answer.existed
            case calls.GetBounds():
                answer = calls.Bounds(partition.readable_from, partition.high_watermark)
            case calls.GetPosition():
                answer = partition.position(call.group)
            case calls.GetLag():
                answer = partition.lag(call.group)
            case calls.FindOffset():
                with log.snapshot() as snapshot:
                    answer = offset_for_time(snapshot, call.timestamp_ms)
            case _:
                raise AssertionError(f"the test does not know {call}")
        if isinstance(answer, RayQueueError):
            raise answer
        return answer


class Connection:
    """One process's connection with the coordinator."""

    leader_channel: None = None

    def __init__(self, cluster: SmallCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.stopped = False
        self.calls: list[Call] = []

    trouble = ""

    async def leader(self) -> Any:
        raise AssertionError("nobody fetches from a coordinator")

    async def any_replica(self, prefer_host: str | None = None) -> Any:
        raise AssertionError("nobody fetches from a coordinator")

    def failed(self, error: RayQueueError) -> None:
        raise AssertionError("call does that")

    async def call(self, call: Call, **_: Any) -> Any:
        self.calls.append(call)
        while True:
            await until(lambda: not self.stopped)
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.cluster.handle(self.number, call, partial(_answer, answer))
            result = await answer
            if isinstance(result, NotLeaderError):
                await asyncio.sleep(0.01)
                continue
            if isinstance(result, RayQueueError):
                raise result
            return result

    def cut(self) -> None:
        self.cluster.coordinator.disconnected(time.monotonic(), self.number)


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class SmallCluster:
    """Made in the event loop. Implements ``rayqueue.net.interfaces.Routes`` for each ``process``."""

    def __init__(self, **settings: Any) -> None:
        self._store = MemoryStore(GroupId("coordinator"), ReplicaId("c1"), COORDINATOR)
        self.machine = ClusterMachine(self._store)
        self._settings = ClusterSettings(join_window_ms=1, **settings)
        self._indexes = count(1)
        self.partitions: dict[TopicPartition, LocalPartition] = {}
        """Of the topics that there are. One that is made again has others."""
        self._ids: dict[TopicPartition, int] = {}
        self._numbers = count(1)
        self.fail_over()
        self._ticking = asyncio.ensure_future(self._tick())

    def fail_over(self) -> None:
        """Another coordinator leads, with an empty memory."""
        before: Coordinator | None = getattr(self, "coordinator", None)
        if before is not None:
            before.unlead()
        self.coordinator = Coordinator(self.machine, self._settings, SEALS, self._propose)
        now_s = time.monotonic()
        self.coordinator.lead(now_s, replica_id="c1", term=1)
        self.coordinator.set_brokers(now_s, [AliveBroker(f"b{each}", f"h{each}") for each in range(3)])

    def _propose(self, payload: bytes, answer: Callable[[Any], None]) -> None:
        result = self.machine.apply(Index(next(self._indexes)), payload)
        answer(result)

    def handle(self, client: int, call: Any, reply: Callable[[Any], None]) -> None:
        self.coordinator.handle(time.monotonic(), client, call, reply)

    async def _tick(self) -> None:
        while True:
            self.coordinator.tick(time.monotonic())
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self._ticking.cancel()

    async def create(self, name: str, partitions: int = 1, lanes: int = 1) -> None:
        settings = TopicSettings(partitions=partitions, lanes=lanes)
        await self.process().coordinator.call(CreateTopic(name=name, settings=settings))
        self._make(name)

    async def grow(self, name: str, partitions: int) -> None:
        topic_id = self.machine.topics[name].topic_id
        call = AlterTopic(name=name, topic_id=topic_id, changes={"partitions": partitions})
        await self.process().coordinator.call(call)
        self._make(name)

    def _make(self, name: str) -> None:
        info = self.machine.topics[name]
        for each in info.partitions:
            partition = TopicPartition(name, each.number)
            if self._ids.get(partition) != info.topic_id:
                self._ids[partition] = info.topic_id
                self.partitions[partition] = LocalPartition(each.group_id, info.settings.lanes)

    async def delete(self, name: str) -> None:
        """Nobody leads its partitions any more."""
        call = DeleteTopic(name=name, topic_id=self.machine.topics[name].topic_id)
        await self.process().coordinator.call(call)
        for partition in [each for each in self.partitions if each.topic == name]:
            self.partitions.pop(partition).gone = True

    def process(self) -> Process:
        return Process(self, next(self._numbers))

    def owners(self, group: str) -> dict[str, list[str]]:
        known = self.machine.groups.get(group)
        members = () if known is None else known.info().members
        return {each.member: [str(grant.topic_partition) for grant in each.grants] for each in members}


class Process:
    """The routes of one client process: what it has once looked up it keeps, until somebody looks again."""

    def __init__(self, cluster: SmallCluster, number: int) -> None:
        self.cluster = cluster
        self.coordinator = Connection(cluster, number)
        self._topics: dict[str, TopicInfo] = {}
        self._ways: dict[tuple[int, int], LocalPartition] = {}

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo:
        known = self._topics.get(name)
        if known is not None and not refresh:
            return known
        self._topics.pop(name, None)
        found = await self.coordinator.call(GetTopics(names=(name,)))
        if not found.topics:
            raise UnknownTopicError(f"there is no topic {name!r}", topic=name)
        info: TopicInfo = found.topics[0]
        self._topics[name] = info
        return info

    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> LocalPartition:
        info = await self.topic(partition.topic)
        route = self._ways.get((info.topic_id, partition.partition))
        stale = route is not None and route.gone
        if stale or partition.partition >= len(info.partitions) or info.topic_id < (topic_id or 0):
            info = await self.topic(partition.topic, refresh=True)
        same_topic(info, topic_id)
        if partition.partition >= len(info.partitions):
            raise UnknownPartitionError(f"there is no {partition}")
        return self._ways.setdefault((info.topic_id, partition.partition), self.cluster.partitions[partition])

    async def statuses(self, info: TopicInfo) -> dict[tuple[str, str], Any]:
        raise AssertionError("there are no replicas to ask")


def quick_settings(tmp: Path, **consumer: Any) -> Settings:
    """Everything a little faster than by default."""
    quick = {"fetch_wait_ms": 100, "heartbeat_ms": 50, "session_timeout_ms": 400, "auto_commit_ms": 50}
    return Settings(data_dir=tmp).model_copy(update={"consumer": ConsumerSettings(**{**quick, **consumer})})
