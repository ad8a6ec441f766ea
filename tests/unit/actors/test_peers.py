"""The peers of a replica, as its actor finds them, however often they move."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors import meeting
from rayqueue.actors.base import ReplicaActor, ReplicaSpec
from rayqueue.actors.meeting import Address, Meeting
from rayqueue.config import Settings
from rayqueue.ids import GroupId, ReplicaId

R1, R2, R3 = (ReplicaId(f"r{number}") for number in (1, 2, 3))


class _Peers(ReplicaActor[Any]):
    """``r2`` says at once where it listens, ``r3`` does not answer."""

    def __init__(self) -> None:
        self._spec = ReplicaSpec(GroupId("orders-0"), R1, Settings())
        self._look_for_peers = asyncio.Event()

    async def _address_of(self, peer: ReplicaId) -> Address | None:
        if peer == R3:
            await asyncio.Event().wait()
        return "127.0.0.1", 1234


def test_a_peer_that_does_not_answer_keeps_nobody_from_another() -> None:
    told: list[Mapping[ReplicaId, Address]] = []

    async def meet() -> None:
        replica: Any = SimpleNamespace(
            status=SimpleNamespace(peers=(R2, R3), connected=()), set_peers=lambda peers: told.append(peers)
        )
        meeting = asyncio.ensure_future(_Peers()._meet_peers(replica))
        for _ in range(10):
            await asyncio.sleep(0)
        meeting.cancel()

    asyncio.run(meet())
    assert told == [{R2: ("127.0.0.1", 1234)}]


HERE, THERE = ("127.0.0.1", 1234), ("127.0.0.1", 5678)


class _Moved(_Peers):
    """Each answer names another port."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ReplicaId] = []
        self.twice = asyncio.Event()

    async def _address_of(self, peer: ReplicaId) -> Address | None:
        self.asked.append(peer)
        if min(map(self.asked.count, (R2, R3))) >= 3:  # the second answer has been told by now
            self.twice.set()
        return "127.0.0.1", 1000 + len(self.asked)


def test_who_is_not_connected_is_asked_again_and_dialled_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying: of a group in which one had been replaced, an old copy of another never met the new one. Each
    had asked the other's actor once, before it was restarted."""
    monkeypatch.setattr(meeting, "_NOT_THERE_MS", (1, 1))
    told: list[Mapping[ReplicaId, Address]] = []
    status = SimpleNamespace(peers=(R2,), connected=(R2,))

    async def meet() -> None:
        actor, replica = _Moved(), SimpleNamespace(status=status, set_peers=lambda peers: told.append(peers))
        meeting_them = asyncio.ensure_future(actor._meet_peers(replica))  # type: ignore[arg-type]
        for _ in range(10):
            await asyncio.sleep(0)
        assert actor.asked == [], "it is connected: it called first"
        status.connected = ()
        status.peers = (R2, R3)  # of whom it has only heard that it votes, in doubt of itself
        actor._look_for_peers.set()
        await actor.twice.wait()
        meeting_them.cancel()

    asyncio.run(asyncio.wait_for(meet(), 20.0))
    for peer in (R2, R3):
        assert len({addresses[peer] for addresses in told if peer in addresses}) >= 2


def _asked_at(meeting: Meeting, until_s: float, **answers: Address) -> list[tuple[float, ReplicaId]]:
    """Every hundredth of a second a look, at two peers that are not connected."""
    asked = []
    for hundredth in range(int(until_s * 100) + 1):
        now_s = hundredth / 100
        for peer in meeting.due(now_s, (R2, R3), ()):
            asked.append((now_s, peer))
            if peer in answers:
                meeting.heard(peer, answers[peer])
    return [(round(now_s, 1), peer) for now_s, peer in asked]


def test_who_has_never_answered_is_asked_often_and_who_has_more_slowly() -> None:
    asked = _asked_at(Meeting(), 30.0, r2=HERE)
    never = [now_s for now_s, peer in asked if peer == R3]
    known = [now_s for now_s, peer in asked if peer == R2]
    assert never[:5] == [0.0, 0.1, 0.3, 0.7, 1.5]
    assert 30 <= len(never) <= 33, "then each second"
    assert known == [0.0, 2.0, 6.0, 14.0, 24.0]


def test_who_is_connected_is_not_asked_and_who_is_lost_again_soon() -> None:
    meeting = Meeting()
    assert meeting.due(0.0, (R2, R3), (R2,)) == [R3]
    assert meeting.heard(R3, HERE)
    assert meeting.due(100.0, (R2, R3), (R2, R3)) == []
    assert meeting.pause_s(100.0) == 1.0
    assert meeting.due(200.0, (R2, R3), ()) == [R2], "the other is dialled where it was"
    assert meeting.due(202.0, (R3,), ()) == [R3]
    assert not meeting.heard(R3, HERE)
    assert meeting.due(203.0, (R3,), ()) == []
    assert meeting.pause_s(203.0) == 1.0
    assert meeting.due(206.0, (R3,), ()) == [R3]
    assert meeting.heard(R3, THERE), "it has restarted"
    assert meeting.addresses == {R3: THERE}
