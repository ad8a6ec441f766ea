"""The peers of a replica, as its actor finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rayqueue.actors.base import Address, ReplicaActor, ReplicaSpec
from rayqueue.config import Settings
from rayqueue.ids import GroupId, ReplicaId

R1, R2, R3 = (ReplicaId(f"r{number}") for number in (1, 2, 3))


class _Peers(ReplicaActor[Any]):
    """``r2`` says at once where it listens, ``r3`` does not answer."""

    def __init__(self) -> None:
        self._spec = ReplicaSpec(GroupId("orders-0"), R1, Settings())
        self._addresses = {}
        self._look_for_peers = asyncio.Event()

    async def _address_of(self, peer: ReplicaId) -> Address | None:
        if peer == R3:
            await asyncio.Event().wait()
        return "127.0.0.1", 1234


def test_a_peer_that_does_not_answer_keeps_nobody_from_another() -> None:
    told: list[Mapping[ReplicaId, Address]] = []

    async def meet() -> None:
        replica: Any = SimpleNamespace(
            status=SimpleNamespace(voters=(R1, R2, R3), learners=()), set_peers=lambda peers: told.append(peers)
        )
        meeting = asyncio.ensure_future(_Peers()._meet_peers(replica))
        for _ in range(10):
            await asyncio.sleep(0)
        meeting.cancel()

    asyncio.run(meet())
    assert told == [{R2: ("127.0.0.1", 1234)}]
