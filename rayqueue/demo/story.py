"""The demo's story: produce, consume, kill leaders, look whether anything is missing.

``Story`` is told step by step (``tick``) so that whoever shows it decides how
often. It kills with SIGKILL, the process of the replica that leads one
partition after the other, once that partition is whole again after the kill
before; Ray restarts the process, and the replica continues from its disk.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from rayqueue.client.admin.admin import GroupDescription, PartitionDescription, TopicDescription
from rayqueue.client.handle import RayQueue
from rayqueue.demo.traffic import Board, Consumed, Gap, Produced, Rate, add_up, consume, produce, value_of
from rayqueue.errors import RayQueueError
from rayqueue.testing.faults import kill_leader

TOPIC, GROUP = "orders", "billing"
_LOOK_EVERY_S = 0.2
_PATIENCE_S = 60.0
_SPRINT_TOPIC = "sprint"
_SPRINT_CALL = 5_000


@dataclass(frozen=True, slots=True)
class Plan:
    records: int = 100_000
    partitions: int = 2
    producers: int = 2
    consumers: int = 2
    kills: int = 3
    seconds: float = 15.0
    """How long the producing takes, if nothing holds it up."""

    @property
    def each(self) -> int:
        """Records per producer."""
        return self.records // self.producers


@dataclass(slots=True)
class Kill:
    """One kill -9 of the replica that led a partition."""

    partition: int
    replica_id: str
    pid: int
    at_s: float
    """Wall-clock."""
    term: int
    successor: str | None = None
    pause_s: float | None = None
    """The longest silence between two acknowledgements of this partition around it: what a producer noticed."""
    rejoined_s: float | None = None
    """Until the killed replica ran again and had all records."""


@dataclass(frozen=True, slots=True)
class Sprint:
    """Records as fast as they go, by one process, while nothing is killed."""

    records: int
    produce_s: float
    consume_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    acknowledged: int
    read: int
    lost: int
    duplicated: int
    out_of_order: int
    stored: int
    """Records in the topic, by its high watermarks."""
    lag: int
    """Records that the group has not committed."""
    kills: tuple[Kill, ...]
    sprint: Sprint | None

    @property
    def sound(self) -> bool:
        wanted = self.plan.each * self.plan.producers
        found = (self.acknowledged, self.read, self.stored, self.lost, self.duplicated, self.out_of_order, self.lag)
        return (
            found == (wanted, wanted, wanted, 0, 0, 0, 0)
            and len(self.kills) == self.plan.kills
            and all(kill.rejoined_s is not None for kill in self.kills)
            and self.sprint is not None
        )

    def facts(self) -> dict[str, Any]:
        """For programs."""
        told = {"sound": self.sound, **asdict(self)}
        for kill in told["kills"]:
            del kill["at_s"]
        return told


@dataclass(slots=True)
class Story:
    rq: RayQueue
    plan: Plan
    topic: TopicDescription
    group: GroupDescription | None = None
    kills: list[Kill] = field(default_factory=list)
    produced: dict[int, Produced] = field(default_factory=dict)
    consumed: dict[int, Consumed] = field(default_factory=dict)
    produce_rate: Rate = field(default_factory=Rate)
    consume_rate: Rate = field(default_factory=Rate)
    started_s: float = field(default_factory=time.monotonic)
    sprint: Sprint | None = None
    _board: Any = None
    _producers: list[Any] = field(default_factory=list)
    _consumers: list[Any] = field(default_factory=list)
    _looked_s: float = 0.0
    _progress_s: float = 0.0

    # -- the telling -------------------------------------------------------------------------

    def begin(self) -> None:
        plan = self.plan
        self._board = ray.remote(num_cpus=0)(Board).remote()
        counts = plan.producers, plan.each
        self._consumers = [
            consume.remote(self.rq, TOPIC, GROUP, member, *counts, self._board) for member in range(plan.consumers)
        ]
        self._producers = [
            produce.remote(self.rq, TOPIC, producer, plan.each, plan.seconds, self._board)
            for producer in range(plan.producers)
        ]
        self.started_s = self._progress_s = time.monotonic()

    def tick(self) -> bool:
        """Look, and kill if it is time. False once everything is produced, read, and whole again."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return True
        self._looked_s = now_s
        before = self.acknowledged, self.read
        self.produced, self.consumed = ray.get(self._board.look.remote(self._ceiling(), False), timeout=_PATIENCE_S)
        if (self.acknowledged, self.read) != before:
            self._progress_s = now_s
        if now_s - self._progress_s > _PATIENCE_S:
            raise TimeoutError(f"nothing was produced or read for {_PATIENCE_S:.0f} s")
        self.produce_rate.add(now_s, self.acknowledged)
        self.consume_rate.add(now_s, self.read)
        self._look()
        healing = self._healing
        if healing is not None:
            self._watch(healing)
        elif len(self.kills) < self.plan.kills and self.acknowledged >= self._next_mark():
            self._kill_leader()
        wanted = self.plan.each * self.plan.producers
        return self._healing is not None or len(self.kills) < self.plan.kills or self.read < wanted

    def finish(self) -> Outcome:
        """Let the tasks end, and judge what they return."""
        produced: list[Produced] = ray.get(self._producers, timeout=_PATIENCE_S)
        ray.get(self._board.look.remote(1.0, True), timeout=_PATIENCE_S)
        consumed: list[Consumed] = ray.get(self._consumers, timeout=_PATIENCE_S)
        self._look()
        plan = self.plan
        found = add_up(consumed, plan.producers, plan.each)
        return Outcome(
            plan=plan,
            acknowledged=sum(each.acknowledged for each in produced),
            read=found.read,
            lost=found.lost,
            duplicated=found.duplicated,
            out_of_order=found.out_of_order,
            stored=sum(each.end_offset for each in self.topic.partitions),
            lag=-1 if self.group is None else self.group.lag,
            kills=tuple(self.kills),
            sprint=self.sprint,
        )

    def run_sprint(self) -> None:
        """As many records again, as columns, as fast as one process produces and then consumes them."""
        records = self.plan.records
        self.rq.create_topic(_SPRINT_TOPIC, partitions=1, replication=3)
        values = [value_of(0, number) for number in range(_SPRINT_CALL)]
        started_s = time.monotonic()
        with self.rq.producer() as producer:
            for first in range(0, records, _SPRINT_CALL):
                producer.send_many(_SPRINT_TOPIC, values[: records - first])
            producer.flush()
        produced_s = time.monotonic()
        read = 0
        with self.rq.consumer(_SPRINT_TOPIC) as consumer:
            while read < records and time.monotonic() - produced_s < _PATIENCE_S:
                read += len(consumer.poll(max_records=_SPRINT_CALL, timeout_ms=1000))
        if read == records:
            self.sprint = Sprint(records, produced_s - started_s, time.monotonic() - produced_s)

    # -- its parts -----------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def acknowledged(self) -> int:
        return sum(each.acknowledged for each in self.produced.values())

    @property
    def sent(self) -> int:
        return sum(each.sent for each in self.produced.values())

    @property
    def read(self) -> int:
        return sum(each.read for each in self.consumed.values())

    @property
    def _healing(self) -> Kill | None:
        return self.kills[-1] if self.kills and self.kills[-1].rejoined_s is None else None

    def _look(self) -> None:
        self.topic = self.rq.topic(TOPIC)
        try:
            self.group = self.rq.group(GROUP)
        except RayQueueError:
            self.group = None  # nobody has joined yet

    def _next_mark(self) -> int:
        return self.plan.records * (len(self.kills) + 1) // (self.plan.kills + 1)

    def _ceiling(self) -> float:
        """Producers go on past a mark, but not to the next one: a kill should hit them while they send."""
        left = self.plan.kills - len(self.kills)
        return (len(self.kills) + 1.5) / (self.plan.kills + 1) if left else 1.0

    def _partition(self, number: int) -> PartitionDescription:
        return self.topic.partitions[number]

    def _kill_leader(self) -> None:
        number = len(self.kills) % self.plan.partitions
        try:
            leader = kill_leader(self.rq, TOPIC, number)
        except RayQueueError:
            return  # nobody leads right now; the next tick tries again
        self.kills.append(Kill(number, leader.replica_id, leader.pid, time.time(), leader.term))

    def _watch(self, kill: Kill) -> None:
        if time.time() - kill.at_s > _PATIENCE_S:
            raise TimeoutError(f"{kill.replica_id} has not come back within {_PATIENCE_S:.0f} s after it was killed")
        partition = self._partition(kill.partition)
        leader = leading_replica(partition)
        if kill.successor is None and leader is not None and partition.term > kill.term:
            kill.successor = leader
        back = next((each for each in partition.replicas if each.replica_id == kill.replica_id), None)
        behind = partition.end_offset - (back.high_watermark if back and back.high_watermark is not None else -1)
        if kill.successor is None or leader is None or behind > 0:
            return
        pauses = [gap for each in self.produced.values() for gap in each.gaps if self._belongs(gap, kill)]
        kill.pause_s = max((gap.end_s - gap.start_s for gap in pauses), default=0.0)
        kill.rejoined_s = time.time() - kill.at_s

    def _belongs(self, gap: Gap, kill: Kill) -> bool:
        return gap.partition == kill.partition and gap.end_s > kill.at_s


def leading_replica(partition: PartitionDescription) -> str | None:
    return next((each.replica_id for each in partition.replicas if each.role == "leader"), None)
