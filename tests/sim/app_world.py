"""One schedule of a whole cluster and its applications: real clients, real services, real logs, from one seed.

A coordinator and a topic of one or two partitions, each a Raft group of its own;
producers, and consumers in groups, each in a process of its own (``process``),
connected by TCP in virtual time (``sockets``). First the safety phase, with
faults of the kinds that this seed has drawn, among replicas and among
applications. Then everything heals, and progress is demanded: every record has
an outcome, and every group comes to the end. All the while, and at the end,
``history`` compares what applications were told with the logs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from rayqueue.cluster.commands import ReplicasMade, encode_command
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.config import RaftSettings, Settings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId
from rayqueue.log.store import Entry
from rayqueue.partition import Committed, Partition, PartitionSettings
from rayqueue.partition.commands import CommitOffsets, decode
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.calls import CreateTopic
from rayqueue.protocol.topics import TopicInfo, TopicSettings
from rayqueue.records import BATCH_TAG, BatchHeader
from tests.sim.apps import TOPIC, Manners, SimConsumer, SimSender
from tests.sim.checker import Checker, LogChecker
from tests.sim.ensemble import Ensemble
from tests.sim.history import GroupHistory, PartitionLog, ProducerHistory
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Clock, Weather
from tests.sim.process import SimProcess, virtual_time
from tests.sim.served import CoordinatorNode, PartitionNode
from tests.sim.sockets import Internet

WEATHERS = ("drop", "duplicate", "slow", "reorder")
NODE_FAULTS = ("partition", "one_way", "pause", "kill", "kill_in_sync", "power_loss", "disk_full", "transfer")
APP_FAULTS = ("app_pause", "app_cut", "app_kill", "app_reset", "app_leave")
FAULTS = (*WEATHERS, *NODE_FAULTS, *APP_FAULTS, "app_slow")
MIXED = "mixed"
"""Some replicas are of the release before, until they are started again."""
BUSY = "busy"
"""Threads of replicas have other things to do now and then. Dice of their own say whether it is so."""

SAFETY_S = 8.0
HEAL_S = 40.0
_SESSION_S = 0.6
"""Of zombies."""

BROKERS = tuple(AliveBroker(f"b{number}", f"host{number}") for number in range(3))


@dataclass(frozen=True, slots=True)
class AppOutcome:
    seed: int
    acked: int
    entries: int
    snapshots: int
    unknown: int
    handed: int
    commits: int


class PartitionChecker(Checker):
    """Of one partition of the topic. Tells the groups' histories what they have committed."""

    def __init__(self, world: AppWorld, group: Ensemble[PartitionNode], number: int) -> None:
        super().__init__(group)  # type: ignore[arg-type]
        self._app_world = world
        self._number = number
        self.commits = 0
        self.reads.on_applied = self._applied

    def _applied(self, entry: Entry, answer: Any) -> None:
        if entry.payload[0] == BATCH_TAG:
            self._check_bound()
            return
        if not isinstance(answer, Committed):
            return
        commit = decode(entry.payload)
        if isinstance(commit, CommitOffsets) and commit.offsets:
            self.commits += 1
            self._app_world.groups[commit.group].committed(self._number, commit)

    def _check_bound(self) -> None:
        bound, backlog = self.reads.machine.settings.max_backlog_records, self.reads.machine.backlog()
        if bound is not None and backlog.records > bound:
            raise BrokenError(Invariant.BOUNDED, f"{backlog.records} records wait for the group; the bound is {bound}")

    def _check_acks(self, accepted: list[tuple[int, BatchHeader]]) -> None:
        """``ProducerHistory`` does, record by record and over all epochs."""


class AppWorld:
    """One seed's universe. ``faults`` narrows what may go wrong, ``manners`` how consumers read; None lets the seed
    draw. ``zombies``: what happens to applications happens to consumers, and lasts longer than their sessions do.
    ``bound``: of each partition's backlog; 0 for none. Then there is one group, which never goes back: nothing but
    what is admitted makes the backlog longer."""

    def __init__(
        self,
        seed: int,
        faults: frozenset[str] | None = None,
        size: int | None = None,
        manners: Manners | None = None,
        *,
        zombies: bool = False,
        bound: int | None = None,
    ) -> None:
        self.seed = seed
        self._mixed, self._busy = drawn_apart(MIXED, seed, faults), drawn_apart(BUSY, seed, faults)
        drawn_bound = Random(f"bounds {seed}").choice((0, 0, 0, 0, 6)) if faults is None else 0
        self.bound = (drawn_bound if bound is None else bound) or None
        self._zombies = zombies
        self.rng = Random(f"applications {seed}")
        self._dice = Random(f"dice {seed}")
        self._manners = manners
        self.clock = Clock()
        self.internet = Internet(self.clock, self.rng)
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
        self.faults = drawn if faults is None else set(faults)
        self.size = self.rng.choice((1, 3, 3)) if size is None else size
        self.lanes = self.rng.choice((1, 1, 2))
        self.partitions = self.rng.choice((1, 1, 2))
        self.settings = _settings(self.rng, zombies)
        self.producers = ProducerHistory()
        self.logs: dict[int, PartitionLog] = {}
        self.groups: dict[str, GroupHistory] = {}
        self.ensembles: dict[int, Ensemble[PartitionNode]] = {}
        self._group_ids: dict[str, Ensemble[Any]] = {}
        self.senders: list[SimSender] = []
        self.consumers: list[SimConsumer] = []
        self._fault_s = (_SESSION_S, 2 * _SESSION_S) if zombies else (0.05, 4)
        self._how: dict[str, Manners] = {}
        self._names = 0

    # -- for applications ------------------------------------------------------------------

    def new_process(self, name: str) -> SimProcess:
        process = SimProcess(self.clock, name)  # type: ignore[abstract]  # what nobody asks of it, it does not do
        process.connect = self.internet.connect
        process.on_killed.append(lambda: self.internet.process_gone(process))
        return process

    def group(self, group_id: GroupId) -> Ensemble[Any]:
        return self._group_ids[group_id]

    def reference(self, number: int) -> Partition:
        """The state that the committed log of a partition gives."""
        checker = self.ensembles[number].checker
        assert isinstance(checker, PartitionChecker)
        return checker.reads.machine

    # -- how it begins -----------------------------------------------------------------------

    def _ensemble(self, group_id: str, schema: Any) -> Ensemble[Any]:
        made: Ensemble[Any] = Ensemble(
            GroupId(group_id),
            schema,
            clock=self.clock,
            rng=self.rng,
            disk_rng=Random(f"disks {group_id} {self.seed}"),
            internet=self.internet,
            settings=self.settings,
            raft_settings=_raft(),
        )
        made.brokers = BROKERS
        made.release_rng = Random(f"releases {group_id} {self.seed}") if self._mixed else None
        made.busy_rng = Random(f"busy {group_id} {self.seed}") if self._busy else None
        self._group_ids[group_id] = made
        return made

    def _build(self) -> None:
        self.coordinators: Ensemble[CoordinatorNode] = self._ensemble("coordinator", COORDINATOR)
        self.coordinators.checker = LogChecker()
        self.coordinators.start(CoordinatorNode, [f"c{number}" for number in range(self.rng.choice((1, self.size)))])
        settings = TopicSettings(
            partitions=self.partitions, replication=self.size, lanes=self.lanes, max_backlog_records=self.bound
        )
        topic = self._create_topic(TOPIC, settings)
        for each in topic.partitions:
            group: Ensemble[PartitionNode] = self._ensemble(each.group_id, PARTITION)
            group.partition_settings = PartitionSettings(lanes=self.lanes, max_backlog_records=self.bound)
            checker = PartitionChecker(self, group, each.number)
            group.checker = checker
            self.ensembles[each.number] = group
            self.logs[each.number] = PartitionLog(checker.reads)
            group.start(PartitionNode, [replica.replica_id for replica in each.replicas])
        groups = self.rng.choice((1, 1, 2))
        for name in ("billing", "search")[: 1 if self.bound else groups]:
            how = self._manners or Manners.drawn(self.rng)
            how = self._how[name] = replace(how, seeks=False) if self.bound else how
            self.groups[name] = GroupHistory(name, self.logs, at_most_once=how.delivery == "at_most_once")

    def _create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        made: list[Any] = []
        call = CreateTopic(name=name, settings=settings, attempt="first")

        def leads() -> bool:
            leader = self.coordinators.leader()
            return leader is not None and leader.service.leads

        self.clock.run_until(20.0, leads)
        leader = self.coordinators.leader()
        assert leader is not None
        leader.call(lambda: leader.service._coordinator.handle(self.clock.now, 0, call, made.append))
        self.clock.run_until(20.0, lambda: bool(made))
        if isinstance(made[0], RayQueueError):
            raise made[0]
        topic: TopicInfo = made[0]
        replicas = tuple((each.group_id, replica.replica_id) for each in topic.partitions for replica in each.replicas)
        leader.propose(encode_command(ReplicasMade(replicas)), void)
        return topic

    # -- what goes wrong ---------------------------------------------------------------------

    def _weather(self) -> None:
        def share(name: str, most: float) -> float:
            return self.rng.uniform(0, most) if name in self.faults else 0.0

        for group in self._group_ids.values():
            group.network.weather = Weather(
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
        for delay_s in (0.0, 0.3, 1.0):  # what is under way when it happens is what may be lost or doubled by it
            self.clock.after(self.rng.uniform(0, delay_s), self._send_some)
        kind = self.rng.choice(kinds)
        if kind in APP_FAULTS:
            self._app_fault(kind)
        else:
            # The partitions are what promises are made about; the coordinator's group has a world of its own.
            groups: list[Ensemble[Any]] = [*self.ensembles.values(), *self.ensembles.values(), self.coordinators]
            self._node_fault(kind, self.rng.choice(groups))

    def _node_fault(self, kind: str, group: Ensemble[Any]) -> None:
        rng = self.rng
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
            case "disk_full":
                node.disk_is_full = True
                node.reserve_is_full = rng.random() < 0.5
                self.clock.after(rng.uniform(0.1, 3), lambda: setattr(node, "disk_is_full", False))
            case "transfer":
                group.transfer()

    def _app_fault(self, kind: str) -> None:
        rng = self.rng
        every: list[SimSender | SimConsumer] = [*self.senders, *self.consumers]
        apps = [app for app in every if not app.process.killed]
        if self._zombies:
            apps = [app for app in apps if isinstance(app, SimConsumer) and app.at_work]
            if not apps and self.faults:  # it waits for its moment
                self.clock.after(0.01, partial(self._app_fault, kind))
        if not apps:
            return
        app = rng.choice(apps)
        match kind:
            case "app_pause":
                app.process.pause(rng.uniform(*self._fault_s))
            case "app_cut":
                app.process.cut = True
                self.clock.after(rng.uniform(*self._fault_s), lambda: setattr(app.process, "cut", False))
            case "app_kill":
                app.process.kill()
                self._replace(app)
            case "app_reset":
                self.internet.reset(app.process)
            case "app_leave" if isinstance(app, SimConsumer):
                app.leave()
                self._replace(app)

    def _replace(self, app: SimSender | SimConsumer) -> None:
        """Another one comes, sooner or later."""
        again = self._new_sender if isinstance(app, SimSender) else partial(self._new_consumer, app.group.name)
        self.clock.after(self.rng.uniform(0.01, 2), again)

    # -- who uses it ----------------------------------------------------------------------------

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _new_sender(self) -> None:
        self.senders.append(SimSender(self, self._name("p"), self.settings, Random(self.rng.random())))

    def _new_consumer(self, group: str) -> None:
        how, rng = self._how[group], Random(self.rng.random())
        self.consumers.append(SimConsumer(self, self._name("m"), self.settings, self.groups[group], how, rng))

    def _send_some(self) -> None:
        senders = [sender for sender in self.senders if not sender.process.killed]
        if senders:
            self.rng.choice(senders).want(self.rng.randint(1, 12))

    # -- the schedule -----------------------------------------------------------------------------

    def run(self) -> AppOutcome:
        with virtual_time(self.clock, self._dice) as alarms:
            try:
                return self._run(alarms)
            finally:
                for app in (*self.senders, *self.consumers):
                    app.process.kill()

    def _run(self, alarms: list[str]) -> AppOutcome:
        self._build()
        rng, begin = self.rng, self.clock.now
        end = begin + SAFETY_S
        for _ in range(rng.choice((1, 2, 3))):
            self.clock.at(rng.uniform(begin, begin + 1), self._new_sender)
        for name in self.groups:
            for _ in range(rng.choice((1, 2, 3))):
                self.clock.at(rng.uniform(begin, end / 2), partial(self._new_consumer, name))
        for _ in range(rng.randint(6, 20)):
            self.clock.at(rng.uniform(begin, end), self._send_some)
        for _ in range(16 if self._zombies else rng.randint(3, 16)):
            self.clock.at(rng.uniform(begin + 0.5, end), self._one_fault)
        for _ in range(4):
            self.clock.at(rng.uniform(begin, end), self._weather)
        self.clock.run_until(end)
        self._heal()
        self.producers.check(self.logs, ordered=self.bound is None)
        for group in self.ensembles.values():
            checker = group.checker
            assert isinstance(checker, PartitionChecker)
            checker.finally_agree(list(group.nodes.values()))  # type: ignore[arg-type]
        if alarms:
            raise BrokenError(Invariant.SOUND_CLIENT, "; ".join(alarms))
        return self._outcome()

    def _heal(self) -> None:
        self.faults = set()
        self.internet.slow_s = 0.0
        for group in self._group_ids.values():
            group.network.weather = Weather()
            group.network.cut(set())
        self.clock.run_until(self.clock.now + 5)  # whatever was under way, pauses and restarts, comes to its end
        for group in self._group_ids.values():
            group.heal()
        for app in (*self.senders, *self.consumers):
            app.process.cut = False
        if not any(not sender.process.killed for sender in self.senders):
            self._new_sender()
        for name in self.groups:
            if not any(each.group.name == name and not each.left for each in self._living()):
                self._new_consumer(name)
        self._send_some()
        if not self.clock.run_until(self.clock.now + HEAL_S, self._settled, max_events=600_000):
            raise BrokenError(Invariant.PROGRESS, f"no progress after healing: {self._describe()}")

    def _living(self) -> list[SimConsumer]:
        return [each for each in self.consumers if not each.process.killed and not each._leaving]

    def _settled(self) -> bool:
        return (
            all(sender.idle for sender in self.senders)
            and all(group.settled for group in self._group_ids.values())
            and not self._behind()
        )

    def _behind(self) -> dict[str, Any]:
        """The groups that have not come to the end, and what they lack."""
        behind: dict[str, Any] = {}
        for name in self.groups:
            for number, log in self.logs.items():
                position = self.reference(number).position(name)
                offsets = {} if position is None else position.offsets
                ends = {lane: at + 1 for at, (lane, _) in enumerate(log.grow())}
                left = {lane: (offsets.get(lane, 0), end) for lane, end in ends.items() if offsets.get(lane, 0) < end}
                if left:
                    behind[f"{name} {number}"] = left
        return behind

    def _describe(self) -> str:
        waiting = {sender.name: sender.waiting for sender in self.senders if not sender.idle}
        groups = "\n  ".join(group.describe() for group in self._group_ids.values())
        return f"waiting={waiting} behind={self._behind()}\n  {groups}"

    def _outcome(self) -> AppOutcome:
        checkers = [group.checker for group in self.ensembles.values()]
        return AppOutcome(
            self.seed,
            self.producers.acked,
            sum(checker.last_committed for checker in checkers),
            sum(group.snapshots for group in self._group_ids.values()),
            sum(isinstance(sent.outcome, RayQueueError) for sent in self.producers.sent.values()),
            sum(len(handed) for group in self.groups.values() for handed in group.handed.values()),
            sum(checker.commits for checker in checkers if isinstance(checker, PartitionChecker)),
        )


def drawn_apart(fault: str, seed: int, faults: frozenset[str] | None) -> bool:
    """By dice of its own: it changes nothing in the schedules that do not have it."""
    return Random(f"{fault} {seed}").random() < 0.2 if faults is None else fault in faults


def void(_: Any) -> None: ...


def _raft() -> RaftSettings:
    return RaftSettings(
        election_timeout_min_ms=600,
        election_timeout_max_ms=1200,
        fast_election_max_ms=100,
        heartbeat_ms=200,
        append_batch_bytes=100_000,
        window_bytes=300_000,
        max_uncommitted_bytes=600_000,
        apply_batch_bytes=20_000,
        snapshot_retry_ms=500,
    )


def _settings(rng: Random, zombies: bool = False) -> Settings:
    sessions = {"session_timeout_ms": round(_SESSION_S * 1000), "heartbeat_ms": 200} if zombies else {}
    return Settings.model_validate(
        {
            "transport": {"secret": "only for this world"},
            "client": {"call_timeout_ms": rng.choice((3_000, 30_000))},
            "producer": {
                "delivery_timeout_ms": rng.choice((1_500, 4_000, 20_000)),
                "batch_bytes": rng.choice((60, 200, 2_000)),
                "in_flight_batches": rng.choice((1, 4, 32)),
                "linger_ms": rng.choice((0, 0, 20)),
            },
            "consumer": {
                "auto_commit_ms": rng.choice((100, 500)),
                "fetch_bytes": rng.choice((200, 5_000)),
                "fetch_wait_ms": rng.choice((100, 500)),
                "assignor": rng.choice(("balanced", "sticky", "range", "roundrobin")),
                **sessions,
            },
        }
    )
