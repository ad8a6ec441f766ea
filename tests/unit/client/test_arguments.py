"""The public API's arguments: what was meant is said, and nothing raises a bare TypeError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rayqueue.client.arguments import (
    check_count,
    check_path,
    check_timeout_ms,
    check_topics,
    did_you_mean,
    hinted,
    seconds_of,
)
from rayqueue.client.connect import connect, connect_async
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.delivery import Deliveries, Delivery, Outcome
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.topic import Topic, TopicProducer
from rayqueue.config import Settings
from rayqueue.errors import ConfigError, InvalidInputError


def nothing(_: Any) -> Any:
    return None


CONSUMER: Any = object.__new__(Consumer)
PRODUCER: Any = object.__new__(Producer)
OF_TOPIC: Any = TopicProducer(PRODUCER, "orders")
QUEUE: Any = RayQueue(Settings(), "nowhere")
TOPIC: Any = Topic(QUEUE, "orders", "json")
DELIVERY: Any = Delivery(Outcome("orders", 0, [1]), 0)
MANY: Any = Deliveries([])
CONNECT: Any = connect
MAKE_PRODUCER: Any = Producer
MAKE_CONSUMER: Any = Consumer


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: CONSUMER.poll(1.0), "poll takes 1.0 by name only; did you mean timeout_ms=1000?"),
        (lambda: CONSUMER.poll(5), "did you mean timeout_ms=5000 or max_records=5?"),
        (lambda: asyncio.run(CONSUMER.poll_async(0.5)), "did you mean timeout_ms=500?"),
        (lambda: CONSUMER.poll(timeout=1), "no option 'timeout'; did you mean timeout_ms?"),
        (lambda: CONSUMER.poll_arrow(max_record=1), "did you mean max_records?"),
        (lambda: CONSUMER.position(("orders", 0), 1), "by name only; there are partition, lane"),
        (lambda: CONSUMER.peek("orders", 0, maxrecords=1), "did you mean max_records?"),
        (lambda: CONSUMER.commit(rewinds=True), "did you mean rewind?"),
        (lambda: PRODUCER.flush(10), "did you mean timeout_ms=10000?"),
        (lambda: PRODUCER.close(0.5), "did you mean timeout_ms=500?"),
        (lambda: asyncio.run(PRODUCER.flush_async(timeout=3)), "did you mean timeout_ms?"),
        (lambda: PRODUCER.send("orders", b"x", keys=b"k"), "send has no option 'keys'; did you mean key?"),
        (lambda: TOPIC.producer(linger=5), "Topic.producer has no option 'linger'; did you mean linger_ms?"),
        (lambda: TOPIC.producer(value_serializer="str"), "Topic.producer has no option 'value_serializer'"),
        (lambda: asyncio.run(TOPIC.consumer_async("g", fetch_bites=5)), "did you mean fetch_bytes?"),
        (lambda: TOPIC.consumer("g", "h"), "Topic.consumer takes 'h' by name only"),
        (lambda: PRODUCER.send_many("orders", [b"x"], key=[b"k"]), "did you mean keys?"),
        (lambda: OF_TOPIC.send(b"x", b"k"), "TopicProducer.send takes b'k' by name only; there are value, key"),
        (
            lambda: OF_TOPIC.send_many([b"x"], key=[b"k"]),
            "no option 'key'; did you mean keys?",
        ),
        (lambda: PRODUCER.send_async("orders"), "missing a required argument: 'value'"),
        (lambda: QUEUE.create_topic("orders", partition=3), "no option 'partition'; did you mean partitions?"),
        (lambda: QUEUE.create_topic("orders", 3), "takes 3 by name only; there are name"),
        (lambda: CONNECT(data_dirs="x"), "no option 'data_dirs'; did you mean data_dir?"),
        (lambda: asyncio.run(connect_async(adress="x")), "did you mean address?"),  # type: ignore[call-arg]
        (lambda: CONNECT(data_dir=5), "data_dir is a directory's path, a text or a Path, not 5"),
        (lambda: CONNECT(data_dir=b"x"), "data_dir is a directory's path"),
        (lambda: CONNECT(5), "address is a text, not 5"),
        (lambda: CONNECT(namespace=7), "namespace is a text, not 7"),
        (lambda: CONNECT(settings={"log": 1}), "rayqueue.Settings"),
        (lambda: DELIVERY.result("x"), "timeout is a number that is not negative, not 'x'"),
        (lambda: DELIVERY.result(-1), "not negative"),
        (lambda: DELIVERY.exception(True), "not negative, not True"),
        (lambda: MANY.result(timeout_ms="5"), "timeout_ms is a number"),
        (lambda: MANY.exception(1, timeout_ms=5), "not both"),
    ],
)
def test_a_call_that_does_not_fit_says_what_was_meant(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [("x", "not 'x'"), (1.0, "did you mean timeout_ms=1000?"), (-1, "not negative"), (None, "not None")],
)
def test_milliseconds(value: Any, says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_timeout_ms(value)
    assert says in str(caught.value)
    assert check_timeout_ms(0) == 0


def test_a_delivery_is_asked_as_a_future_is() -> None:
    assert seconds_of(5, None) == seconds_of(None, 5000) == 5
    assert seconds_of(0.5, None) == 0.5
    assert seconds_of(None, None) is None


@pytest.mark.parametrize(("value", "says"), [(1.0, "timeout_ms=1000"), (0, "at least 1"), ("x", "'x'"), (True, "True")])
def test_a_number_of_records(value: Any, says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_count("max_records", value)
    assert says in str(caught.value)


def test_topics_one_by_one_or_as_a_list() -> None:
    assert check_topics(("a", "b")) == check_topics((["a", "b"],)) == check_topics((("a",), "b")) == ("a", "b")
    assert check_topics((5,)) == (5,)  # whose name is checked elsewhere


def test_a_path(tmp_path: Any) -> None:
    assert check_path("data_dir", tmp_path) == check_path("data_dir", str(tmp_path)) == tmp_path


def test_an_error_from_within_is_left_alone() -> None:
    @hinted
    def broken(*, option: int = 0) -> int:
        return len(option)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        broken(option=3)


def test_what_is_like_nothing_is_told_what_there_is() -> None:
    assert did_you_mean("linger", ["linger_ms", "acks"]) == "; did you mean linger_ms?"
    assert did_you_mean("zzz", ["linger_ms", "acks"]) == "; there are linger_ms, acks"


class Cluster:
    settings = Settings()
    io = None
    routes = None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MAKE_PRODUCER(Cluster(), linger=5), "a producer has no option 'linger'; did you mean linger_ms?"),
        (lambda: MAKE_PRODUCER(Cluster(), ack="all"), "did you mean acks?"),
        (lambda: MAKE_CONSUMER(Cluster(), ["orders"], fetch_bites=5), "did you mean fetch_bytes?"),
        (lambda: MAKE_CONSUMER(Cluster(), ["orders"], autocommit=True), "did you mean auto_commit?"),
    ],
)
def test_a_misspelt_option(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
