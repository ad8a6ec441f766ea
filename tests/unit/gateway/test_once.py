"""Requests with an idempotency key, over REST: what is refused claims nothing, a retry completes what is claimed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest

from rayqueue.errors import OutcomeUnknownError, QueueFullError
from rayqueue.gateway import numbered
from rayqueue.gateway.numbered import NumberedWrite
from rayqueue.gateway.requests import TOPIC
from rayqueue.gateway.server import Gateway
from rayqueue.partition.admission import AdmissionLimits
from rayqueue.partition.settings import PartitionSettings
from rayqueue.testing import memory, wait_for

Ask = Callable[..., httpx.Response]


@pytest.fixture
def asking() -> Iterator[Callable[[Gateway], Ask]]:
    """Ask a gateway to publish, with a key."""
    with ExitStack() as open_clients:

        def of(gateway: Gateway) -> Ask:
            base = f"http://127.0.0.1:{gateway.rest_port}"
            client = open_clients.enter_context(httpx.Client(base_url=base, timeout=60))

            def ask(key: str, *records: dict[str, Any]) -> httpx.Response:
                headers = {"Idempotency-Key": key}
                return client.post("/v1/topics/orders/records", json={"records": records}, headers=headers)

            return ask

        yield of


def told(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


def there(rq: memory.MemoryQueue) -> list[Any]:
    return [each.end_offset - each.start_offset for each in rq.topic("orders").partitions]


def test_a_new_key_is_refused_before_a_younger_one_is_forgotten(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], asking: Callable[[Gateway], Ask]
) -> None:
    rq.create_topic("orders")
    ask = asking(start(max_requests_kept=3))
    first = [ask(str(number), {"text": "x"}) for number in range(3)]
    assert [each.status_code for each in first] == [200] * 3
    refused = ask("another", {"text": "x"})
    assert told(refused) == (429, "rate_limited")
    assert "gateway.max_requests_kept" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    again = [ask(str(number), {"text": "x"}) for number in range(3)]
    assert [each.headers.get("idempotency-replayed") for each in again] == ["true"] * 3
    assert there(rq) == [3]


@pytest.mark.slow
def test_there_is_room_for_new_keys_once_old_ones_may_be_forgotten(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], asking: Callable[[Gateway], Ask]
) -> None:
    rq.create_topic("orders")
    ask = asking(start(max_requests_kept=2, requests_kept_ms=1500))
    assert [ask(str(number), {"text": "x"}).status_code for number in range(3)] == [200, 200, 429]
    wait_for(lambda: ask("late", {"text": "x"}).status_code == 200, "an old key to be forgotten")


def test_answers_are_kept_as_places_and_their_bytes_are_bounded(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], asking: Callable[[Gateway], Ask]
) -> None:
    rq.create_topic("orders", partitions=2)
    ask = asking(start(max_requests_bytes=2000))
    records = [{"text": "x", "partition": 0}] * 300 + [{"text": "x", "partition": 1, "timestamp_ms": 5}] * 2
    first = ask("a", *records)
    assert first.status_code == 200, first.text
    assert ask("a", *records).json() == first.json()
    with rq.consumer(TOPIC, start="earliest") as consumer:
        events = consumer.poll(max_records=100, timeout_ms=5000)
    assert max(len(each.value or b"") for each in events) < 300
    assert ask("b", *records).status_code == 200
    refused = [told(ask(str(number), {"text": "x"})) for number in range(5)]
    assert refused[-1] == (429, "rate_limited")
    assert ask("a", *records).json() == first.json()


@pytest.mark.parametrize(
    ("settings", "wrong", "status"),
    [
        ({"max_record_bytes": 1000}, {"text": "x" * 1001}, 413),
        ({"max_backlog_bytes": 2000}, {"text": "x" * 3000}, 413),
        ({}, {"text": "x", "timestamp_ms": int(time.time() * 1000) + 4_000_000}, 400),
    ],
)
def test_what_one_partition_would_refuse_is_told_before_another_has_its_share(
    gateway: Gateway,
    rq: memory.MemoryQueue,
    asking: Callable[[Gateway], Ask],
    settings: Any,
    wrong: dict[str, Any],
    status: int,
) -> None:
    rq.create_topic("orders", partitions=2, **settings)
    ask = asking(gateway)
    records = [{"text": "good", "partition": 0}, {**wrong, "partition": 1}]
    answer = ask("k", *records)
    assert answer.status_code == status, answer.text
    assert there(rq) == [0, 0]
    assert ask("k", records[0]).status_code == 200  # it has claimed nothing


def test_without_a_key_too_a_time_that_is_too_far_ahead_is_told_before_anything_is_written(
    rest: httpx.Client, rq: memory.MemoryQueue
) -> None:
    rq.create_topic("orders", partitions=2)
    late_ms = int(time.time() * 1000) + 4_000_000
    records = [{"text": "good", "partition": 0}, {"text": "x", "partition": 1, "timestamp_ms": late_ms}]
    assert told(rest.post("/v1/topics/orders/records", json={"records": records})) == (400, "invalid_input")
    assert there(rq) == [0, 0]


def test_the_limits_are_those_of_partitions() -> None:
    assert PartitionSettings().dedupe_window == numbered.MAX_BATCHES
    assert AdmissionLimits().max_ahead_ms == numbered.MAX_AHEAD_MS


def test_if_one_partition_refuses_it_is_not_known_what_is_written_and_a_retry_completes_it(
    gateway: Gateway,
    rq: memory.MemoryQueue,
    asking: Callable[[Gateway], Ask],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rq.create_topic("orders", partitions=2)
    append = NumberedWrite._append

    async def failing(self: Any, partition: int, *rest: Any) -> Any:
        if partition == 1:
            raise QueueFullError("full")
        return await append(self, partition, *rest)

    ask = asking(gateway)
    records = [{"text": "x", "partition": 0}, {"text": "y", "partition": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(NumberedWrite, "_append", failing)
        assert told(ask("k", *records)) == (504, "outcome_unknown")
        assert told(ask("l", *records[1:])) == (429, "queue_full")
    assert ask("k", *records).status_code == 200
    assert there(rq) == [1, 1]


def test_gateways_with_different_settings_write_a_request_once(
    rq: memory.MemoryQueue,
    gateway: Gateway,
    start: Callable[..., Gateway],
    asking: Callable[[Gateway], Ask],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rq.create_topic("orders", partitions=4)
    settings = rq.settings
    producer = settings.producer.model_copy(update={"partitioner": "murmur2"})
    log = settings.log.model_copy(update={"max_batch_bytes": 4096})
    other = start(rq.another(settings=settings.model_copy(update={"producer": producer, "log": log})))
    append = NumberedWrite._append

    async def failing(self: Any, partition: int, *rest: Any) -> Any:
        found = await append(self, partition, *rest)
        if self._rq is rq:
            raise OutcomeUnknownError("killed")
        return found

    monkeypatch.setattr(NumberedWrite, "_append", failing)
    records = [{"text": "x" * 500, "key": f"key {row}"} for row in range(100)]
    assert asking(gateway)("k", *records).status_code == 504
    rq.alter_topic("orders", max_backlog_records=1000)
    ask = asking(other)

    def retried() -> httpx.Response | None:
        answer = ask("k", *records)
        return None if answer.status_code == 409 else answer

    answer = wait_for(retried, "the claim to be known")
    assert answer.status_code == 200, answer.text
    assert sum(there(rq)) == 100


def test_more_batches_than_a_partition_can_answer_for_are_refused(
    start: Callable[..., Gateway], asking: Callable[[Gateway], Ask]
) -> None:
    with memory.connect() as small:
        log = small.settings.log.model_copy(update={"max_batch_bytes": 3072})
        ask = asking(start(small.another(settings=small.settings.model_copy(update={"log": log}))))
        small.create_topic("orders")
        records = [{"text": "x" * 1200}] * 40
        refused = ask("k", *records)
        assert told(refused) == (413, "request_too_large")
        assert there(small) == [0]
        first = ask("k", *records[:32])
        assert first.status_code == 200
        assert ask("k", *records[:32]).json() == first.json()


@pytest.mark.parametrize("bound", ["max_backlog_records", "max_backlog_bytes"])
def test_a_full_topic_is_told_at_once_and_what_is_cut_goes_on_later(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], asking: Callable[[Gateway], Ask], bound: str
) -> None:
    bounds: Any = {bound: 2 if bound == "max_backlog_records" else 5000}
    rq.create_topic("orders", **bounds)
    ask = asking(start(request_timeout_ms=8000))
    records = [{"text": "x" * 2000} for _ in range(3)]
    with rq.consumer("orders", group="g", start="earliest", auto_commit=False) as consumer:
        assert consumer.poll(timeout_ms=100) == []
        consumer.commit()
        began_s = time.monotonic()
        assert told(ask("k", *records)) == (504, "outcome_unknown")  # one batch was, the other was not
        assert told(ask("l", *records[:2])) == (429, "queue_full")
        assert time.monotonic() - began_s < 6
        found: list[Any] = []

        def completed() -> bool:
            found.extend(consumer.poll(timeout_ms=100))
            consumer.commit()
            return ask("k", *records).status_code == 200

        wait_for(completed, "the rest to find room")
        assert rq.topic("orders").records == 3


def test_a_topic_that_was_made_again_has_none_of_the_answers_of_the_one_before(
    rq: memory.MemoryQueue, gateway: Gateway, asking: Callable[[Gateway], Ask]
) -> None:
    ask = asking(gateway)
    for _ in range(3):
        rq.create_topic("orders", partitions=2)
        answer = ask("k", {"text": "x"})
        assert (answer.status_code, answer.headers["idempotency-replayed"]) == (200, "false")
        assert ask("k", {"text": "x"}).headers["idempotency-replayed"] == "true"
        new = ask(f"new {answer.json()}", {"text": "x"})
        assert new.status_code == 200
        rq.delete_topic("orders")


def test_partitions_and_settings_that_are_new_are_seen_without_listing_all_topics(
    rq: memory.MemoryQueue, gateway: Gateway, asking: Callable[[Gateway], Ask], monkeypatch: pytest.MonkeyPatch
) -> None:
    rq.create_topic("orders")
    ask = asking(gateway)
    assert ask("a", {"text": "x", "partition": 0}).status_code == 200

    async def listed(**_: Any) -> Any:
        raise AssertionError("all topics are listed")

    monkeypatch.setattr(gateway._rq, "topics_async", listed)
    rq.alter_topic("orders", partitions=3)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as client:
        plain = client.post("/v1/topics/orders/records", json={"records": [{"text": "x", "partition": 1}]})
        assert plain.status_code == 200, plain.text
    assert ask("b", {"text": "x", "partition": 2}).status_code == 200
    assert msgspec.json.decode(ask("c", {"text": "x", "partition": 3}).content)["code"] == "unknown_partition"
