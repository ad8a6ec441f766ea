"""Those who use the simulated partition: producers that never give up, and an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayqueue.errors import RayQueueError
from rayqueue.ids import ReplicaId
from rayqueue.partition import Appended
from rayqueue.records import RecordBatch
from tests.sim.checker import Ack
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

IN_FLIGHT = 4
REQUEST_TIMEOUT_S = 1.5


class Outstanding:
    __slots__ = ("attempt", "count", "payload", "sequence")

    def __init__(self, sequence: int, count: int, payload: bytes) -> None:
        self.sequence = sequence
        self.count = count
        self.payload = payload
        self.attempt = 0


class SimProducer:
    """An idempotent producer: several batches in flight, resent in order until answered."""

    def __init__(self, world: World, producer_id: int) -> None:
        self.world = world
        self.producer_id = producer_id
        self.sequence = 0
        self.window: list[Outstanding] = []
        self.wanted = 0
        self.acked = 0
        self.target: ReplicaId | None = None
        self.attempt = 0

    @property
    def idle(self) -> bool:
        return not self.window and self.wanted == 0

    def want(self, batches: int) -> None:
        self.wanted += batches
        self._fill()

    def _fill(self) -> None:
        rng = self.world.rng
        while self.wanted and len(self.window) < IN_FLIGHT:
            self.wanted -= 1
            count = rng.randint(1, 3)
            values = [rng.randbytes(rng.choice((0, 8, 200))) for _ in range(count)]
            now_ms = int(self.world.clock.now * 1000)
            lane = self.world.group_rng.randrange(self.world.partition_settings.lanes)
            payload = RecordBatch.encode(
                values, timestamps=now_ms, lane=lane, producer_id=self.producer_id, sequence=self.sequence
            )
            batch = Outstanding(self.sequence, count, payload)
            self.sequence += count
            self.window.append(batch)
            self._send(batch)

    def _send(self, batch: Outstanding) -> None:
        world, attempt = self.world, self.attempt
        node = world.nodes.get(self.target) if self.target is not None else None
        if node is None or node.removed:
            node = world.rng.choice([node for node in world.nodes.values() if not node.removed])
            self.target = node.replica_id
        replied = False

        def answer(result: Any) -> None:
            nonlocal replied
            if not replied:
                replied = True
                if isinstance(result, Appended):
                    # The promise is made here, whether or not the client ever hears of it.
                    ack = Ack(self.producer_id, batch.sequence, result.base_offset, result.count)
                    world.checker.acknowledged(node, ack)
                world.clock.after(world.rng.uniform(0.0002, 0.002), lambda: self._answered(attempt, batch, result))

        world.clock.after(world.rng.uniform(0.0002, 0.002), lambda: node.append(batch.payload, answer))
        world.clock.after(REQUEST_TIMEOUT_S, lambda: self._answered(attempt, batch, None) if not replied else None)

    def _answered(self, attempt: int, batch: Outstanding, result: Any) -> None:
        if batch not in self.window:
            return
        if isinstance(result, Appended):
            self.window.remove(batch)
            self.acked += 1
            self._fill()
        elif attempt == self.attempt:
            if isinstance(result, RayQueueError) and not result.retriable:
                raise BrokenError(Invariant.ADMITTED, f"producer {self.producer_id} was refused for good: {result!r}")
            self.attempt += 1
            hint = result.details.get("leader") if isinstance(result, RayQueueError) else None
            self.target = hint
            self.world.clock.after(self.world.rng.uniform(0.02, 0.2), self._resend)

    def _resend(self) -> None:
        for batch in list(self.window):
            self._send(batch)


class Operator:
    """Moves leadership about. Every request may fail; it just tries another later."""

    def __init__(self, world: World) -> None:
        self.world = world

    def leader(self) -> SimNode | None:
        leaders = [node for node in self.world.nodes.values() if node.alive and node.engine.is_leader]
        return max(leaders, key=lambda node: node.engine.term) if leaders else None

    def transfer(self) -> None:
        leader = self.leader()
        if leader is not None:
            others = sorted(leader.engine.replica_set.voters - {leader.replica_id})
            if others:
                leader.transfer(self.world.rng.choice(others), _nothing)

    def confirm(self, asked: SimNode | None = None) -> None:
        """Whoever believes to lead is asked to prove it; if it can, it must know all that was acknowledged."""
        believers = [node for node in self.world.nodes.values() if node.alive and node.engine.is_leader]
        node = asked or (self.world.rng.choice(believers) if believers else None)
        if node not in believers:
            return
        known = self.world.checker.acked_index

        def answer(result: Any) -> None:
            if result is None and node.engine.applied < known:
                raise BrokenError(
                    Invariant.CONFIRMED, f"{node.replica_id} confirmed it leads and lacks acknowledged entry {known}"
                )

        node.confirm(answer)


def _nothing(_: Any) -> None:
    pass
