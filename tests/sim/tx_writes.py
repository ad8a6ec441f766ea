"""Tasks that write together, and the drivers that end their writes: the transactions' world of ADR 40.

A driver writes batch after batch: it starts tasks, some of them twice, takes the
first report of each, and ends the write. It may pause, die, or be taken for dead;
then another one begins where the last answer was, and both may go on. Tasks may
pause anywhere, also until their write is over. ``Writes`` knows what was meant to
be written, and compares.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from rayqueue.cluster.commands import AbortTransactions, AnyCommand, EndWrite, JoinWrite
from rayqueue.errors import ProducerError, TransactionAbortedError, TransactionError
from rayqueue.protocol import transactions as protocol
from rayqueue.protocol.transactions import FinishTransactions, MarkTransaction, Transaction, WriteEnded, WritePart
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.tx_apps import TIMEOUT_MS, TxApp, TxProducer

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld

Key = tuple[int, int]

WRITER = "w"
PREFIX = b"row "
_PATIENCE_S = 4.0
"""Of a driver, with tasks that do not report."""


class Report(NamedTuple):
    """What a task tells its driver."""

    pair: Transaction | None
    """None: the batch was written before, so it has written nothing."""
    numbers: tuple[int, ...]
    """Of the partitions that it has touched."""
    values: tuple[bytes, ...]


class Run:
    """One driver's try at one batch."""

    def __init__(self, batch: int, number: int, tasks: int) -> None:
        self.batch = batch
        self.number = number
        self.tasks = tasks
        self.reports: dict[int, Report] = {}

    @property
    def write(self) -> str:
        return f"{WRITER}/{self.batch}"

    @property
    def complete(self) -> bool:
        return len(self.reports) == self.tasks


class Writes:
    """What happens to writes, told by the coordinator's log, by partitions, and by drivers."""

    def __init__(self) -> None:
        self.next_batch = 0
        """The checkpoint: all before it are written, as a driver was told."""
        self.wanted = 0
        self.runs: dict[int, Run] = {}
        self.written = 0
        self._named: dict[int, set[bytes]] = {}  # by run
        self._open: dict[str, set[Key]] = {}  # by write: pairs that tasks were given
        self._given: set[Key] = set()
        self._over: set[Key] = set()  # aborted by whomever
        self._ended: set[int] = set()  # batches
        self._late: list[str] = []
        self._whose: dict[Key, bytes] = {}  # the attempt whose rows a pair has

    @property
    def settled(self) -> bool:
        return self.next_batch >= self.wanted

    def name(self, run: Run, values: set[bytes]) -> None:
        """A driver is about to end the write with these rows."""
        self._named[run.number] = values

    def done(self, batch: int) -> None:
        """A driver was told that this batch is written."""
        if batch not in self._ended:
            raise BrokenError(Invariant.TRUE_FATE, f"a driver was told that batch {batch} is written")
        self.next_batch = max(self.next_batch, batch + 1)

    # -- the coordinator's log -----------------------------------------------------------------

    def joined(self, command: JoinWrite, answer: object) -> None:
        if not isinstance(answer, Transaction):
            return
        key = answer.producer_id, answer.epoch
        if command.batch_id in self._ended:
            self._late.append(f"a task was given {key} after {command.write} was written")
        if key in self._given:
            raise BrokenError(Invariant.ONE_TASK, f"{key} was given to two tasks")
        self._given.add(key)
        self._open.setdefault(command.write, set()).add(key)

    def aborted(self, command: AbortTransactions, answer: tuple[bool, ...]) -> None:
        self._over |= {key for key, was_open in zip(command.transactions, answer, strict=True) if was_open}

    def ended(self, command: EndWrite, answer: object, is_open: set[Key]) -> bool:
        """Whether its parts are committed. ``is_open``: those of the pairs that tasks were given."""
        left = self._open.pop(command.write, set())
        if left & is_open:
            raise BrokenError(Invariant.DROPPED, f"{left & is_open} are open after the end of {command.write}")
        written = isinstance(answer, tuple) and answer[0]
        parts = {(producer_id, epoch) for producer_id, epoch, _ in command.parts}
        if written:
            if parts & self._over:
                raise BrokenError(Invariant.WRITE_WHOLE, f"{parts & self._over} were over before {command.write}")
            if command.batch_id in self._ended:
                raise BrokenError(Invariant.WRITTEN_ONCE, f"{command.write} is written twice")
            self._ended.add(command.batch_id)
            self.written += 1
        self._over |= left - parts if written else left
        return bool(written)

    def open_keys(self) -> set[Key]:
        return set().union(*self._open.values())

    # -- partitions --------------------------------------------------------------------------------

    def in_log(self, value: bytes | None, key: Key | None) -> None:
        if key is None or value is None or not value.startswith(PREFIX):
            return
        attempt = value.split()[4]
        if self._whose.setdefault(key, attempt) != attempt:
            raise BrokenError(Invariant.ONE_TASK, f"{key} has rows of {self._whose[key]!r}, and {value!r}")

    def check(self, committed: list[bytes]) -> None:
        """What readers of committed records have been given, at the end."""
        if self._late:  # told last: what comes of it tells more
            raise BrokenError(Invariant.DROPPED, self._late[0])
        found: dict[int, dict[int, list[bytes]]] = {}
        for value in committed:
            number, of_run = map(int, value.split()[1:3])
            found.setdefault(number, {}).setdefault(of_run, []).append(value)
        for batch, runs in found.items():
            if len(runs) > 1:
                raise BrokenError(Invariant.WRITTEN_ONCE, f"batch {batch} was written by the runs {sorted(runs)}")
            for run, values in runs.items():
                if len(set(values)) != len(values):
                    raise BrokenError(Invariant.WRITTEN_ONCE, f"rows of batch {batch} are there twice")
                named = self._named.get(run, set())
                if set(values) - named:
                    raise BrokenError(Invariant.DROPPED, f"batch {batch} has rows that nobody named: {values[:5]}")
                if named - set(values):
                    raise BrokenError(Invariant.WRITE_WHOLE, f"batch {batch} lacks rows: {sorted(named)[:5]}")
        missing = self._ended - found.keys()
        if missing:
            raise BrokenError(Invariant.WRITE_WHOLE, f"nothing is there of the batches {sorted(missing)}")


class Task(TxProducer):
    """One attempt of one task."""

    transactional_id = ""

    def __init__(self, world: TxWorld, name: str, rng: Random, run: Run, number: int) -> None:
        self.run_of = run
        self.number = number
        super().__init__(world, name, rng)

    async def _main(self) -> None:
        run, rng = self.run_of, self.rng
        call = protocol.JoinWrite(
            write=run.write, writer=WRITER, batch_id=run.batch, timeout_ms=TIMEOUT_MS, owner=self.name
        )
        await self._pause()
        try:
            self._begin(await self.ask(self.coordinator, call))
        except TransactionAbortedError:  # the driver is told the same, and whether that is as it should be
            run.reports.setdefault(self.number, Report(None, (), ()))
            return
        try:
            values = []
            for row in range(rng.randint(1, 4)):
                value = b"%s%d %d %d %s %d" % (PREFIX, run.batch, run.number, self.number, self.name.encode(), row)
                await self.send(rng.randrange(1, self.world.partitions), [value])
                values.append(value)
                await self._pause()
        except (ProducerError, TransactionError):  # its write is over
            return
        run.reports.setdefault(self.number, Report(self.pair, tuple(sorted(self.touched)), tuple(values)))

    async def _pause(self) -> None:
        if not self.world.healing and self.rng.random() < 0.15:
            await asyncio.sleep(self.rng.choice((0.1, 0.5, TIMEOUT_MS / 1000, 2 * TIMEOUT_MS / 1000)))


class Driver(TxApp):
    """Ends the writes of all batches, one after the other."""

    async def _main(self) -> None:
        writes = self.world.writes
        while True:
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            if not writes.settled:
                await self._one(writes.next_batch)

    async def _one(self, batch: int) -> None:
        world, rng = self.world, self.rng
        run = Run(batch, world.next_number(), rng.randint(1, 3))
        world.writes.runs[run.number] = run
        for number in range(run.tasks):
            for _ in range(1 + (rng.random() < 0.3)):  # a task may be run twice at the same time
                world.start_task(run, number)
        for _ in range(int(_PATIENCE_S / 0.05)):
            if run.complete:
                break
            await asyncio.sleep(0.05)
        if not world.healing and rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0.1, TIMEOUT_MS / 1000, 2 * TIMEOUT_MS / 1000)))
        commit = run.complete
        reports = [run.reports[number] for number in sorted(run.reports)] if commit else []
        world.writes.name(run, {value for each in reports for value in each.values})
        try:
            await self._end(run, reports, commit=commit)
        except TransactionAbortedError:  # a part was open for too long, or another driver has ended it: once more
            return
        if commit:
            world.writes.done(batch)

    async def _end(self, run: Run, reports: list[Report], *, commit: bool) -> None:
        groups = [route.group_id for route in self.routes[: self.world.partitions]]
        others = tuple(groups[1:])
        at = {
            (each.pair.producer_id, each.pair.epoch): tuple(groups[number] for number in each.numbers)
            for each in reports
            if each.pair is not None
        }
        call = protocol.EndWrite(
            write=run.write,
            writer=WRITER,
            batch_id=run.batch,
            commit=commit,
            parts=tuple(WritePart(*key, named) for key, named in at.items()),
            others=others,
        )
        ended: WriteEnded = await self.ask(self.coordinator, call)
        if self.rng.random() >= self.world.diligence:
            return  # others find out
        marks = []
        for part in ended.parts:
            key = part.producer_id, part.epoch
            for group_id, seal in zip(at[key] if part.committed else others, part.seals, strict=True):
                mark = MarkTransaction(producer_id=key[0], epoch=key[1], commit=part.committed, seal=seal)
                marks.append(self.ask(self.routes[groups.index(group_id)], mark))
        await asyncio.gather(*marks)
        done = tuple(Transaction(part.producer_id, part.epoch) for part in ended.parts if part.committed)
        if done and self.rng.random() < 0.8:
            await self.ask(self.coordinator, FinishTransactions(transactional_id=run.write, finished=done))


def told(writes: Writes, command: AnyCommand, answer: object) -> None:
    """Of the coordinator's log, but for the ends of writes."""
    if isinstance(command, JoinWrite):
        writes.joined(command, answer)
    elif isinstance(command, AbortTransactions) and isinstance(answer, tuple):
        writes.aborted(command, answer)
