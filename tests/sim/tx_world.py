"""One schedule of transactions: real services, real logs, and producers that follow the protocol, from one seed.

A coordinator and three partitions, each a Raft group. A feeder writes input to
the first, in transactions or not; processors, one after the other in turn, read
it, write results to the others and stage their position, all in one transaction.
Beside each replica runs its settler, beside the coordinator the carrier. In the
safety phase leaders change, processes die, pause and go on, and lose their
connections; then everything heals, and every input must get its result.

All the while every committed entry of every group is applied to a machine beside,
and what producers and readers are told is compared with it: what the coordinator
has decided is what each partition does; no reader sees what is open, aborted, or
misses something; each input has one result.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any, cast
from unittest.mock import patch

from rayqueue.cluster import coordinator
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.partition import PartitionSettings
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.data import FetchAnswer
from rayqueue.protocol.topics import TopicSettings
from rayqueue.protocol.transactions import Transaction
from rayqueue.records import RecordBatch
from rayqueue.replica import carrying
from tests.sim.app_world import BUSY, MIXED, AppWorld, _settings, drawn_apart
from tests.sim.apps import TOPIC
from tests.sim.ensemble import Ensemble
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Weather
from tests.sim.process import virtual_time
from tests.sim.served import CoordinatorNode, PartitionNode
from tests.sim.tx_apps import GROUP, RESULT, Feeder, Operator, Processor, Reader, Trimmer, TxApp, grants
from tests.sim.tx_beside import carry, settle
from tests.sim.tx_checkers import DecisionChecker, TxChecker
from tests.sim.tx_clients import MADE, MADE_TOPIC, ClientBook, ClientFeeder, ClientLoop
from tests.sim.tx_jobs import DONE, LEASE_MS, QUEUE, JobNode, JobsChecker, Putter, Worker
from tests.sim.tx_writes import PREFIX, Driver, Run, Task, Writes

SAFETY_S = 8.0
HEAL_S = 30.0
PARTITIONS = 3
APP_FAULTS = ("app_pause", "app_cut", "app_kill", "app_reset", "app_zombie", "take_over")
NODE_FAULTS = ("partition", "one_way", "pause", "kill", "kill_in_sync", "power_loss", "transfer")
OWN_FAULTS = ("deposed",)
FAULTS = ("drop", "duplicate", "slow", "reorder", "app_slow", *NODE_FAULTS, *APP_FAULTS)

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TxOutcome:
    seed: int
    acked: int
    """Results of committed transactions."""
    entries: int
    snapshots: int
    committed: int
    aborted: int
    late: int
    """Transactions that were aborted by somebody else than their producer."""
    carried: int
    """Markers that the coordinator has seen to."""
    written: int
    """Batches of tasks that have written together."""
    jobs: int
    """Done in transactions."""
    jobs_again: int
    """Given out again after a transaction that was aborted."""
    made: int
    """By whole clients."""


class TxWorld(AppWorld):
    """``faults`` narrows what may go wrong. ``together``: tasks write together. ``careless``: producers add to what is
    decided. ``operated``: somebody ends what is open. ``trimmed``: somebody deletes what is old. None lets the seed
    draw. ``queued``: there is a work queue, too, whose jobs are put and done in transactions. ``fresh``: producers
    begin with ids that nobody knows. ``expiring``: ids are forgotten soon. ``real``: whole clients are there, too."""

    def __init__(
        self,
        seed: int,
        faults: frozenset[str] | None = None,
        *,
        together: bool | None = None,
        careless: bool | None = None,
        operated: bool | None = None,
        trimmed: bool | None = None,
        queued: bool | None = None,
        fresh: bool | None = None,
        expiring: bool | None = None,
        real: bool | None = None,
    ) -> None:
        super().__init__(seed, faults=frozenset())
        self._mixed, self._busy = drawn_apart(MIXED, seed, faults), drawn_apart(BUSY, seed, faults)
        self.rng = Random(f"transactions {seed}")
        self._dice = Random(f"transaction dice {seed}")
        self._jobs_rng = Random(f"transactions' jobs {seed}")  # what others do does not depend on it
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
        drawn |= {fault for fault in OWN_FAULTS if self._jobs_rng.random() < 0.2}
        self.faults = drawn if faults is None else set(faults)
        self.size = self.rng.choice((1, 3, 3))
        self.lanes = self.rng.choice((1, 1, 2))
        self.partitions = PARTITIONS
        base = _settings(self.rng)
        cluster = base.cluster.model_copy(update={"resolve_after_ms": self.rng.choice((100, 400))})
        self.settings = base.model_copy(update={"cluster": cluster})
        self.diligence = self.rng.choice((0.3, 0.8, 0.95))
        self.healing = False
        self.feeders: list[Feeder] = []
        self.processors: list[Processor] = []
        self.others: list[TxApp] = []
        self.drivers: list[Driver] = []
        self.tasks: list[Task] = []
        self._writes_rng = Random(f"writes {seed}")  # what others do does not depend on it
        self.together, self.careless, self.operated, self.trimmed = (
            drawn if given is None else given
            for given, drawn in (
                (together, self._writes_rng.random() < 0.5),
                (careless, self._writes_rng.random() < 0.3),
                (operated, self._writes_rng.random() < 0.3),
                (trimmed, self._writes_rng.random() < 0.3),
            )
        )
        self.queued, self.fresh, self.expiring, self.real = (
            drawn if given is None else given
            for given, drawn in (
                (queued, self._jobs_rng.random() < 0.3),
                (fresh, self._jobs_rng.random() < 0.2),
                (expiring, self._jobs_rng.random() < 0.2),
                (real, self._jobs_rng.random() < 0.1),
            )
        )
        if self.real:
            self.trimmed = False  # what is trimmed before it was read has no other one made of it
            consumer = base.consumer.model_copy(update={"session_timeout_ms": 1_500, "heartbeat_ms": 300})
            base = base.model_copy(update={"consumer": consumer})
            self.settings = base.model_copy(update={"cluster": cluster})
        self.clients = ClientBook(self)
        self.real_clients: list[ClientLoop | ClientFeeder] = []
        if self.expiring:
            cluster = cluster.model_copy(update={"transactional_id_retention_ms": 500})
            self.settings = base.model_copy(update={"cluster": cluster})
        self.putters: list[Putter] = []
        self.workers: list[Worker] = []
        self.writes = Writes()
        self.settlers: list[Any] = []
        self._told: dict[Key, tuple[str, bool]] = {}
        self._promised: dict[bytes, bool] = {}
        self._numbers = 0

    # -- for applications ------------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def checker(self, number: int) -> TxChecker:
        return cast("TxChecker", self.ensembles[number].checker)

    @property
    def jobs(self) -> JobsChecker | None:
        return cast("JobsChecker", self.ensembles[QUEUE].checker) if self.queued else None

    @property
    def decisions(self) -> DecisionChecker:
        return cast("DecisionChecker", self.coordinators.checker)

    def told(self, who: str, at: Transaction, *, committed: bool) -> None:
        """What a producer is told is the fate, and stays it."""
        key = at.producer_id, at.epoch
        decided = self.decisions.decided.get(key, (False, ()))[0]
        if decided != committed:
            raise BrokenError(Invariant.TRUE_FATE, f"{who} was told that {key} is committed: {committed}")
        before = self._told.setdefault(key, (who, committed))
        if before[1] != committed:
            raise BrokenError(Invariant.TRUE_FATE, f"{before[0]} and {who} were told different fates of {key}")

    def promised(self, values: list[bytes], *, there: bool) -> None:
        """A feeder was told that its input is there, or that it never will be."""
        self._promised |= dict.fromkeys(values, there)

    def ended(self, key: Key, group_id: str, *, commit: bool) -> None:
        if commit != self.decisions.is_committed(key, group_id):
            raise BrokenError(Invariant.ATOMIC, f"{key} ended in {group_id} committed={commit}, not as was decided")

    def _ended_in(self, group_id: str, key: Key) -> bool | None:
        for number, group in self.ensembles.items():
            if group.group_id == group_id:
                return self.checker(number).ended.get(key)
        return None

    def read(self, number: int, cursors: dict[int, int], answer: FetchAnswer) -> None:
        """What a reader got is what is next for it."""
        checker = self.checker(number)
        for each in answer.batches:
            values, offset = RecordBatch.decode(each.payload).values(), each.base_offset
            lane = checker.values[offset][2]
            for at, value in enumerate(values, offset):
                if at < cursors[lane]:
                    continue
                self._check_passed(number, lane, cursors[lane], at)
                known, key, _ = checker.values[at]
                if checker.fate(key) is not True or known != value:
                    raise BrokenError(
                        Invariant.COMMITTED_READS, f"offset {at} of {number} was read: {value!r} of {key}, {known!r}"
                    )
                cursors[lane] = at + 1
        for lane, offset in answer.cursors:
            if offset > cursors[lane]:
                self._check_passed(number, lane, cursors[lane], offset)
                cursors[lane] = offset

    def end_of(self, number: int) -> int:
        return len(self.checker(number).values)

    def behind_trims(self, number: int, cursors: dict[int, int]) -> dict[int, int]:
        """Where a reader goes on."""
        return {lane: max(offset, self.checker(number).start) for lane, offset in cursors.items()}

    def _check_passed(self, number: int, lane: int, begin: int, end: int) -> None:
        checker = self.checker(number)
        for at in range(max(begin, checker.start), min(end, len(checker.values))):
            _, key, its_lane = checker.values[at]
            if its_lane == lane and checker.fate(key) is not False:
                raise BrokenError(Invariant.COMMITTED_READS, f"offset {at} of {number} was passed over: {key}")

    # -- how it begins -----------------------------------------------------------------------

    def _build(self) -> None:
        self.coordinators = self._ensemble("coordinator", COORDINATOR)
        self.coordinators.checker = DecisionChecker(self._ended_in, self.writes)
        self.coordinators.start(CoordinatorNode, [f"c{number}" for number in range(self.size)])
        settings = TopicSettings(partitions=self.partitions, replication=self.size, lanes=self.lanes)
        topic = self._create_topic(TOPIC, settings)
        for each in topic.partitions:
            group: Ensemble[PartitionNode] = self._ensemble(each.group_id, PARTITION)
            group.partition_settings = group.partition_settings.__class__(lanes=self.lanes)
            group.checker = TxChecker(self, group, each.number)
            self.ensembles[each.number] = group
            group.start(PartitionNode, [replica.replica_id for replica in each.replicas])
            for node in group.nodes.values():
                settle(self, node, each.group_id)
        if self.queued:
            self._build_queue()
        if self.real:
            self._build_made()
        self.grant = grants(self.settings, topic.partitions[0].group_id)
        carry(self)

    def _build_made(self) -> None:
        settings = TopicSettings(partitions=1, replication=self.size)
        (each,) = self._create_topic(MADE_TOPIC, settings).partitions
        group: Ensemble[PartitionNode] = self._ensemble(each.group_id, PARTITION)
        group.checker = TxChecker(self, group, MADE)
        self.ensembles[MADE] = group
        group.start(PartitionNode, [replica.replica_id for replica in each.replicas])
        for node in group.nodes.values():
            settle(self, node, each.group_id)

    def _build_queue(self) -> None:
        settings = TopicSettings(
            partitions=1,
            replication=self.size,
            lanes=self.lanes,
            queue=True,
            lease_ms=LEASE_MS,
            max_lease_ms=LEASE_MS,
            max_deliveries=self._jobs_rng.choice((None, None, 3)),
            retry_backoff_ms=self._jobs_rng.choice((0, 200)),
            retry_backoff_max_ms=500,
            ordered_by_key=self._jobs_rng.random() < 0.3,
        )
        (each,) = self._create_topic("jobs", settings).partitions
        group: Ensemble[JobNode] = self._ensemble(each.group_id, PARTITION)
        group.partition_settings = PartitionSettings.of(settings, 0)
        group.checker = JobsChecker(self, group, QUEUE)
        self.ensembles[QUEUE] = group  # type: ignore[assignment]  # a kind of it
        group.start(JobNode, [replica.replica_id for replica in each.replicas])
        for node in group.nodes.values():
            settle(self, node, each.group_id)

    # -- who uses it ----------------------------------------------------------------------------

    def _new_feeder(self) -> None:
        self.feeders.append(Feeder(self, self._name("feeder"), Random(self.rng.random())))

    def _new_processor(self, transactional_id: str | None = None) -> None:
        chosen = self.rng.choice(("t1", "t2")) if transactional_id is None else transactional_id
        self.processors.append(Processor(self, self._name("processor"), Random(self.rng.random()), chosen))

    def _new_driver(self) -> None:
        self.drivers.append(Driver(self, self._name("driver"), Random(self._writes_rng.random())))

    def start_task(self, run: Run, number: int) -> None:
        self.tasks.append(Task(self, self._name("task"), Random(self._writes_rng.random()), run, number))

    def _write_more(self) -> None:
        self.writes.wanted += 1

    def _new_putter(self) -> None:
        self.putters.append(Putter(self, self._name("putter"), Random(self._jobs_rng.random())))

    def _new_worker(self, transactional_id: str | None = None) -> None:
        chosen = self._name("work") if transactional_id is None else transactional_id
        self.workers.append(Worker(self, self._name("worker"), Random(self._jobs_rng.random()), chosen))

    def _new_client(self, kind: type[ClientLoop | ClientFeeder], transactional_id: str | None = None) -> None:
        name = self._name("client")
        self.real_clients.append(kind(self, name, Random(self._jobs_rng.random()), transactional_id or name))

    def _put_some(self) -> None:
        alive = [putter for putter in self.putters if not putter.process.killed]
        if alive:
            self._jobs_rng.choice(alive).wanted += self._jobs_rng.randint(1, 4)

    def _feed_some(self) -> None:
        alive = [feeder for feeder in self.feeders if not feeder.process.killed]
        if alive:
            self.rng.choice(alive).wanted += self.rng.randint(1, 4)

    # -- what goes wrong ---------------------------------------------------------------------

    def _one_fault(self) -> None:
        kinds = [fault for fault in (*NODE_FAULTS, *APP_FAULTS, *OWN_FAULTS) if fault in self.faults]
        if not kinds:
            return
        self._feed_some()
        self._put_some()
        kind = self.rng.choice(kinds)
        if kind in APP_FAULTS:
            self._app_fault(kind)
        elif kind == "deposed":
            self._depose()
        else:
            self._node_fault(kind, self.rng.choice(list(self._group_ids.values())))

    def _depose(self) -> None:
        """The coordinator's leader is cut off, and those who come then find another one before it knows."""
        group, rng = self.coordinators, self._jobs_rng
        leader = group.leader()
        if leader is None:
            return
        who = leader.replica_id
        group.network.cut({(a, b) for a, b in product(group.nodes, group.nodes) if (a == who) != (b == who)})
        self.clock.after(2.5, lambda: group.network.cut(set()))
        for _ in range(3):
            self.clock.after(rng.uniform(0.7, 1.3), self._new_processor)
            self.clock.after(rng.uniform(0.7, 1.3), self._feed_some)

    def _app_fault(self, kind: str) -> None:
        rng = self.rng
        used = (
            *self.feeders,
            *self.processors,
            *self.drivers,
            *self.tasks[-4:],
            *self.putters,
            *self.workers,
            *self.real_clients,
        )
        apps = [app for app in used if not app.process.killed]
        if not apps:
            return
        app = rng.choice(apps)
        match kind:
            case "app_pause":
                app.process.pause(rng.uniform(0.05, 4))
            case "app_cut":
                app.process.cut = True
                self.clock.after(rng.uniform(0.1, 4), lambda: setattr(app.process, "cut", False))
            case "app_reset":
                self.internet.reset(app.process)
            case "app_kill":
                app.process.kill()
                self.clock.after(rng.uniform(0.01, 1), partial(self._again, app))
            case "app_zombie":  # it is taken for dead, and goes on later
                app.process.pause(rng.uniform(0.5, 4))
                self._again(app)
            case "take_over" if isinstance(app, Processor):
                app.wants = True

    def _again(self, app: TxApp | ClientLoop | ClientFeeder) -> None:
        if isinstance(app, Processor):
            self._new_processor(app.transactional_id)
        elif isinstance(app, Driver):
            self._new_driver()
        elif isinstance(app, Task):
            self.start_task(app.run_of, app.number)
        elif isinstance(app, Worker):
            self._new_worker(app.transactional_id)
        elif isinstance(app, Putter):
            self._new_putter()
        elif isinstance(app, ClientLoop | ClientFeeder):
            self._new_client(type(app), app.transactional_id)
        else:
            self._new_feeder()

    def _apps(self) -> tuple[TxApp | ClientLoop | ClientFeeder, ...]:
        protocol = (*self.feeders, *self.processors, *self.drivers, *self.tasks, *self.putters, *self.workers)
        return (*protocol, *self.real_clients)

    # -- the schedule -----------------------------------------------------------------------------

    def run(self) -> TxOutcome:  # type: ignore[override]
        every_s = 0.3 if self.expiring else coordinator.EXPIRE_EVERY_S
        with (
            virtual_time(self.clock, self._dice) as alarms,
            patch.object(carrying, "AFTER_MS", 800),
            patch.object(coordinator, "EXPIRE_EVERY_S", every_s),
            patch.object(os, "getpid", lambda: 1),
            patch.object(socket, "gethostname", lambda: "host"),
        ):
            try:
                return self._run_all(alarms)
            finally:
                for app in (*self._apps(), *self.others):
                    app.process.kill()
                for process in self.settlers:
                    process.kill()

    def _run_all(self, alarms: list[str]) -> TxOutcome:
        self._build()
        rng, begin = self.rng, self.clock.now
        end = begin + SAFETY_S
        self._new_feeder()
        for number in range(PARTITIONS):
            self.others.append(Reader(self, f"reader{number}", Random(rng.random()), number))
        for _ in range(rng.choice((1, 2, 3))):
            self.clock.at(rng.uniform(begin, begin + 2), self._new_processor)
        for _ in range(rng.randint(8, 20)):
            self.clock.at(rng.uniform(begin, end), self._feed_some)
        if self.operated:
            self.others.append(Operator(self, "operator", Random(self._writes_rng.random())))
        if self.trimmed:
            self.others.append(Trimmer(self, "trimmer", Random(self._writes_rng.random())))
        if self.together:
            for _ in range(self._writes_rng.choice((1, 2, 2))):  # one may be started though another one lives
                self.clock.at(self._writes_rng.uniform(begin, begin + 3), self._new_driver)
            for _ in range(self._writes_rng.randint(3, 8)):
                self.clock.at(self._writes_rng.uniform(begin, end), self._write_more)
        if self.queued:
            self._new_putter()
            for _ in range(self._jobs_rng.choice((1, 2, 3))):
                self.clock.at(self._jobs_rng.uniform(begin, begin + 2), self._new_worker)
            for _ in range(self._jobs_rng.randint(6, 14)):
                self.clock.at(self._jobs_rng.uniform(begin, end), self._put_some)
        if self.real:
            for kind in (ClientLoop, ClientLoop, ClientFeeder):
                self.clock.at(self._jobs_rng.uniform(begin, begin + 2), partial(self._new_client, kind))
        for _ in range(rng.randint(4, 16)):
            self.clock.at(rng.uniform(begin + 0.5, end), self._one_fault)
        for _ in range(4):
            self.clock.at(rng.uniform(begin, end), self._weather)
        self.clock.run_until(end)
        self._heal()
        for group in self.ensembles.values():
            checker = cast("TxChecker", group.checker)
            checker.finally_agree(list(group.nodes.values()))  # type: ignore[arg-type]
        self._check_end()
        if alarms:
            raise BrokenError(Invariant.SOUND_CLIENT, "; ".join(alarms))
        return self._tx_outcome()

    def _heal(self) -> None:
        self.faults = set()
        self.diligence = 1.0
        self.healing = True
        self.internet.slow_s = 0.0
        for group in self._group_ids.values():
            group.network.weather = Weather()
            group.network.cut(set())
        self.clock.run_until(self.clock.now + 5)
        for group in self._group_ids.values():
            group.heal()
        for app in self._apps():
            app.process.cut = False
        self._new_feeder()
        if self.together:
            for driver in self.drivers:  # each gives up what the others try: without this, for as long as they live
                driver.process.kill()
            self._write_more()
            self._new_driver()
        if self.queued:
            self._new_putter()
            self._new_worker()
            self._put_some()
        if self.real:
            self._new_client(ClientLoop)
        self._new_processor("last")
        self.processors[-1].persists = True
        self._feed_some()
        if not self.clock.run_until(self.clock.now + HEAL_S, self._settled, max_events=900_000):
            if self.jobs is not None:
                self.jobs.book.check_stuck(self.jobs.dead())
            if self.real:
                self.clients.check()
            raise BrokenError(Invariant.PROGRESS, f"no progress after healing: {self._describe_tx()}")

    def _settled(self) -> bool:
        return (
            all(each.idle for each in (*self.feeders, *self.putters))
            and not (self.real and self.clients.left())
            and (self.jobs is None or not self.jobs.book.left(self.jobs.dead()))
            and all(group.settled for group in self._group_ids.values())
            and not any(len(self.checker(number).reads.machine.transactions) for number in self.ensembles)
            and not self.decisions.machine.transactions.commits
            and not self._unprocessed()
            and self.writes.settled
            and all(self._at_end(reader) for reader in self.others if isinstance(reader, Reader))
        )

    def _at_end(self, reader: Reader) -> bool:
        values = self.checker(reader.number).values
        ends = {lane: at + 1 for at, (_, _, lane) in enumerate(values)}
        return all(reader.cursors[lane] >= end for lane, end in ends.items())

    def _inputs(self) -> list[bytes]:
        checker = self.checker(0)
        return [value for value, key, _ in checker.values if value is not None and checker.fate(key)]

    def _written(self, prefix: bytes) -> list[bytes]:
        """What begins so in the output, and counts."""
        found: list[bytes] = []
        for number in range(1, PARTITIONS):
            checker = self.checker(number)
            found += [value for value, key, _ in checker.values if value is not None and checker.fate(key)]
        return [value for value in found if value.startswith(prefix)]

    def _results(self) -> list[bytes]:
        return [value.removeprefix(RESULT) for value in self._written(RESULT)]

    def _unprocessed(self) -> set[bytes]:
        return set(self._inputs()) - set(self._results())

    def _check_end(self) -> None:
        decisions = self.decisions
        for number, group in self.ensembles.items():
            checker = self.checker(number)
            for key, commit in checker.ended.items():
                if commit != decisions.is_committed(key, group.group_id):
                    raise BrokenError(Invariant.ATOMIC, f"{key} ended in {number} committed={commit}, not as decided")
        for key, (who, committed) in self._told.items():
            if decisions.decided.get(key, (False, ()))[0] != committed:
                raise BrokenError(Invariant.TRUE_FATE, f"{who} was told of {key} that it is committed: {committed}")
        inputs = set(self._inputs())
        there = inputs if self.jobs is None else inputs | self.jobs.book.values()
        wrong = [value for value, promised in self._promised.items() if promised != (value in there)]
        if wrong:
            raise BrokenError(Invariant.TRUE_FATE, f"a feeder was told otherwise: {wrong[:5]}")
        if self.jobs is not None:
            self.jobs.check_end([value.removeprefix(DONE) for value in self._written(DONE)])
        if self.real:
            self.clients.check()
        self.writes.check(self._written(PREFIX))
        results = self._results()
        twice = {each for each in results if results.count(each) > 1}
        if twice:
            raise BrokenError(Invariant.EXACTLY_ONCE, f"these have two results: {sorted(twice)[:5]}")
        if set(results) != inputs:
            raise BrokenError(Invariant.EXACTLY_ONCE, "there are results of what is no input, or inputs without one")
        position = self.checker(0).reads.machine.position(GROUP)
        last = max(
            [at for at, (_, key, _) in enumerate(self.checker(0).values) if self.checker(0).fate(key)], default=-1
        )
        if last >= 0 and (position is None or position.offsets.get(0, 0) <= last):
            raise BrokenError(Invariant.EXACTLY_ONCE, f"all inputs have results, and the position is {position}")

    def _describe_tx(self) -> str:
        open_here = {
            number: [each.key for each in self.checker(number).reads.machine.transactions] for number in self.ensembles
        }
        readers = {reader.number: reader.cursors for reader in self.others if isinstance(reader, Reader)}
        groups = "\n  ".join(group.describe() for group in self._group_ids.values())
        commits = list(self.decisions.machine.transactions.commits)
        ends = {number: len(self.checker(number).values) for number in self.ensembles}
        return (
            f"open={open_here} commits={commits} unprocessed={len(self._unprocessed())} "
            f"written={self.writes.next_batch} of {self.writes.wanted} readers={readers} of {ends} "
            f"feeders={[each.idle for each in (*self.feeders, *self.putters)]} "
            f"unmade={sorted(self.clients.left())[:5] if self.real else None} "
            f"jobs={None if self.jobs is None else sorted(self.jobs.book.left(self.jobs.dead()))}\n  {groups}"
        )

    def _tx_outcome(self) -> TxOutcome:
        ended = [commit for number in self.ensembles for commit in self.checker(number).ended.values()]
        return TxOutcome(
            self.seed,
            len(self._results()),
            sum(group.checker.last_committed for group in self.ensembles.values()),
            sum(group.snapshots for group in self._group_ids.values()),
            sum(ended),
            len(ended) - sum(ended),
            self.decisions.late,
            self.decisions.carried,
            self.writes.written,
            0 if self.jobs is None else sum(key is not None for key in self.jobs.book.done.values()),
            0 if self.jobs is None else self.jobs.book.again,
            len(self.clients.made()) if self.real else 0,
        )
