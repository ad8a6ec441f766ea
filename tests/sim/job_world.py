"""One schedule of a work queue: real clients' connections, real services, real logs, from one seed.

A partition that is a queue, a Raft group of one to three replicas whose clocks
differ and jump; putters, workers, quitters and operators in processes of their own, on Ray
nodes of their own. First the safety phase: leaders change, replicas and workers
die, pause and lose their connections, nodes vanish and are reported dead, late,
to one replica after the other, and now and then though they live. Then everything
heals, workers do their work, and every job must come to its end. All the while
every committed entry is applied to a model of the queue
(``tests.unit.partition.jobs_model``), and what clients were told is compared with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast
from unittest.mock import patch

from msgspec.structs import replace

from rayqueue.errors import OutcomeUnknownError, RayQueueError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.backoff import Retry
from rayqueue.net.channel import Channel
from rayqueue.net.requests import request
from rayqueue.net.route import GroupRoute
from rayqueue.partition import PartitionSettings
from rayqueue.partition.jobs import moving
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol import jobs as protocol
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import JOB_HEADER, DeadJob, JobOptions, Leased, Settlement, encode_options
from rayqueue.records import BatchHeader, RecordBatch
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.jobs import QueueTime
from rayqueue.replica.partition_service import PartitionService
from tests.sim.app_world import _raft, _settings
from tests.sim.checker import Checker
from tests.sim.ensemble import Ensemble
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.job_checker import JobLog
from tests.sim.network import Clock, Weather
from tests.sim.process import EPOCH_MS, SimProcess, virtual_time
from tests.sim.served import PartitionNode
from tests.sim.sockets import Internet
from tests.unit.partition.jobs_model import DEAD

WEATHERS = ("drop", "duplicate", "slow", "reorder")
NODE_FAULTS = ("partition", "one_way", "pause", "kill", "kill_in_sync", "power_loss", "transfer", "clock_jump")
APP_FAULTS = ("app_pause", "app_cut", "app_kill", "app_reset", "host_gone", "false_report")
FAULTS = (*WEATHERS, *NODE_FAULTS, *APP_FAULTS, "app_slow", "app_quits", "app_operates")
WAYS = ("app_schedules", "app_wants_all", "app_backs_off", "app_tells")
"""What putters and workers do besides, also when all has healed: in some of the worlds, and by dice of its own."""

SAFETY_S = 8.0
HEAL_S = 60.0
LEASE_MS = 1_500


@dataclass(frozen=True, slots=True)
class JobOutcome:
    seed: int
    acked: int
    entries: int
    snapshots: int
    handed: int
    redelivered: int
    lost_leases: int
    dead: int
    moved: int
    withdrawn: int
    reported: int
    expired: int
    deduplicated: int
    changed: int
    scheduled: int
    whole: int
    backed_off: int


class JobNode(PartitionNode):
    """A replica whose clock goes wrong, and that does once per second what replicas do."""

    service: PartitionService

    def make_service(self, core: ReplicaCore[Any]) -> PartitionService:
        service = super().make_service(core)
        world = cast("JobEnsemble", self.group).world
        node = self.replica_id
        service.jobs.time = QueueTime(lambda: EPOCH_MS + int(world.clock.now * 1000) + world.skews_ms.get(node, 0))
        return service

    def started(self) -> None:
        super().started()
        self._maintain(self.life)
        gone = list(cast("JobEnsemble", self.group).world.gone_nodes)  # it asks Ray
        self.call(lambda: self.service.jobs.nodes_gone(gone))

    def _maintain(self, life: int) -> None:
        if self.alive and self.life == life:
            self.call(lambda: self.service.maintain(self.now_s))
            self.call(lambda: self.service.jobs.maintain(0, 4_000))  # here little is much
            self.group.clock.after(0.5, partial(self._maintain, life))


class JobEnsemble(Ensemble[JobNode]):
    world: JobWorld


class JobChecker(Checker):
    """Applies every committed entry to the model, and compares."""

    def __init__(self, group: JobEnsemble) -> None:
        super().__init__(group)  # type: ignore[arg-type]
        self.jobs = JobLog(self.reads)
        self.reads.on_applied = self.jobs.applied

    def _check_acks(self, accepted: list[tuple[int, BatchHeader]]) -> None:
        """The world looks itself where the jobs are that were put; batches that move jobs have no producer."""


class _Directory:
    """Where replicas serve now."""

    def __init__(self, world: JobWorld) -> None:
        self._world = world

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Any:
        await asyncio.sleep(self._world.internet.delay())
        return self._world.group.endpoint(replica_id)

    async def coordinators(self) -> tuple[str, ...]:
        return ()

    async def open(self, endpoint: Any, settings: Any) -> Channel:
        return await Channel.open(endpoint, settings)


class _App:
    """A process with a route to the queue, on a Ray node of its own."""

    def __init__(self, world: JobWorld, name: str, rng: Random) -> None:
        self.world = world
        self.ray_node = f"node of {name}"
        self.name = protocol.worker_name(name, self.ray_node)
        self.rng = rng
        self.process = world.new_process(name)
        self._route = GroupRoute(world.group.group_id, tuple(world.group.nodes), _Directory(world), world.settings)
        self.process.start(self._main())

    async def _main(self) -> None:
        raise NotImplementedError

    async def ask(self, call: Call) -> Any:
        """Until it is answered."""
        return await self._until_answered(lambda channel: channel.call(call))

    async def _until_answered(self, ask: Callable[[Channel], Any]) -> Any:
        async def attempt(route: GroupRoute) -> Any:
            channel = await route.leader()
            try:
                return await asyncio.wait_for(ask(channel), 4.0)
            except asyncio.TimeoutError:
                raise OutcomeUnknownError("no answer") from None

        async def way() -> GroupRoute:
            return self._route

        while True:
            retry = Retry(self.world.settings.client, self.rng, self.world.clock.now, idempotent=True)
            try:
                return await request(way, attempt, retry)
            except RayQueueError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.1)


class Putter(_App):
    """Puts batches, each as a producer of its own."""

    def __init__(self, world: JobWorld, name: str, rng: Random) -> None:
        self.wanted = 0
        self.under_way = 0
        self._times = Random(f"times {world.seed} {name}")
        super().__init__(world, name, rng)

    @property
    def idle(self) -> bool:
        return self.wanted == self.under_way == 0 or self.process.killed

    async def _main(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.01, 0.1))
            if self.wanted:
                self.wanted -= 1
                self.under_way += 1
                await self._put()
                self.under_way -= 1

    async def _put(self) -> None:
        world, rng = self.world, self.rng
        count, producer_id = rng.randint(1, 6), world.next_number()
        values = [f"{producer_id} {at}".encode() for at in range(count)]
        keys = [rng.choice((None, b"a", b"b", b"c")) for _ in range(count)]
        options = [
            JobOptions(
                delay_ms=rng.choice((0, 300)),
                deliver_at_ms=self._deliver_at_ms(),
                ttl_ms=rng.choice((0, 0, 0, 200, 1_500)),
                dedupe_id=rng.choice(("", "", "", "d1", "d2")),
                want_result=rng.random() < 0.3,
            )
            for _ in range(count)
        ]
        headers: Any = [[(JOB_HEADER, encode_options(each))] for each in options] if rng.random() < 0.4 else None
        batch = RecordBatch.encode(
            values,
            keys,
            headers,
            timestamps=EPOCH_MS,
            lane=rng.randrange(world.group.partition_settings.lanes),
            producer_id=producer_id,
        )
        told = await self._until_answered(lambda channel: channel.append(batch))
        for at, value in enumerate(values):
            world.put[told.base_offset + at] = value
        world.scheduled += sum(each.deliver_at_ms > 0 for each in options) if headers else 0

    def _deliver_at_ms(self) -> int:
        """Mostly none. Or by the queue's clock, which leaders have set: a time that is over, or one to come."""
        if "app_schedules" not in self.world.ways or self._times.random() < 0.5:
            return 0
        return max(1, self.world.checker.jobs.model.now_ms + round(self._times.uniform(-1_000, 2_000)))


class Worker(_App):
    """Leases jobs and says what became of them, most of the time."""

    def __init__(self, world: JobWorld, name: str, rng: Random) -> None:
        self.attempt = 0
        self._ways = Random(f"ways {world.seed} {name}")
        super().__init__(world, name, rng)

    def _does(self, way: str) -> bool:
        return way in self.world.ways and self._ways.random() < 0.5

    async def _main(self) -> None:
        rng, world = self.rng, self.world
        while True:
            self.attempt += 1
            max_jobs = rng.choice((1, 1, 3, 8))
            least_jobs = max_jobs if max_jobs <= 3 and self._does("app_wants_all") else 1
            leased: Leased = await self.ask(
                protocol.LeaseJobs(
                    worker=self.name,
                    attempt=self.attempt,
                    max_jobs=max_jobs,
                    least_jobs=least_jobs,
                    wait_ms=rng.choice((0, 200, 1_000)),
                    lease_ms=rng.choice((0, 300)),
                )
            )
            world.told_jobs(self.name, self.attempt, leased)
            if 0 < len(leased.jobs) < least_jobs:
                raise BrokenError(Invariant.JOB_ANSWERS, f"{self.name} wanted {least_jobs} jobs or none: {leased}")
            world.whole += len(leased.jobs) >= least_jobs > 1
            if not leased.jobs:
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                continue
            await asyncio.sleep(rng.uniform(0, 0.6) if rng.random() < 0.5 or not world.faults else rng.uniform(0, 3))
            await self._settle(leased)

    async def _settle(self, leased: Leased) -> None:
        rng, world = self.rng, self.world
        ids = [job.id for job in leased.jobs]
        if rng.random() < 0.3:
            await self.ask(self._call("extend", leased.token, ids))
        if rng.random() < 0.1 and world.faults:  # it hangs, and its client extends the lease for as long as it may
            for _ in range(10):
                await self.ask(self._call("extend", leased.token, ids))
                await asyncio.sleep(0.5)
        while ids:
            some, ids = ids[: rng.randint(1, len(ids))], []
            left = [job.id for job in leased.jobs if job.id not in some]
            kind = "ack" if rng.random() < world.diligence else rng.choice(world.other_ends)
            if kind == "ack" and rng.random() < 0.3:
                runs = tuple([(each, 1) for each in some])
                acked = await self.ask(protocol.AckAll(leases=((leased.token, runs),)))
                done = set(some) if acked.done else set()
                world.told_acked(self.name, leased.token, done, set() if acked.forgotten else set(some) - done)
            elif kind != "nothing":
                (settled,) = await self.ask(self._call(kind, leased.token, some))
                lost = {first + at for first, count in settled.lost for at in range(count)}
                if kind == "ack":
                    world.told_acked(self.name, leased.token, set(some) - lost, lost)
            leased = Leased(leased.token, 0, tuple([job for job in leased.jobs if job.id in left]))
            ids = left

    def _call(self, kind: Any, token: int, ids: list[int]) -> Call:
        delay_ms = self.rng.choice((0, 200))
        if kind == "nack" and self._does("app_backs_off"):
            delay_ms = -1
            self.world.backed_off += 1
        tells = kind == "ack" and len(ids) == 1 and self._does("app_tells")
        told = Settlement(
            kind=kind,
            token=token,
            jobs=tuple([(each, 1) for each in ids]),
            delay_ms=delay_ms,
            reason="so",
            result=b"%d by %d" % (ids[0], token) if tells else None,
        )
        return protocol.SettleJobs(worker=self.name, settlements=(told,))


class Quitter(_App):
    """Asks for jobs, and soon does not want them any more. What it is given all the same it gives back; or it is one
    that closes its handle, and hears of nothing that was on its way."""

    def __init__(self, world: JobWorld, name: str, rng: Random) -> None:
        self.attempt = 0
        self._closes = rng.random() < 0.5
        super().__init__(world, name, rng)

    async def _main(self) -> None:
        own, rng = self.name, self.rng
        while True:
            self.attempt += 1
            call = protocol.LeaseJobs(
                worker=self.name,
                attempt=self.attempt,
                max_jobs=3,
                max_bytes=rng.choice((4_000, 150)),  # then the answer is cut
                wait_ms=1_000,
                lease_ms=rng.choice((0, 300)),
            )
            if self._closes:
                await self._close(call)
                self.name = f"{self.attempt} {own}"  # another handle
            else:
                await self._withdraw(call)
            await asyncio.sleep(rng.uniform(0.05, 0.6))

    async def _close(self, call: protocol.LeaseJobs) -> None:
        asking = asyncio.ensure_future(self.ask(call))
        await asyncio.sleep(self.rng.uniform(0, 0.4))
        asking.cancel()
        await self.ask(protocol.EndWorker(worker=self.name))

    async def _withdraw(self, call: protocol.LeaseJobs) -> None:
        """What a leader says that it has withdrawn it does not give."""
        asked: list[Channel] = []

        async def lease(channel: Channel) -> Any:
            asked.append(channel)
            return await channel.call(call)

        async def withdraw(channel: Channel) -> tuple[Channel, int]:
            return channel, await channel.call(protocol.WithdrawRequest(worker=call.worker, attempt=call.attempt))

        asking = asyncio.ensure_future(self._until_answered(lease))
        await asyncio.sleep(self.rng.uniform(0, 0.4))
        there, withdrawn = await self._until_answered(withdraw)
        leased: Leased = await asking
        self.world.withdrawn += withdrawn
        if withdrawn and leased.jobs and asked == [there]:
            raise BrokenError(Invariant.JOB_ANSWERS, f"{self.name} withdrew request {call.attempt} and got {leased}")
        self.world.told_jobs(self.name, self.attempt, leased)
        if leased.jobs:
            ids = tuple([(job.id, 1) for job in leased.jobs])
            back = Settlement(kind="release", token=leased.token, jobs=ids)
            await self.ask(protocol.SettleJobs(worker=self.name, settlements=(back,)))


class Operator(_App):
    """Cancels jobs, and redrives and purges dead letters, whatever they are by then: until everything heals."""

    async def _main(self) -> None:
        rng, world = self.rng, self.world
        while world.faults:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            known = sorted(world.put)
            ids = tuple(rng.sample(known, min(len(known), 3)))
            kind = rng.choice((protocol.CancelJobs, protocol.RedriveDead, protocol.RedriveDead, protocol.PurgeDead))
            if kind is protocol.CancelJobs:
                ids = tuple(known[-3:])  # what was put last mostly waits
            if ids:
                dead = tuple(job.id for job in world.checker.jobs.model.jobs.values() if job.state == DEAD)
                chosen = (dead[:2] or ids) if kind is not protocol.CancelJobs and rng.random() < 0.7 else ids
                await self.ask(kind(ids=chosen))


class JobWorld:
    """One seed's universe. ``faults`` narrows what may go wrong, and names the ``WAYS``; None lets the seed draw.
    ``settings`` of the queue."""

    def __init__(
        self, seed: int, faults: frozenset[str] | None = None, settings: PartitionSettings | None = None
    ) -> None:
        self.seed = seed
        self.rng = Random(f"jobs {seed}")
        self._dice = Random(f"job dice {seed}")
        self.clock = Clock()
        self.internet = Internet(self.clock, self.rng)
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
        self.faults = drawn if faults is None else set(faults)
        self.size = self.rng.choice((1, 3, 3))
        self.settings = _settings(self.rng)
        ways = Random(f"job ways {seed}")
        self.ways = {way for way in WAYS if (ways.random() < 0.5 if faults is None else way in faults)}
        self._queue = settings or _queue(self.rng)
        if settings is None and "app_backs_off" in self.ways:  # at most so long that all is done soon
            self._queue = replace(self._queue, retry_backoff_ms=ways.choice((0, 100, 300)), retry_backoff_max_ms=1_000)
        self.skews_ms: dict[ReplicaId, int] = {}
        self.diligence = self.rng.choice((0.4, 0.7, 0.95))
        self.other_ends = ["nack", "reject", "release"]
        if self._queue.lease_ms == LEASE_MS:  # else it would be held for longer than a schedule lasts
            self.other_ends.append("nothing")
        self.gone_nodes: dict[str, None] = {}
        """Of Ray: what it says to whoever asks."""
        self._vanished: set[SimProcess] = set()
        self.withdrawn = self.reported = 0
        self.scheduled = self.whole = self.backed_off = 0
        self.put: dict[int, bytes] = {}
        self.told: dict[int, tuple[str, int]] = {}
        """Job to who was told that its acknowledgement counts, and the token."""
        self.handed = self.redelivered = self.lost_leases = 0
        self._told_lost: list[tuple[str, int, int]] = []
        self._handed_by: dict[tuple[str, int], Leased] = {}
        self.putters: list[Putter] = []
        self.workers: list[Worker | Quitter | Operator] = []
        self._numbers = 0

    # -- for applications ------------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def new_process(self, name: str) -> SimProcess:
        process = SimProcess(self.clock, name)  # type: ignore[abstract]  # what nobody asks of it, it does not do
        process.connect = self.internet.connect
        process.on_killed.append(lambda: self.internet.process_gone(process))
        return process

    def told_jobs(self, worker: str, attempt: int, leased: Leased) -> None:
        """Whatever a worker gets was leased to it, by the log, with this count, and has the bytes that were put."""
        granted = self.checker.jobs.granted.get(leased.token, {})
        for job in leased.jobs:
            self.handed += 1
            self.redelivered += job.deliveries > 1
            if granted.get(job.id) != job.deliveries:
                raise BrokenError(Invariant.JOB_ANSWERS, f"{worker} got {job} by lease {leased.token}: {granted}")
            if self.checker.jobs.values[job.id] != job.value:
                raise BrokenError(
                    Invariant.JOB_ANSWERS, f"{worker} got {job} instead of {self.checker.jobs.values[job.id]!r}"
                )
            if any(name == JOB_HEADER for name, _ in job.headers):
                raise BrokenError(Invariant.JOB_ANSWERS, f"{worker} sees options: {job}")

    def told_acked(self, worker: str, token: int, ids: set[int], lost: set[int]) -> None:
        for job_id in ids:
            known = self.told.setdefault(job_id, (worker, token))
            if known != (worker, token):
                raise BrokenError(Invariant.JOB_ANSWERS, f"job {job_id} was acknowledged by {known} and by {worker}")
            if (token, job_id) not in self.checker.jobs.acked:
                raise BrokenError(Invariant.JOB_ANSWERS, f"{worker} was told that job {job_id} is done, and it is not")
        self.lost_leases += len(lost)
        for job_id in lost:
            if (token, job_id) in self.checker.jobs.acked:
                raise BrokenError(
                    Invariant.JOB_ANSWERS, f"{worker} was told that job {job_id} is lost; its ack counted"
                )

    # -- how it begins -----------------------------------------------------------------------

    def _build(self) -> None:
        self.group = JobEnsemble(
            GroupId("jobs-0"),
            PARTITION,
            clock=self.clock,
            rng=self.rng,
            disk_rng=Random(f"job disks {self.seed}"),
            internet=self.internet,
            settings=self.settings,
            raft_settings=_raft(),
        )
        self.group.world = self
        self.group.partition_settings = self._queue
        self.checker = JobChecker(self.group)
        self.group.checker = self.checker
        names = [f"n{number}" for number in range(self.size)]
        for name in names:
            self._skew(ReplicaId(name))
        self.group.start(JobNode, names)

    def _skew(self, node: ReplicaId) -> None:
        """A clock that is wrong by up to an hour, if clocks are wrong in this schedule."""
        if "clock_jump" in self.faults:
            self.skews_ms[node] = self.rng.choice((0, -3_600_000, 3_600_000, self.rng.randint(-900, 900)))

    # -- what goes wrong ---------------------------------------------------------------------

    def _weather(self) -> None:
        def share(name: str, most: float) -> float:
            return self.rng.uniform(0, most) if name in self.faults else 0.0

        self.group.network.weather = Weather(
            drop=share("drop", 0.3),
            duplicate=share("duplicate", 0.6),
            slow=share("slow", 0.3),
            slow_s=self.rng.choice((0.05, 0.5, 2.0)),
            reorder="reorder" in self.faults,
        )
        self.internet.slow_s = self.rng.choice((0.05, 0.3, 1.0)) if "app_slow" in self.faults else 0.0

    def _one_fault(self) -> None:
        kinds = [fault for fault in (*NODE_FAULTS, *APP_FAULTS) if fault in self.faults]
        if not kinds:
            return
        self._put_some()
        kind = self.rng.choice(kinds)
        if kind in APP_FAULTS:
            self._app_fault(kind)
        else:
            self._node_fault(kind)

    def _node_fault(self, kind: str) -> None:
        rng, group = self.rng, self.group
        leader = group.leader()
        node = leader if leader is not None and rng.random() < 0.5 else rng.choice(list(group.nodes.values()))
        match kind:
            case "partition" | "one_way":
                group.divide(one_way=kind == "one_way")
            case "pause":
                node.pause(rng.uniform(0.05, 3))
            case "kill":
                group.kill(node)
            case "kill_in_sync":
                node.doom = partial(group.kill, node, committed=True)
            case "power_loss":
                for victim in group.nodes.values():
                    group.kill(victim, committed=rng.random() < 0.5)
            case "transfer":
                group.transfer()
            case "clock_jump":
                self._skew(node.replica_id)

    def _app_fault(self, kind: str) -> None:
        rng = self.rng
        apps = [app for app in (*self.putters, *self.workers) if not app.process.killed]
        if not apps:
            return
        app = rng.choice(apps)
        match kind:
            case "app_pause":
                app.process.pause(rng.uniform(0.05, 4))
            case "app_cut":
                app.process.cut = True
                self.clock.after(rng.uniform(0.1, 4), lambda: setattr(app.process, "cut", False))
            case "app_kill":
                app.process.kill()
                self.clock.after(rng.uniform(0.01, 2), partial(self._new, type(app)))
            case "app_reset":
                self.internet.reset(app.process)
            case "host_gone":  # it does not hang up
                app.process.cut = True
                self._vanished.add(app.process)
                app.process.kill()
                self.clock.after(rng.uniform(0.01, 2), partial(self._new, type(app)))
                self.clock.after(rng.uniform(0.05, 2), partial(self._report, app.ray_node))
            case "false_report":
                self._report(app.ray_node)

    def _report(self, ray_node: str) -> None:
        """Ray says that a node is dead; the keeper tells one replica after the other."""
        self.gone_nodes[ray_node] = None
        self.reported += 1
        for node in self.group.nodes.values():
            told = partial(lambda node: node.call(lambda: node.service.jobs.nodes_gone([ray_node])), node)
            self.clock.after(self.rng.uniform(0.01, 2), told)

    # -- who uses it ----------------------------------------------------------------------------

    def _new(self, kind: type[Any]) -> None:
        app = kind(self, f"{kind.__name__.lower()}{self.next_number()}", Random(self.rng.random()))
        (self.putters if kind is Putter else self.workers).append(app)

    def _put_some(self) -> None:
        putters = [putter for putter in self.putters if not putter.process.killed]
        if putters:
            self.rng.choice(putters).wanted += self.rng.randint(1, 3)

    # -- the schedule -----------------------------------------------------------------------------

    def run(self) -> JobOutcome:
        with virtual_time(self.clock, self._dice) as alarms, patch.object(moving, "SLACK", 5):
            try:
                return self._run(alarms)
            finally:
                for app in (*self.putters, *self.workers):
                    app.process.kill()

    def _run(self, alarms: list[str]) -> JobOutcome:
        self._build()
        rng, begin = self.rng, self.clock.now
        end = begin + SAFETY_S
        for _ in range(rng.choice((1, 2))):
            self._new(Putter)
        for _ in range(rng.choice((1, 2, 4))):
            self.clock.at(rng.uniform(begin, begin + 2), partial(self._new, Worker))
        for _ in range(rng.choice((1, 2)) if "app_quits" in self.faults else 0):
            self.clock.at(rng.uniform(begin, begin + 2), partial(self._new, Quitter))
        if "app_operates" in self.faults:
            self.clock.at(rng.uniform(begin, begin + 2), partial(self._new, Operator))
        for _ in range(rng.randint(6, 16)):
            self.clock.at(rng.uniform(begin, end), self._put_some)
        for _ in range(rng.randint(3, 16)):
            self.clock.at(rng.uniform(begin + 0.5, end), self._one_fault)
        for _ in range(4):
            self.clock.at(rng.uniform(begin, end), self._weather)
        self.clock.run_until(end)
        self._heal()
        self.checker.finally_agree(list(self.group.nodes.values()))  # type: ignore[arg-type]
        self._check_end()
        if alarms:
            raise BrokenError(Invariant.SOUND_CLIENT, "; ".join(alarms))
        checker = self.checker
        dead = checker.jobs.model.count(DEAD)
        return JobOutcome(
            self.seed,
            len(checker.jobs.acked),
            checker.last_committed,
            self.group.snapshots,
            self.handed,
            self.redelivered,
            self.lost_leases,
            dead,
            checker.jobs.moved,
            self.withdrawn,
            self.reported,
            checker.jobs.model.expired,
            checker.jobs.model.deduplicated,
            sum(map(len, checker.jobs.changed.values())),
            self.scheduled,
            self.whole,
            self.backed_off,
        )

    def _heal(self) -> None:
        self.faults = set()
        self.diligence = 1.0
        self.internet.slow_s = 0.0
        self.group.network.weather = Weather()
        self.group.network.cut(set())
        self.clock.run_until(self.clock.now + 5)
        self.group.heal()
        for app in (*self.putters, *self.workers):
            app.process.cut = app.process in self._vanished
        if all(putter.process.killed for putter in self.putters):
            self._new(Putter)
        self._new(Worker)
        self._put_some()
        if not self.clock.run_until(self.clock.now + HEAL_S, self._settled, max_events=900_000):
            raise BrokenError(Invariant.PROGRESS, f"no progress after healing: {self._describe()}")
        for app in (*self.putters, *self.workers):
            app.process.kill()
        self._agree()
        self._read_dead()
        self._agree()

    def _agree(self) -> None:
        if not self.clock.run_until(self.clock.now + HEAL_S, lambda: self.group.settled, max_events=900_000):
            raise BrokenError(Invariant.PROGRESS, f"replicas do not agree: {self.group.describe()}")

    def _settled(self) -> bool:
        model = self.checker.jobs.model
        return (
            all(putter.idle for putter in self.putters)
            and all(job.state == DEAD for job in model.jobs.values())
            and self.group.settled
        )

    def _describe(self) -> str:
        states = {job.id: (job.state, job.token) for job in self.checker.jobs.model.jobs.values() if job.state != DEAD}
        putting = {putter.name: putter.under_way for putter in self.putters if not putter.idle}
        return f"jobs={states} putting={putting}\n  {self.group.describe()}"

    def _read_dead(self) -> None:
        """What a client is told of the dead letters."""
        found: list[DeadJob] = []
        done: list[bool] = []
        world = self

        class Reader(_App):
            async def _main(self) -> None:
                first = 0
                while some := await self.ask(protocol.ListDead(first=first, max_jobs=5)):
                    found.extend(some)
                    first = some[-1].job.id + 1
                done.append(True)

        Reader(self, "reader", Random(1))
        if not self.clock.run_until(self.clock.now + HEAL_S, lambda: bool(done), max_events=900_000):
            raise BrokenError(Invariant.PROGRESS, "nobody tells what is dead")
        model = world.checker.jobs.model
        expected = {job.id: (job.deliveries, job.notes[-8:]) for job in model.jobs.values()}
        told = {each.job.id: (each.job.deliveries, [failure.kind for failure in each.history]) for each in found}
        if told != expected:
            raise BrokenError(Invariant.JOB_ANSWERS, f"dead letters are told as {told}, and are {expected}")
        for each in found:
            reasons = [failure.reason for failure in each.history if failure.kind in ("nack", "reject")]
            if each.job.value != self.checker.jobs.values[each.job.id] or set(reasons) - {"so"}:
                raise BrokenError(Invariant.JOB_ANSWERS, f"dead letter {each} has other bytes, or other reasons")

    def _check_end(self) -> None:
        """Every job that was put is acknowledged once, or dead."""
        checker = self.checker
        acked = [job_id for _, job_id in checker.jobs.acked]
        if len(acked) != len(set(acked)):
            raise BrokenError(Invariant.JOB_STATE, "a job was acknowledged twice")
        dead = {job.id for job in checker.jobs.model.jobs.values()}
        done = [set(acked), dead, checker.jobs.never, checker.jobs.changed["cancel"], checker.jobs.changed["purge"]]
        for job_id, value in self.put.items():
            if checker.jobs.values.get(job_id) != value:
                raise BrokenError(Invariant.JOBS_KEPT, f"job {job_id} was put as {value!r} and is not in the log")
            ends = sum(job_id in each for each in done)
            if ends > 1 or (self._queue.dead_letter and not ends):
                raise BrokenError(Invariant.JOBS_KEPT, f"job {job_id} is at {ends} ends")


def _queue(rng: Random) -> PartitionSettings:
    return PartitionSettings(
        queue=True,
        lanes=rng.choice((1, 2, 3)),
        lease_ms=LEASE_MS,
        max_lease_ms=rng.choice((2_000, 4_000)),
        dedupe_window_ms=rng.choice((500, 300_000)),
        max_deliveries=rng.choice((2, 5, None)),
        dead_letter=rng.random() < 0.8,
        ordered_by_key=rng.random() < 0.25,
        fair_by_key=rng.random() < 0.25,
        max_leased=rng.choice((5, 1000)),
    )
