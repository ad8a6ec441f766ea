"""Tasks beside the replicas of the transactions' world: a settler for each of a partition, and the carrier.

Both are slow, and go on with answers that may be old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

from rayqueue.cluster.commands import AnyCommand, encode_command
from rayqueue.errors import RayQueueError
from rayqueue.net.route import CoordinatorRoute
from rayqueue.protocol.transactions import ResolveTransactions
from rayqueue.replica.carrying import Carrier
from tests.sim.apps import SimDirectory
from tests.sim.served import CoordinatorNode, PartitionNode

if TYPE_CHECKING:
    from tests.sim.tx_world import TxWorld


def settle(world: TxWorld, node: PartitionNode, group_id: str) -> None:
    """The settler beside a replica (``rayqueue.actors.settler``): slow, and with answers that may be old."""
    process = world.new_process(f"settler {group_id} {node.replica_id}")
    route = CoordinatorRoute(cast("Any", SimDirectory(world)), world.settings)
    rng = Random(world.rng.random())

    async def look(find: Any) -> Any:
        looked: asyncio.Future[Any] = process.create_future()
        node.call(lambda: _tell(looked, find()))
        return await asyncio.wait_for(looked, 5.0)

    async def main() -> None:
        while True:
            await asyncio.sleep(world.settings.cluster.resolve_after_ms / 2000)
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
    world.settlers.append(process)


def carry(world: TxWorld) -> None:
    """The carrier, beside whoever leads the coordinator's group."""
    process = world.new_process("carrier")

    async def asked(ask: Any) -> Any:
        leader = world.coordinators.leader()
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

    carrier = Carrier(change, cast("Any", SimDirectory(world)), world.settings)

    async def main() -> None:
        while True:
            await asyncio.sleep(0.3)
            try:
                view = await asked(lambda leader, tell: tell(_View(leader)))
                await carrier.carry(carrier.due(view), view)
            except (RayQueueError, asyncio.TimeoutError):
                continue

    process.start(main())
    world.settlers.append(process)


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
