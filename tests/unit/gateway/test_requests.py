"""Idempotent requests: the ledger, and two gateways' halves of it on one queue."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.config import GatewaySettings
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    QueueFullError,
    RequestConflictError,
    RequestInProgressError,
)
from rayqueue.gateway.requests import Answered, Claimed, Known, Ledger, LetGo, Requests, request_id
from rayqueue.testing import memory

R = b"request"


def test_of_two_claims_the_first_counts() -> None:
    ledger = Ledger(10)
    ledger.apply(Claimed(R, b"c", "one"), 1)
    ledger.apply(Claimed(R, b"d", "two"), 2)
    ledger.apply(Answered(R, "two", b"wrong"), 3)
    ledger.apply(LetGo(R, "two"), 3)
    known = ledger.get(R)
    assert known is not None
    assert (known.attempt, known.contents, known.answer) == ("one", b"c", None)
    ledger.apply(Answered(R, "one", b"right"), 4)
    ledger.apply(LetGo(R, "one"), 5)
    assert known.answer == b"right"
    assert ledger.get(R) is known


def test_what_was_let_go_can_be_claimed_again_and_memory_is_bounded() -> None:
    ledger = Ledger(3)
    ledger.apply(Claimed(R, b"c", "one"), 1)
    ledger.apply(LetGo(R, "one"), 2)
    assert ledger.get(R) is None
    for number in range(10):
        ledger.apply(Claimed(bytes([number]), b"c", "a"), 3)
    assert [ledger.get(bytes([number])) is not None for number in range(10)] == [False] * 7 + [True] * 3


def test_a_request_is_another_one_for_each_caller_topic_and_life_of_a_topic() -> None:
    ids = {
        request_id("a", "t", 1, "k"),
        request_id("b", "t", 1, "k"),
        request_id("a", "u", 1, "k"),
        request_id("a", "t", 2, "k"),
        request_id("a", "t", 1, "l"),
        request_id("a", "t1", 1, "k"),
    }
    assert len(ids) == 6
    for wrong in ("", "x" * 201, "a\nb"):
        with pytest.raises(InvalidInputError):
            request_id("a", "t", 1, wrong)


def test_two_gateways_carry_a_request_out_once() -> None:
    async def run(rq: memory.MemoryQueue) -> None:
        settings = GatewaySettings(request_timeout_ms=5000)
        gateways = [Requests(rq, settings), Requests(rq.another(), settings)]
        done: list[int] = []

        async def carry_out(_: Known) -> bytes:
            done.append(1)
            await asyncio.sleep(0.05)
            return b"answer"

        async def ask(requests: Requests) -> bytes:
            for _ in range(100):
                try:
                    return (await requests.once(R, b"body", carry_out))[0]
                except RequestInProgressError:
                    await asyncio.sleep(0.02)
            raise AssertionError("never answered")

        answers = await asyncio.gather(*(ask(gateways[number % 2]) for number in range(10)))
        assert answers == [b"answer"] * 10
        assert len(done) == 1
        for each in gateways:
            with pytest.raises(RequestConflictError):
                await each.once(R, b"another body", carry_out)
            await each.close()

    with memory.connect() as rq:
        asyncio.run(run(rq))


def test_what_failed_is_done_again_only_if_nothing_was_written() -> None:
    async def run(rq: memory.MemoryQueue) -> None:
        requests = Requests(rq, GatewaySettings(request_timeout_ms=5000))

        async def full(_: Known) -> bytes:
            raise QueueFullError("full")

        async def unknown(_: Known) -> bytes:
            raise OutcomeUnknownError("lost")

        async def well(_: Known) -> bytes:
            return b"well"

        for _ in range(2):
            with pytest.raises(QueueFullError):
                await requests.once(b"1", b"", full)
            await asyncio.sleep(0.1)
        assert await requests.once(b"1", b"", well) == (b"well", False)
        with pytest.raises(OutcomeUnknownError):
            await requests.once(b"2", b"", unknown)
        with pytest.raises(RequestInProgressError):
            await requests.once(b"2", b"", well)
        requests._timeout_s = 0.0
        with pytest.raises(OutcomeUnknownError):
            await requests.once(b"2", b"", well)
        await requests.close()

    with memory.connect() as rq:
        asyncio.run(run(rq))
