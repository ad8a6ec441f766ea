"""Whole clients in the transactions' world: the real transactional producer, and the real consumer with exactly_once.

A loop reads all that the others write, as a member of a group, and writes one
record for each into a topic of its own, with its positions: what ``rq.process``
does, without its thread. A feeder writes input, in transactions that it waits for
and in others that it does not. ``ClientBook`` compares what they were told with
the logs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.producer.producer import Producer
from rayqueue.errors import (
    OutcomeUnknownError,
    ProducerFencedError,
    RayQueueError,
    StaleGenerationError,
    TransactionAbortedError,
    TransactionError,
)
from rayqueue.records import Record
from tests.sim.apps import TOPIC, App
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.tx_apps import TIMEOUT_MS

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld

LOOP = "loop"
MADE = 4
"""The number of the partition into which loops write, among all."""
MADE_TOPIC = "made"
_AGAIN_S = 0.1


class ClientBook:
    """What loops were told. Each transaction of theirs has a number, which is in its records."""

    def __init__(self, world: TxWorld) -> None:
        self._world = world
        self._told: dict[int, bool] = {}

    def told(self, number: int, *, committed: bool) -> None:
        self._told[number] = committed

    def made(self) -> list[tuple[int, int, int]]:
        """Partition, offset, and number of the transaction of each that counts, in their order."""
        checker = self._world.checker(MADE)
        found: list[tuple[int, int, int]] = []
        for value, key, _ in checker.values:
            if value is not None and checker.fate(key):
                partition, offset, number = map(int, value.split())
                found.append((partition, offset, number))
        return found

    def left(self) -> set[tuple[int, int]]:
        """Records that count and have no other one made of them."""
        return self._sources() - {(partition, offset) for partition, offset, _ in self.made()}

    def _sources(self) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for number in range(self._world.partitions):
            checker = self._world.checker(number)
            found |= {(number, at) for at, (_, key, _) in enumerate(checker.values) if checker.fate(key)}
        return found

    def check(self) -> None:
        """Also of a schedule that does not come to its end."""
        made = self.made()
        twice = [each for each, count in Counter(each[:2] for each in made).items() if count > 1]
        if twice:
            raise BrokenError(Invariant.EXACTLY_ONCE, f"of these two were made: {sorted(twice)[:5]}")
        if {each[:2] for each in made} - self._sources():
            raise BrokenError(Invariant.EXACTLY_ONCE, "something was made of what does not count")
        numbers = {number for _, _, number in made}
        wrong = [number for number, committed in self._told.items() if committed != (number in numbers)]
        if wrong:
            raise BrokenError(Invariant.TRUE_FATE, f"a loop was told otherwise of its transactions {wrong[:5]}")
        passed = sorted(each for each in self.left() if self._has_passed(*each))
        if passed:
            raise BrokenError(
                Invariant.EXACTLY_ONCE, f"of these nothing was made, and the group is behind them: {passed}"
            )
        self._check_order(made)

    def _has_passed(self, partition: int, offset: int) -> bool:
        checker = self._world.checker(partition)
        position = checker.reads.machine.position(LOOP)
        return position is not None and position.offsets.get(checker.values[offset][2], 0) > offset

    def _check_order(self, made: Sequence[tuple[int, int, int]]) -> None:
        reached: dict[tuple[int, int], int] = {}
        for partition, offset, _ in made:
            lane = partition, self._world.checker(partition).values[offset][2]
            if offset < reached.get(lane, 0):
                raise BrokenError(Invariant.IN_ORDER, f"{partition} {offset} was made after {reached[lane]}")
            reached[lane] = offset


class _Client(App):
    """One with a transactional producer."""

    def __init__(self, world: TxWorld, name: str, rng: Random, transactional_id: str) -> None:
        super().__init__(world, name, world.settings)
        self.tx_world = world
        self.rng = rng
        self.transactional_id = transactional_id
        self.producer: Producer[Any, Any] = Producer(
            self, transactional_id=transactional_id, transaction_timeout_ms=TIMEOUT_MS
        )
        self.process.on_killed.append(self.producer._leaving.detach)  # a killed process says nothing any more

    async def _find(self, topic: str) -> None:
        """From then on a send waits for nothing."""
        while True:
            try:
                self.producer._targets.learn(await self.routes.topic(topic))
            except RayQueueError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def _pause(self) -> None:
        if not self.tx_world.healing and self.rng.random() < 0.15:
            await asyncio.sleep(self.rng.choice((0.05, 0.5, 2 * TIMEOUT_MS / 1000)))

    async def _commit(self, tx: Any) -> None:
        """Until it is known how it has ended."""
        while True:
            try:
                await tx.commit_async()
            except OutcomeUnknownError:
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def _abort(self, tx: Any) -> None:
        try:
            await tx.abort_async()
        except RayQueueError:
            return  # it is over, or the coordinator ends it when its time is up


class ClientLoop(_Client):
    """One worker, until another one has its id."""

    def __init__(self, world: TxWorld, name: str, rng: Random, transactional_id: str) -> None:
        super().__init__(world, name, rng, transactional_id)
        self._consumer: Consumer[Any, Any] = Consumer(
            self, [TOPIC], group=LOOP, delivery="exactly_once", client=name, max_poll_records=rng.choice((10, 50, 100))
        )
        self.process.on_killed.append(self._consumer._given_up.detach)
        self.process.start(self._main())

    async def _main(self) -> None:
        await self._find(MADE_TOPIC)
        while True:
            await asyncio.sleep(self.rng.uniform(0.01, 0.05 if self.tx_world.healing else 0.3))
            try:
                records = await self._consumer.poll_async(timeout_ms=200)
                if records:
                    await self._batch(records)
            except ProducerFencedError:
                break
            except (TransactionError, StaleGenerationError, OutcomeUnknownError):
                await self._consumer.rewind_async()
            except RayQueueError as error:
                if not error.retriable:
                    raise
                await self._consumer.rewind_async()
                await asyncio.sleep(_AGAIN_S)
        await self._consumer.close_async()

    async def _batch(self, records: Sequence[Record]) -> None:
        world, number = self.tx_world, self.tx_world.next_number()
        tx = self.producer.transaction(wait_visible=self.rng.random() < 0.5)
        await tx.begin_async()
        try:
            for record in records:
                tx.send(MADE_TOPIC, b"%d %d %d" % (record.partition, record.offset, number))
                await self._pause()
            await tx.commit_offsets_async(self._consumer)
            await self._pause()
        except RayQueueError:
            await self._abort(tx)
            world.clients.told(number, committed=False)
            raise
        if not world.healing and self.rng.random() < 0.1:
            await self._abort(tx)
            world.clients.told(number, committed=False)
            return
        try:
            await self._commit(tx)
        except (TransactionAbortedError, ProducerFencedError):
            world.clients.told(number, committed=False)
            raise
        world.clients.told(number, committed=True)


class ClientFeeder(_Client):
    """Writes input, a transaction for each few records."""

    def __init__(self, world: TxWorld, name: str, rng: Random, transactional_id: str) -> None:
        super().__init__(world, name, rng, transactional_id)
        self.process.start(self._main())

    async def _main(self) -> None:
        await self._find(TOPIC)
        while not self.tx_world.healing:
            await asyncio.sleep(self.rng.uniform(0.1, 0.8))
            try:
                if self.rng.random() < 0.5:
                    await self._one()
                else:
                    await self._several(self.rng.randint(2, 6))
            except ProducerFencedError:
                return
            except RayQueueError:
                continue

    def _values(self) -> list[bytes]:
        return [b"in %d" % self.tx_world.next_number() for _ in range(self.rng.randint(1, 3))]

    async def _one(self) -> None:
        world, values = self.tx_world, self._values()
        tx = self.producer.transaction()
        await tx.begin_async()
        for value in values:
            tx.send(TOPIC, value, partition=0)
            await self._pause()
        if self.rng.random() < 0.2:
            await self._abort(tx)
            world.promised(values, there=False)
            return
        try:
            await self._commit(tx)
        except (TransactionAbortedError, ProducerFencedError):
            world.promised(values, there=False)
            raise
        world.promised(values, there=True)

    async def _several(self, count: int) -> None:
        """Their ends are waited for together."""
        ended: list[tuple[Any, list[bytes]]] = []
        for _ in range(count):
            tx, values = self.producer.transaction(wait=False), self._values()
            try:
                await tx.begin_async()
                for value in values:
                    tx.send(TOPIC, value, partition=0)
                await self._pause()
                await tx.commit_async()
            except RayQueueError:
                self.tx_world.promised(values, there=False)  # nobody has asked for its end
                continue
            ended.append((tx, values))
        for tx, values in ended:
            try:
                await tx.wait_committed_async()
            except (TransactionAbortedError, ProducerFencedError):
                self.tx_world.promised(values, there=False)
            except RayQueueError:
                continue
            else:
                self.tx_world.promised(values, there=True)
