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

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast
from unittest.mock import patch

from rayqueue.cluster.commands import (
    AbortTransactions,
    AnyCommand,
    EndTransaction,
    EndWrite,
    FinishTransactions,
    InitTransactions,
    decode_command,
    encode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.net.route import CoordinatorRoute
from rayqueue.partition import Appended, Ended, Trimmed
from rayqueue.partition.commands import decode
from rayqueue.partition.tables import PARTITION
from rayqueue.partition.transactions.commands import EndTransaction as Marker
from rayqueue.partition.transactions.endings import transaction_of
from rayqueue.protocol.data import FetchAnswer
from rayqueue.protocol.transactions import ResolveTransactions, Transaction
from rayqueue.records import BATCH_TAG, BatchHeader, RecordBatch
from rayqueue.replica import carrying
from rayqueue.replica.carrying import Carrier
from tests.sim.app_world import BUSY, MIXED, AppWorld, PartitionChecker, _settings, drawn_apart
from tests.sim.apps import SimDirectory
from tests.sim.checker import LogChecker
from tests.sim.ensemble import Ensemble
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Weather
from tests.sim.node import EngineNode
from tests.sim.process import virtual_time
from tests.sim.served import CoordinatorNode, PartitionNode
from tests.sim.tx_apps import GROUP, Feeder, Operator, Processor, Reader, Trimmer, TxApp, grants
from tests.sim.tx_writes import PREFIX, Driver, Run, Task, Writes, told

SAFETY_S = 8.0
HEAL_S = 30.0
PARTITIONS = 3
APP_FAULTS = ("app_pause", "app_cut", "app_kill", "app_reset", "app_zombie", "take_over")
NODE_FAULTS = ("partition", "one_way", "pause", "kill", "kill_in_sync", "power_loss", "transfer")
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


class DecisionChecker(LogChecker):
    """Applies the coordinator's log, and knows what was decided."""

    def __init__(self, ended_in: Callable[[str, Key], bool | None], writes: Writes) -> None:
        """``ended_in`` tells how a transaction has ended in a partition."""
        super().__init__()
        self.ended_in = ended_in
        self.writes = writes
        self._store = MemoryStore(GroupId("coordinator"), ReplicaId("reference"), COORDINATOR)
        self.machine = ClusterMachine(self._store)
        self._applied = Index(0)
        self.decided: dict[Key, tuple[bool, tuple[str, ...]]] = {}
        self.given: dict[Key, str] = {}
        """Each pair to the id it was given to."""
        self.late = self.carried = 0

    def watch_commit(self, node: EngineNode) -> None:
        super().watch_commit(node)
        while (entry := self.committed.get(Index(self._applied + 1))) is not None:
            self._applied = entry.index
            self._store.append([entry])
            if entry.payload[0] >= 4:
                self._decided(decode_command(entry.payload), self.machine.apply(entry.index, entry.payload))

    def _decided(self, command: AnyCommand, answer: Any) -> None:
        if isinstance(command, AbortTransactions):
            self.late += sum(answer)
        elif isinstance(command, FinishTransactions) and command.group_id:
            self.carried += len(command.finished)
        told(self.writes, command, answer)
        if isinstance(command, EndWrite):
            known = self.machine.transactions
            is_open = {key for key in self.writes.open_keys() if known.current(key) is not None}
            if self.writes.ended(command, answer, is_open):
                for producer_id, epoch, participants in command.parts:
                    self._decide((producer_id, epoch), True, participants)
        if not isinstance(answer, Transaction) or not isinstance(command, InitTransactions | EndTransaction):
            return
        if isinstance(command, EndTransaction):
            self._decide((command.producer_id, command.epoch), command.commit, command.participants)
        pair = answer.producer_id, answer.epoch
        if self.given.setdefault(pair, command.transactional_id) != command.transactional_id:
            raise BrokenError(
                Invariant.ATOMIC, f"{pair} was given to {self.given[pair]} and {command.transactional_id}"
            )

    def _decide(self, key: Key, commit: bool, participants: tuple[str, ...]) -> None:
        decision = commit, participants
        if self.decided.setdefault(key, decision)[0] != commit:
            raise BrokenError(Invariant.ATOMIC, f"{key} was decided twice: {self.decided[key]}, then {decision}")
        for group_id in participants if commit else ():
            if self.ended_in(group_id, key) is False:
                raise BrokenError(Invariant.ATOMIC, f"{key} was committed, and aborted in {group_id} before")

    def is_committed(self, key: Key, group_id: str) -> bool:
        commit, participants = self.decided.get(key, (False, ()))
        return commit and group_id in participants


class TxChecker(PartitionChecker):
    """Of one partition: what is where, of which transaction, and how that has ended here."""

    def __init__(self, world: TxWorld, group: Ensemble[PartitionNode], number: int) -> None:
        super().__init__(world, group, number)
        self._tx_world = world
        self.group_id = group.group_id
        self.values: list[tuple[bytes | None, Key | None, int]] = []
        """By offset: value, transaction, lane."""
        self.ended: dict[Key, bool] = {}
        self.start = 0
        self.reads.on_applied = self._noted

    def _noted(self, entry: Entry, answer: Any) -> None:
        if entry.payload[0] == BATCH_TAG:
            if isinstance(answer, Appended) and not answer.duplicate:
                header = BatchHeader.parse(entry.payload)
                key = transaction_of(header)
                if key is not None and key in self.ended:
                    raise BrokenError(Invariant.ATOMIC, f"{key} goes on in {self.group_id} after it has ended there")
                values = RecordBatch.decode(entry.payload).values()
                self.values += [(value, key, header.lane) for value in values]
                for value in values:
                    self._tx_world.writes.in_log(value, key)
            return
        if isinstance(answer, Trimmed):
            self._trimmed(answer.start_offset)
        command = decode(entry.payload)
        if isinstance(command, Marker) and isinstance(answer, Ended) and answer.was_open:
            key = command.producer_id, command.epoch
            self.ended[key] = command.commit
            self._tx_world.ended(key, self.group_id, commit=command.commit)

    def _trimmed(self, start: int) -> None:
        for at in range(self.start, start):
            key = self.values[at][1]
            if self.fate(key) is None:
                raise BrokenError(Invariant.READABLE, f"offset {at} of {self.group_id} is trimmed, and {key} is open")
        self.start = max(self.start, start)

    def fate(self, key: Key | None) -> bool | None:
        return True if key is None else self.ended.get(key)


class TxWorld(AppWorld):
    """``faults`` narrows what may go wrong. ``together``: tasks write together. ``careless``: producers add to what is
    decided. ``operated``: somebody ends what is open. ``trimmed``: somebody deletes what is old. None lets the seed
    draw."""

    def __init__(
        self,
        seed: int,
        faults: frozenset[str] | None = None,
        *,
        together: bool | None = None,
        careless: bool | None = None,
        operated: bool | None = None,
        trimmed: bool | None = None,
    ) -> None:
        super().__init__(seed, faults=frozenset())
        self._mixed, self._busy = drawn_apart(MIXED, seed, faults), drawn_apart(BUSY, seed, faults)
        self.rng = Random(f"transactions {seed}")
        self._dice = Random(f"transaction dice {seed}")
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
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
        topic = self._create_topic()
        for each in topic.partitions:
            group: Ensemble[PartitionNode] = self._ensemble(each.group_id, PARTITION)
            group.partition_settings = group.partition_settings.__class__(lanes=self.lanes)
            group.checker = TxChecker(self, group, each.number)
            self.ensembles[each.number] = group
            group.start(PartitionNode, [replica.replica_id for replica in each.replicas])
            for node in group.nodes.values():
                self._settle(node, each.group_id)
        self.grant = grants(self.settings, topic.partitions[0].group_id)
        self._carry()

    def _settle(self, node: PartitionNode, group_id: str) -> None:
        """The settler beside a replica (``rayqueue.actors.settler``): slow, and with answers that may be old."""
        process = self.new_process(f"settler {group_id} {node.replica_id}")
        route = CoordinatorRoute(cast("Any", SimDirectory(self)), self.settings)
        rng = Random(self.rng.random())

        async def look(find: Any) -> Any:
            looked: asyncio.Future[Any] = process.create_future()
            node.call(lambda: _tell(looked, find()))
            return await asyncio.wait_for(looked, 5.0)

        async def main() -> None:
            while True:
                await asyncio.sleep(self.settings.cluster.resolve_after_ms / 2000)
                if not node.alive:
                    continue
                try:
                    asked = await look(lambda: node.service.settling.questions())  # type: ignore[attr-defined]
                    if asked:
                        fates = await route.call(ResolveTransactions(group_id=group_id, transactions=asked))
                        await asyncio.sleep(rng.choice((0, 0, 0.5)))
                        node.call(
                            partial(lambda *told: node.service.settling.answered(*told), asked, fates)  # type: ignore[attr-defined]
                        )
                except (RayQueueError, asyncio.TimeoutError):
                    continue

        process.start(main())
        self.settlers.append(process)

    def _carry(self) -> None:
        """The carrier, beside whoever leads the coordinator's group."""
        process = self.new_process("carrier")

        async def asked(ask: Any) -> Any:
            leader = self.coordinators.leader()
            if leader is None:
                raise RayQueueError("nobody leads")
            looked: asyncio.Future[Any] = process.create_future()
            leader.call(lambda: ask(leader, partial(_tell, looked)))
            answer = await asyncio.wait_for(looked, 5.0)
            if isinstance(answer, RayQueueError):
                raise answer
            return answer

        async def change(command: AnyCommand) -> object:
            return await asked(partial(_propose, encode_command(command)))

        carrier = Carrier(change, cast("Any", SimDirectory(self)), self.settings)

        async def main() -> None:
            while True:
                await asyncio.sleep(0.3)
                try:
                    view = await asked(lambda leader, tell: tell(_View(leader)))
                    await carrier.carry(carrier.due(view), view)
                except (RayQueueError, asyncio.TimeoutError):
                    continue

        process.start(main())
        self.settlers.append(process)

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

    def _feed_some(self) -> None:
        alive = [feeder for feeder in self.feeders if not feeder.process.killed]
        if alive:
            self.rng.choice(alive).wanted += self.rng.randint(1, 4)

    # -- what goes wrong ---------------------------------------------------------------------

    def _one_fault(self) -> None:
        kinds = [fault for fault in (*NODE_FAULTS, *APP_FAULTS) if fault in self.faults]
        if not kinds:
            return
        self._feed_some()
        kind = self.rng.choice(kinds)
        if kind in APP_FAULTS:
            self._app_fault(kind)
        else:
            self._node_fault(kind, self.rng.choice(list(self._group_ids.values())))

    def _app_fault(self, kind: str) -> None:
        rng = self.rng
        used = (*self.feeders, *self.processors, *self.drivers, *self.tasks[-4:])
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

    def _again(self, app: TxApp) -> None:
        if isinstance(app, Processor):
            self._new_processor(app.transactional_id)
        elif isinstance(app, Driver):
            self._new_driver()
        elif isinstance(app, Task):
            self.start_task(app.run_of, app.number)
        else:
            self._new_feeder()

    # -- the schedule -----------------------------------------------------------------------------

    def run(self) -> TxOutcome:  # type: ignore[override]
        with virtual_time(self.clock, self._dice) as alarms, patch.object(carrying, "AFTER_MS", 800):
            try:
                return self._run_all(alarms)
            finally:
                for app in (*self.feeders, *self.processors, *self.others, *self.drivers, *self.tasks):
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
        for app in (*self.feeders, *self.processors, *self.drivers, *self.tasks):
            app.process.cut = False
        self._new_feeder()
        if self.together:
            for driver in self.drivers:  # each gives up what the others try: without this, for as long as they live
                driver.process.kill()
            self._write_more()
            self._new_driver()
        self._new_processor("last")
        self.processors[-1].persists = True
        self._feed_some()
        if not self.clock.run_until(self.clock.now + HEAL_S, self._settled, max_events=900_000):
            raise BrokenError(Invariant.PROGRESS, f"no progress after healing: {self._describe_tx()}")

    def _settled(self) -> bool:
        return (
            all(feeder.idle for feeder in self.feeders)
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

    def _results(self) -> list[bytes]:
        found: list[bytes] = []
        for number in range(1, PARTITIONS):
            checker = self.checker(number)
            committed = [value for value, key, _ in checker.values if value is not None and checker.fate(key)]
            found += [value[4:] for value in committed if not value.startswith(PREFIX)]
        return found

    def _rows(self) -> list[bytes]:
        """What tasks have written, and counts."""
        found: list[bytes] = []
        for number in range(1, PARTITIONS):
            checker = self.checker(number)
            committed = [value for value, key, _ in checker.values if value is not None and checker.fate(key)]
            found += [value for value in committed if value.startswith(PREFIX)]
        return found

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
        wrong = [value for value, there in self._promised.items() if there != (value in inputs)]
        if wrong:
            raise BrokenError(Invariant.TRUE_FATE, f"a feeder was told otherwise: {wrong[:5]}")
        self.writes.check(self._rows())
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
            f"feeders={[each.idle for each in self.feeders]}\n  {groups}"
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
        )


def _propose(payload: bytes, leader: CoordinatorNode, tell: Callable[[Any], None]) -> None:
    try:
        leader.propose(payload, tell)
    except RayQueueError as error:
        tell(error)


def _tell(looked: asyncio.Future[Any], answer: Any) -> None:
    if not looked.done():
        looked.set_result(answer)


class _View:
    """What the carrier looks at of ``ClusterView``."""

    def __init__(self, leader: CoordinatorNode) -> None:
        self.commits = dict(leader.machine.transactions.commits)
        self.topics = dict(leader.machine.topics)
