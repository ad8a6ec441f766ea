"""Idempotent requests: the ledger, and two gateways' halves of it on one queue."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
import pytest

from rayqueue.config import GatewaySettings
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    QueueFullError,
    RequestConflictError,
    RequestInProgressError,
)
from rayqueue.gateway.follower import Follower
from rayqueue.gateway.numbered import Number, Placement
from rayqueue.gateway.requests import Answered, Claimed, Event, Known, Ledger, LetGo, Requests, request_id
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


def test_what_was_let_go_can_be_claimed_again() -> None:
    ledger = Ledger(10)
    ledger.apply(Claimed(R, b"c", "one"), 1)
    ledger.apply(LetGo(R, "one"), 2)
    assert ledger.get(R) is None
    assert (len(ledger), ledger.size_bytes) == (0, 0)


def test_only_what_is_old_is_forgotten_and_the_log_says_what_is() -> None:
    ledger = Ledger(100)
    for number in range(50):
        ledger.apply(Claimed(bytes([number]), b"c", "a"), 1000 + number)
    assert len(ledger) == 50
    # A claim that comes when the one before may be forgotten counts for all, however late one of them looks.
    ledger.apply(Claimed(bytes([0]), b"other", "b"), 1101)
    known = ledger.get(bytes([0]))
    assert known is not None
    assert (known.attempt, len(ledger)) == ("b", 50)
    ledger.apply(Claimed(bytes([1]), b"other", "b"), 1101)
    known = ledger.get(bytes([1]))
    assert known is not None
    assert known.attempt == "a"


def test_whether_one_more_may_be_claimed_follows_from_how_many_will_be_forgotten_by_then() -> None:
    ledger = Ledger(100)
    for number in range(5):
        ledger.apply(Claimed(bytes([number]), b"c", "a"), 1000 + number)
    many = 2**30
    assert ledger.full_for_ms(1000, 6, many) == 0
    assert ledger.full_for_ms(1050, 5, many) == 51
    assert ledger.full_for_ms(1101, 5, many) == 0
    assert ledger.full_for_ms(1101, 4, many) == 1
    assert ledger.full_for_ms(1102, 4, many) == 0
    assert ledger.full_for_ms(1050, 100, ledger.size_bytes) == 51
    assert ledger.full_for_ms(1101, 100, ledger.size_bytes) == 0
    assert ledger.full_for_ms(2000, 1, 1) == 0
    for number in range(5):
        ledger.apply(Answered(bytes([number]), "a", places=b"x" * number), 1010)
    size_bytes = ledger.size_bytes
    ledger.apply(Answered(bytes([0]), "a", b"an answer"), 1010)
    assert ledger.size_bytes == size_bytes + 9
    ledger.apply(Claimed(R, b"c", "a"), 9000)
    assert len(ledger) == 1
    ledger.apply(LetGo(R, "a"), 9000)
    assert ledger.size_bytes == 0


class _OldNumber(NamedTuple):
    producer_id: int
    epoch: int
    partitions: int


class _OldClaimed(msgspec.Struct, frozen=True, tag="claimed"):
    request: bytes
    contents: bytes
    attempt: str
    number: _OldNumber | None = None


class _OldAnswered(msgspec.Struct, frozen=True, tag="answered"):
    request: bytes
    attempt: str
    answer: bytes


def test_events_of_the_release_before_are_read_and_it_reads_claims_of_this_one() -> None:
    decoder = msgspec.msgpack.Decoder(Event)
    old = msgspec.msgpack.Decoder(_OldClaimed | _OldAnswered)
    encode = msgspec.msgpack.encode
    ledger = Ledger(1000)
    ledger.apply(decoder.decode(encode(_OldClaimed(R, b"c", "one", _OldNumber(7, 1, 3)))), 1)
    known = ledger.get(R)
    assert known is not None
    assert (known.number, known.placement) == (Number(7, 1, 3), None)
    ledger.apply(decoder.decode(encode(_OldAnswered(R, "one", b"text"))), 2)
    assert known.answer == b"text"
    made = Claimed(R, b"c", "one", Number(7, 1, 3), Placement("consistent", 1000, 5))
    assert old.decode(encode(made)) == _OldClaimed(R, b"c", "one", _OldNumber(7, 1, 3))
    # It takes an answer of this release for none, so it carries the request out again, which changes nothing.
    with pytest.raises(msgspec.ValidationError):
        old.decode(encode(Answered(R, "one", places=b"")))


def test_a_number_that_came_second_is_not_used_again_as_it_is() -> None:
    async def run(rq: memory.MemoryQueue) -> None:
        settings = GatewaySettings(request_timeout_ms=5000)
        first, second = Requests(rq, settings), Requests(rq.another(), settings)

        async def carry_out(_: Known) -> bytes:
            return b"answer"

        def place() -> Placement:
            return Placement("consistent", 1000)

        for requests in (first, second):  # the second one has read nothing yet
            told = await requests.once(R, b"", carry_out, bytes, partitions=1, place=place)
            assert told == (b"answer", requests is second)
        assert [epoch for _, epoch in second._numbers._free] == [1]
        await first.close()
        await second.close()

    with memory.connect() as rq:
        asyncio.run(run(rq))


def test_the_first_events_at_once_are_written_by_one_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rq: memory.MemoryQueue) -> None:
        made: list[Any] = []
        make = rq.producer_async

        async def counted(**options: Any) -> Any:
            await asyncio.sleep(0)  # as it does where the coordinator is asked
            made.append(await make(**options))
            return made[-1]

        monkeypatch.setattr(rq, "producer_async", counted)
        follower = Follower(rq, "rayqueue-gateway.test", lambda _: None, reset=lambda: None)
        assert sorted(await asyncio.gather(*(follower.append(b"x") for _ in range(5)))) == list(range(5))
        assert len(made) == 1
        await follower.close()

    with memory.connect() as rq:
        asyncio.run(run(rq))


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
                    return (await requests.once(R, b"body", carry_out, bytes))[0]
                except RequestInProgressError:
                    await asyncio.sleep(0.02)
            raise AssertionError("never answered")

        answers = await asyncio.gather(*(ask(gateways[number % 2]) for number in range(10)))
        assert answers == [b"answer"] * 10
        assert len(done) == 1
        for each in gateways:
            with pytest.raises(RequestConflictError):
                await each.once(R, b"another body", carry_out, bytes)
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
                await requests.once(b"1", b"", full, bytes)
            await asyncio.sleep(0.1)
        assert await requests.once(b"1", b"", well, bytes) == (b"well", False)
        with pytest.raises(OutcomeUnknownError):
            await requests.once(b"2", b"", unknown, bytes)
        with pytest.raises(RequestInProgressError):
            await requests.once(b"2", b"", well, bytes)
        requests._timeout_s = 0.0
        with pytest.raises(OutcomeUnknownError):
            await requests.once(b"2", b"", well, bytes)
        await requests.close()

    with memory.connect() as rq:
        asyncio.run(run(rq))


def test_a_key_has_as_many_characters_as_is_said_whatever_it_is_for() -> None:
    for kind in ("", "grpc:", "put:", "grpc-put:"):
        request_id("caller", "topic", 1, "k" * 200, kind)
        with pytest.raises(InvalidInputError):
            request_id("caller", "topic", 1, "k" * 201, kind)
        with pytest.raises(InvalidInputError):
            request_id("caller", "topic", 1, "", kind)
    before = request_id("caller", "topic", 1, "put:k")
    assert request_id("caller", "topic", 1, "k", "put:") == before, "as gateways of the release before know it"
