"""Applications of the transactions' world: they feed, process and read, by the protocol's calls.

A processor reads input, sends results and stages its position in one transaction,
as the client does; it may pause anywhere, die anywhere, leave markers to others,
and go on as if nothing had happened when it is somebody else's turn by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rayqueue.errors import (
    OutcomeUnknownError,
    ProducerError,
    ProducerFencedError,
    RayQueueError,
    StaleGenerationError,
    TransactionAbortedError,
    TransactionError,
    UnknownTransactionError,
)
from rayqueue.net.backoff import Retry
from rayqueue.net.requests import request
from rayqueue.net.route import CoordinatorRoute, GroupRoute
from rayqueue.protocol.calls import Call, Commit, Trim
from rayqueue.protocol.data import READ_COMMITTED, READ_FOLLOWER, Cursor, FetchRequest
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.transactions import (
    AbortTransaction,
    Decided,
    EndTransaction,
    FinishTransactions,
    InitTransactions,
    ListTransactions,
    MarkTransaction,
    StageOffsets,
    Transaction,
)
from rayqueue.records import RecordBatch
from rayqueue.replica.secret import secret_of
from tests.sim.apps import SimDirectory

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld

GROUP = "processors"
RESULT = b"out "
"""How results begin."""
TIMEOUT_MS = 1_500
_ENDED = (ProducerError, TransactionError, StaleGenerationError)
"""What says that a transaction cannot be committed any more."""


class TxApp:
    """A process with routes to the coordinator and to all partitions."""

    def __init__(self, world: TxWorld, name: str, rng: Random) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self.process = world.new_process(name)
        directory: Any = SimDirectory(world)
        self.coordinator = CoordinatorRoute(directory, world.settings)
        self.routes = [
            GroupRoute(group.group_id, tuple(group.nodes), directory, world.settings)
            for group in world.ensembles.values()
        ]
        self.process.start(self._main())

    async def _main(self) -> None:
        raise NotImplementedError

    async def ask(self, route: GroupRoute, call: Call) -> Any:
        return await self._until_answered(route, lambda channel: channel.call(call))

    async def _until_answered(self, route: GroupRoute, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        async def attempt(way: GroupRoute) -> Any:
            channel = await way.leader()
            try:
                return await asyncio.wait_for(ask(channel), 3.0)
            except asyncio.TimeoutError:
                raise OutcomeUnknownError("no answer") from None

        async def way() -> GroupRoute:
            return route

        while True:
            retry = Retry(self.world.settings.client, self.rng, self.world.clock.now, idempotent=True)
            try:
                return await request(way, attempt, retry)
            except RayQueueError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.1)

    async def fetch(self, route: GroupRoute, wanted: FetchRequest) -> Any:
        return await self._until_answered(route, lambda channel: channel.fetch(wanted))

    async def send_plain(self, number: int, values: list[bytes]) -> None:
        batch = RecordBatch.encode(values, timestamps=1, producer_id=10_000 + self.world.next_number())
        await self._until_answered(self.routes[number], lambda channel: channel.append(batch))


class TxProducer(TxApp):
    """One that has transactions."""

    transactional_id: str

    def __init__(self, world: TxWorld, name: str, rng: Random) -> None:
        self.at: Transaction | None = None
        self.sequences: dict[int, int] = {}
        self.touched: set[int] = set()
        self.unfinished: list[Transaction] = []
        super().__init__(world, name, rng)

    async def init(self, *, resume: bool = False) -> None:
        if self.world.fresh and not resume:
            self.transactional_id = f"fresh{self.world.next_number()}"
        call = InitTransactions(
            transactional_id=self.transactional_id,
            attempt=self.name,
            timeout_ms=TIMEOUT_MS,
            owner=self.name,
            resume=resume,
        )
        self._begin(await self.ask(self.coordinator, call))

    def _begin(self, at: Transaction) -> None:
        self.at, self.sequences, self.touched = at, {}, set()

    @property
    def pair(self) -> Transaction:
        assert self.at is not None
        return self.at

    async def send(
        self, number: int, values: list[bytes], keys: list[bytes | None] | None = None, headers: Any = None
    ) -> None:
        sequence = self.sequences.get(number, 0)
        self.touched.add(number)
        batch = RecordBatch.encode(
            values,
            keys,
            headers,
            timestamps=1,
            producer_id=self.pair.producer_id,
            epoch=self.pair.epoch,
            sequence=sequence,
            transactional=True,
            lane=self.rng.randrange(self.world.lanes) if number else 0,
        )
        await self._until_answered(self.routes[number], lambda channel: channel.append(batch))
        self.sequences[number] = sequence + len(values)

    async def stage(self, generation: int, offset: int) -> None:
        self.touched.add(0)
        call = StageOffsets(
            producer_id=self.pair.producer_id,
            epoch=self.pair.epoch,
            group=GROUP,
            generation=generation,
            offsets={0: offset},
            seal=self.world.grant(generation),
        )
        await self.ask(self.routes[0], call)

    async def end(self, *, commit: bool) -> bool:
        """Whether it is committed. What was decided is marked, or left to others."""
        at, numbers = self.pair, sorted(self.touched)
        groups = tuple(self.routes[number].group_id for number in numbers)
        call = EndTransaction(
            transactional_id=self.transactional_id,
            producer_id=at.producer_id,
            epoch=at.epoch,
            commit=commit,
            participants=groups,
            finished=tuple(self.unfinished),
        )
        if commit and self.world.careless and numbers and self.rng.random() < 0.3:
            await self._forge(self.rng.choice(numbers))
        try:
            decided: Decided = await self.ask(self.coordinator, call)
        except TransactionAbortedError:
            self.world.told(self.name, at, committed=False)
            await self.init(resume=True)
            return False
        self.unfinished.clear()
        self.world.told(self.name, at, committed=decided.committed)
        self._begin(decided.next)
        if commit and self.world.careless and self.rng.random() < 0.3:
            await self._add_to(at, call)
        if self.rng.random() < self.world.diligence:
            marks = [self._mark(number, at, decided, seal) for number, seal in zip(numbers, decided.seals, strict=True)]
            await asyncio.gather(*marks)
            if commit and self.rng.random() < 0.8:
                self.unfinished.append(at)
        return decided.committed

    async def _forge(self, number: int) -> None:
        """As a careless client may: it marks what nobody has decided yet."""
        forged = MarkTransaction(producer_id=self.pair.producer_id, epoch=self.pair.epoch, commit=True, seal=b"mine")
        with suppress(ProducerError, TransactionError):
            await self.ask(self.routes[number], forged)

    async def _add_to(self, at: Transaction, call: EndTransaction) -> None:
        """As a careless client may: something is sent in a transaction that is decided, where nothing of it was, and
        its end is asked for again, with that partition."""
        others = [
            number
            for number in range(1, self.world.partitions)
            if self.routes[number].group_id not in call.participants
        ]
        if not others:
            return
        number = self.rng.choice(others)
        late = RecordBatch.encode(
            [b"late"], timestamps=1, producer_id=at.producer_id, epoch=at.epoch, sequence=0, transactional=True
        )
        try:
            await self._until_answered(self.routes[number], lambda channel: channel.append(late))
            participants = (*call.participants, self.routes[number].group_id)
            again: Decided = await self.ask(self.coordinator, replace(call, participants=participants))
        except (ProducerError, TransactionError):
            return
        await self._mark(number, at, again, again.seals[-1])

    async def _mark(self, number: int, at: Transaction, decided: Decided, seal: bytes) -> None:
        call = MarkTransaction(producer_id=at.producer_id, epoch=at.epoch, commit=decided.committed, seal=seal)
        await self.ask(self.routes[number], call)

    async def close(self) -> None:
        if self.unfinished:
            finished = tuple(self.unfinished)
            call = FinishTransactions(transactional_id=self.transactional_id, finished=finished)
            await self.ask(self.coordinator, call)
            self.unfinished.clear()


class Feeding(TxProducer):
    """One that writes as much as is wanted."""

    def __init__(self, world: TxWorld, name: str, rng: Random) -> None:
        self.wanted = 0
        self.under_way = 0
        super().__init__(world, name, rng)

    @property
    def idle(self) -> bool:
        return self.wanted == self.under_way == 0 or self.process.killed

    async def _main(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.01, 0.1))
            self.under_way, self.wanted = self.wanted, 0
            if self.under_way:
                await self._feed(self.under_way)
            self.under_way = 0

    async def _feed(self, count: int) -> None:
        raise NotImplementedError


class Feeder(Feeding):
    """Writes the input, in transactions or not."""

    transactional_id = "feed"

    async def _feed(self, count: int) -> None:
        values = [b"in %d" % self.world.next_number() for _ in range(count)]
        if self.rng.random() < 0.5:
            await self.send_plain(0, values)
            self.world.promised(values, there=True)
            return
        try:
            if self.at is None:
                await self.init()
            for value in values:
                await self.send(0, [value])
            self.world.promised(values, there=await self.end(commit=self.rng.random() < 0.7))
        except _ENDED:
            self.at = None


class Processor(TxProducer):
    """Reads input, and sends one result for each record of it."""

    persists = False
    """It takes over again and again. One that does will come to the end."""

    def __init__(self, world: TxWorld, name: str, rng: Random, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.wants = True
        """It is to take over, as after a rebalance."""
        super().__init__(world, name, rng)

    async def _main(self) -> None:
        while True:
            if not self.wants:
                await asyncio.sleep(1.0 if self.persists else 0.05)
                self.wants |= self.persists
                continue
            self.wants = False
            generation = self.world.next_number()
            try:
                call = Commit(group=GROUP, generation=generation, offsets={}, seal=self.world.grant(generation))
                position = await self.ask(self.routes[0], call)
                if self.at is None or self.rng.random() < 0.5:
                    await self.init(resume=self.at is not None)
                await self._process(generation, position.offsets.get(0, 0))
            except (ProducerFencedError, UnknownTransactionError):
                self.at = None  # another one has its id: two that take it from each other would never come to an end
            except StaleGenerationError:
                await self._give_up()
            except _ENDED:
                self.at = None
                self.wants = True

    async def _give_up(self) -> None:
        if self.at is not None and self.touched:
            try:
                await self.end(commit=False)
            except _ENDED:
                self.at = None

    async def _process(self, generation: int, offset: int) -> None:
        while not self.wants:
            await asyncio.sleep(self.rng.uniform(0.005, 0.1))
            request = FetchRequest((Cursor(0, offset),), 400, 200, READ_COMMITTED)
            answer = await self.fetch(self.routes[0], request)
            taken: list[bytes] = []
            then = offset
            for each in answer.batches:
                for at, value in enumerate(RecordBatch.decode(each.payload).values(), each.base_offset):
                    if at >= offset and value is not None:
                        taken.append(value)
                        then = at + 1
            if not taken:
                offset = max(offset, answer.cursors[0].offset)
                continue
            if await self._one(generation, then, taken):
                offset = then

    async def _one(self, generation: int, then: int, taken: list[bytes]) -> bool:
        work: list[Callable[[], Awaitable[None]]] = [
            partial(self.send, self.rng.randrange(1, self.world.partitions), [RESULT + value]) for value in taken
        ]
        work.append(partial(self.stage, generation, then))
        self.rng.shuffle(work)
        for each in work:
            await each()
            if self.rng.random() < 0.1 and not self.world.healing:
                await asyncio.sleep(self.rng.choice((0.05, 0.5, 2 * TIMEOUT_MS / 1000)))
        return await self.end(commit=self.world.healing or self.rng.random() < 0.9)


class Operator(TxApp):
    """Ends what is open, again and again, until everything heals."""

    async def _main(self) -> None:
        while not self.world.healing:
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            seen = [each for each in await self.ask(self.coordinator, ListTransactions()) if each.state == "open"]
            if not seen:
                continue
            info = self.rng.choice(seen)
            call = AbortTransaction(
                transactional_id=info.transactional_id, producer_id=info.producer_id, epoch=info.epoch
            )
            if await self.ask(self.coordinator, call):
                self.world.told(self.name, Transaction(info.producer_id, info.epoch), committed=False)


class Trimmer(TxApp):
    """Deletes what is old, and asks for more than that."""

    async def _main(self) -> None:
        while not self.world.healing:
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            number = self.rng.randrange(1, self.world.partitions)
            await self.ask(self.routes[number], Trim(before=self.rng.randint(1, self.world.end_of(number) + 3)))


class Reader(TxApp):
    """Reads what is committed of one partition, from whoever leads or anybody."""

    def __init__(self, world: TxWorld, name: str, rng: Random, number: int) -> None:
        self.number = number
        self.cursors = dict.fromkeys(range(world.lanes), 0)
        super().__init__(world, name, rng)

    async def _main(self) -> None:
        route = self.routes[self.number]
        while True:
            asked = tuple(Cursor(lane, offset) for lane, offset in self.cursors.items())
            flags = READ_COMMITTED | (READ_FOLLOWER if self.rng.random() < 0.3 else 0)
            request = FetchRequest(asked, self.rng.choice((1, 300, 3_000)), self.rng.choice((0, 300)), flags)
            try:
                if flags & READ_FOLLOWER:
                    channel = await route._replicas.channel(self.rng.choice(route.replica_ids))
                    answer = await asyncio.wait_for(channel.fetch(request), 3.0)
                else:
                    answer = await self.fetch(route, request)
            except (RayQueueError, asyncio.TimeoutError):
                self.cursors = self.world.behind_trims(self.number, self.cursors)
                await asyncio.sleep(0.1)
                continue
            self.world.read(self.number, self.cursors, answer)
            await asyncio.sleep(self.rng.uniform(0.001, 0.2))


def grants(settings: Any, raft_group: str) -> Callable[[int], bytes]:
    """The seals of generations, as the coordinator gives them."""
    seals = Seals(secret_of(settings))
    return lambda generation: seals.grant(GROUP, raft_group, generation)
