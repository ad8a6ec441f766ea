"""What the dashboard is told of a replica, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rayqueue.actors.notice import FOLLOW_EVERY_S, REPEAT_EVERY_S, Notices, is_due, text_of
from rayqueue.ids import GroupId, Index, NodeId, Offset, Term
from rayqueue.replica import Status

STATUS = Status(
    group_id=GroupId("orders-3.7"),
    node_id=NodeId("r2"),
    role="leader",
    leader=NodeId("r2"),
    term=Term(4),
    start_offset=Offset(0),
    high_watermark=Offset(1200),
    base_index=Index(0),
    last_index=Index(9),
    commit=Index(9),
    applied=Index(9),
    voters=(NodeId("r1"), NodeId("r2")),
    learners=(),
    address=("127.0.0.1", 1),
    size_bytes=0,
    read_only=False,
    damaged=None,
    syncs=0,
    sync_ms=0.0,
)


def test_the_text_says_who_role_term_and_high_watermark() -> None:
    assert text_of(STATUS) == "orders-3 r2: leader of term 4, high watermark 1200"
    coordinator = replace(STATUS, group_id=GroupId("coordinator"), node_id=NodeId("c1"))
    assert text_of(coordinator) == "coordinator c1: leader of term 4"
    assert text_of(replace(STATUS, read_only=True)).endswith(", disk full")
    assert text_of(replace(STATUS, damaged="entry 3")).endswith(", damaged")


def test_a_new_role_or_term_is_shown_at_once_and_the_rest_in_its_time() -> None:
    assert is_due(None, STATUS, 0)
    assert is_due(STATUS, replace(STATUS, role="follower"), 0)
    assert is_due(STATUS, replace(STATUS, term=Term(5)), 0)
    assert is_due(STATUS, replace(STATUS, read_only=True), 0)
    grown = replace(STATUS, high_watermark=Offset(1201))
    assert not is_due(STATUS, grown, FOLLOW_EVERY_S - 1)
    assert is_due(STATUS, grown, FOLLOW_EVERY_S)
    assert not is_due(STATUS, STATUS, REPEAT_EVERY_S - 1)
    assert is_due(STATUS, STATUS, REPEAT_EVERY_S)


def test_a_notice_lasts_until_the_next_one() -> None:
    async def scenario() -> None:
        posted: list[tuple[int, str]] = []
        notices = Notices(lambda number, text: posted.append((number, text)))
        notices.show("follower")
        first = asyncio.create_task(notices.last(1))
        await asyncio.sleep(0)
        notices.show("leader")
        await asyncio.wait_for(first, 5)
        second = asyncio.create_task(notices.last(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
        notices.end()
        await asyncio.wait_for(second, 5)
        assert posted == [(1, "follower"), (2, "leader")]

    asyncio.run(scenario())


def test_a_notice_that_begins_late_does_not_stay() -> None:
    async def scenario() -> None:
        notices = Notices(lambda number, text: None)
        notices.show("follower")
        notices.show("leader")
        await asyncio.wait_for(notices.last(1), 5)
        notices.end()
        await asyncio.wait_for(notices.last(2), 5)

    asyncio.run(scenario())
