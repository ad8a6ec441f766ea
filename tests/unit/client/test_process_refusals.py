"""Results that no partition takes, in the read-process-write loop: dead letters, which hold up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayqueue import RayQueue, Record, Result
from rayqueue.client.process.dead_letters import dead_letter
from rayqueue.client.process.settings import Figures
from rayqueue.client.producer.columns import check_headers
from rayqueue.errors import InvalidInputError, OversizedRecordError, UnknownTopicError
from rayqueue.testing import memory, wait_for

POISON: dict[str, Any] = {
    "oversized": (Result(b"x" * 2_000_000), b"OversizedRecordError"),
    "topic": (Result(b"x", topic="nowhere"), b"UnknownTopicError"),
    "no name": (Result(b"x", topic="no name!"), b"InvalidInputError"),
    "no text": (Result(b"x", topic=7), b"InvalidInputError"),  # type: ignore[arg-type]
    "partition": (Result(b"x", partition=7), b"UnknownPartitionError"),
    "headers": (Result(b"x", headers={"a": 1}), b"InvalidInputError"),  # type: ignore[arg-type]
    "for its partition": (Result(b"x" * 8000, topic="bounded"), b"OversizedRecordError"),
}
"""What is returned, and the error. The last one is refused by the partition only."""


@pytest.fixture
def rq() -> Iterator[RayQueue]:
    with memory.connect() as queue:
        queue.create_topic("orders")
        queue.create_topic("invoices")
        queue.create_topic("dead")
        queue.create_topic("bounded", max_backlog_bytes=5000)
        with queue.producer() as producer:
            producer.send_many("orders", [b"%d" % each for each in range(6)], keys=[b"k"] * 6)
        yield queue


def letters(rq: RayQueue, topic: str = "dead") -> list[Record[bytes, bytes]]:
    with rq.consumer(topic) as consumer:
        return wait_for(lambda: consumer.poll(timeout_ms=100), "dead letters")


def run(rq: RayQueue, function: Callable[..., Any], **options: Any) -> Figures:
    options = {"retries": 1, "retry_backoff_ms": 1, "dead_letters": "dead", **options}
    with rq.process("orders", "invoices", function, group="g", **options) as running:

        def done() -> bool:
            assert not running.wait(timeout_ms=0)  # or raises
            return running.figures().records >= 6

        wait_for(done, "all records")
        return running.figures()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(POISON))
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_that_cannot_be_written_is_a_dead_letter(rq: RayQueue, kind: str, is_async: bool) -> None:
    result, reason = POISON[kind]

    def plain(record: Record[bytes, bytes]) -> Any:
        return [b"first", result] if record.value == b"3" else record.value

    async def coroutine(record: Record[bytes, bytes]) -> Any:
        await asyncio.sleep(0)
        return plain(record)

    figures = run(rq, coroutine if is_async else plain)
    assert (figures.records, figures.results, figures.dead_letters, figures.trouble) == (6, 5, 1, "")
    (letter,) = letters(rq)
    assert (letter.key, letter.value) == (b"k", b"3")
    headers = dict(letter.headers)
    assert headers["dead-letter-attempts"] == b"2"
    assert reason in headers["dead-letter-reason"]
    with rq.consumer("invoices") as consumer:
        found = wait_for(lambda: consumer.poll(timeout_ms=200), "results")
        while len(found) < 5:
            found += consumer.poll(timeout_ms=200)
    assert [each.value for each in found] == [b"0", b"1", b"2", b"4", b"5"], "in order, and nothing of the poison"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["oversized", "for its partition"])
def test_without_dead_letters_that_is_told(rq: RayQueue, kind: str) -> None:
    running = rq.process("orders", "invoices", lambda record: POISON[kind][0], group="g", retries=1, retry_backoff_ms=1)
    with pytest.raises(OversizedRecordError):
        running.wait(timeout_ms=20_000)


@pytest.mark.slow
def test_a_dead_letter_that_its_partition_refuses_is_told(rq: RayQueue) -> None:
    rq.create_topic("full", max_backlog_bytes=1)
    running = rq.process(
        "orders", "invoices", lambda record: POISON["oversized"][0], group="g", retries=0, dead_letters="full"
    )
    with pytest.raises(OversizedRecordError):
        running.wait(timeout_ms=20_000)


@pytest.mark.slow
def test_that_the_sink_is_gone_is_the_fault_of_no_record(rq: RayQueue) -> None:
    handed: list[Record[bytes, bytes]] = []

    def function(record: Record[bytes, bytes]) -> Any:
        if not handed:
            rq.delete_topic("invoices")
        handed.append(record)
        return record.value

    running = rq.process("orders", "invoices", function, group="g", retries=1, retry_backoff_ms=1, dead_letters="dead")
    with pytest.raises(UnknownTopicError, match="invoices"):
        running.wait(timeout_ms=20_000)
    with rq.consumer("dead") as consumer:
        assert consumer.poll(timeout_ms=100) == []


@pytest.mark.slow
def test_a_state_that_cannot_be_written_is_taken_back(rq: RayQueue) -> None:
    rq.create_topic("state")

    def function(record: Record[bytes, bytes], kept: Any) -> Any:
        kept[b"sum"] = b"%d" % (int(kept.get(b"sum", b"0")) + int(record.value or b""))
        if record.value == b"3":
            kept[b"all"] = b"x" * 2_000_000
        return kept[b"sum"]

    assert run(rq, function, state="state").dead_letters == 1
    assert letters(rq)[0].value == b"3"
    with rq.consumer("state") as consumer:
        kept = {each.key: each.value for each in wait_for(lambda: consumer.poll(timeout_ms=200), "the state")}
    assert kept == {b"sum": b"12"}


@pytest.mark.slow
def test_a_letter_that_is_larger_than_its_topic_takes_is_cut(rq: RayQueue) -> None:
    with rq.producer() as producer:
        producer.send("orders", b"x" * 999_900).result(timeout_ms=5000)

    def fails(record: Record[bytes, bytes]) -> None:
        raise ValueError("poison " * 1000)

    run(rq, fails, retries=0)
    (whole, *_, last) = found = letters(rq)
    while len(found) < 7:
        last = (found := found + letters(rq))[-1]
    assert whole.value == b"0"
    assert "dead-letter-cut" not in dict(whole.headers)
    assert last.value == b"x" * len(last.value or b"")
    assert dict(last.headers)["dead-letter-cut"] == b"value of 999900 bytes"


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        return "\udc80 ü" * 500


@pytest.mark.parametrize("error", [ValueError("poison"), ValueError("ü" * 3000), Unspeakable()])
def test_a_letter_fits_whatever_its_topic_takes(error: Exception) -> None:
    record: Any = Record(7, 0, b"key" * 5, b"value" * 100, (("name", b"header" * 10),), 0, "orders", 0)
    before: tuple[int, ...] = (0, 0, 0, 0)
    for most_bytes in range(6000):
        letter = dead_letter(record, error, 3, "dead", most_bytes)
        headers: dict[str, bytes] = dict(letter.headers or ())
        size = len(letter.value or b"") + len(letter.key or b"") + check_headers(letter.headers)[1]
        assert size <= most_bytes
        cut = headers.get("dead-letter-cut", b"").decode()
        if "dead-letter-reason" in headers:
            headers["dead-letter-reason"].decode()
            assert ("value of 500 bytes" in cut) == (letter.value != record.value)
            assert ("headers of" in cut) == ("name" not in headers)
            assert ("key of 15 bytes" in cut) == (letter.key is None)
        kept = (len(headers) > 0, letter.key is not None, "name" in headers, letter.value == record.value)
        assert kept >= before, "more room takes nothing away"
        before = kept
    assert before == (True, True, True, True)


@pytest.mark.slow
def test_what_an_async_function_keeps_in_its_event_loop_is_good_for_the_next_batch(rq: RayQueue) -> None:
    class Client:
        loop: asyncio.AbstractEventLoop | None = None
        ended = False

        async def linger(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True

        async def __call__(self, record: Record[bytes, bytes]) -> bytes | None:
            if self.loop is None:
                self.loop = asyncio.get_running_loop()
                self.task = self.loop.create_task(self.linger())
            done = self.loop.create_future()
            self.loop.call_later(0.001, done.set_result, None)
            await done
            return record.value

    client = Client()
    figures = run(rq, client, batch=2, retries=0)
    assert (figures.records, figures.transactions, figures.dead_letters) == (6, 3, 0)
    assert client.ended, "and ends with the worker"
    assert client.loop is not None
    assert client.loop.is_closed()


@pytest.mark.slow
def test_when_one_coroutine_ends_the_loop_the_others_are_ended(rq: RayQueue) -> None:
    ended: list[bytes | None] = []

    async def function(record: Record[bytes, bytes]) -> None:
        if record.value == b"0":
            await asyncio.sleep(0)
            raise InvalidInputError("poison")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(record.value)

    running = rq.process("orders", "invoices", function, group="g", retries=0)
    with pytest.raises(InvalidInputError, match="poison"):
        running.wait(timeout_ms=20_000)
    assert len(ended) == 5
