"""Producers with serializers: what they accept is bytes, and what cannot be written is told before it is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import pickle  # noqa: TID251 - what Ray does with a producer
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from rayqueue import values
from rayqueue.client.factories import Factories
from rayqueue.client.producer.encoding import EncodingProducer
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.topic import Topic, TopicProducer
from rayqueue.errors import ConfigError, DeliveryFailedError, InvalidInputError, RayQueueError, SerializationError
from rayqueue.records import Record, RecordBatch
from tests.unit.client.producer.test_producer import Cluster

Make = Callable[..., Any]


class Queue(Cluster, Factories):
    """A connection, as far as producers need one."""

    def read(self) -> list[Record]:
        payloads = [payload for each in self.partitions for payload in each.log.payloads]
        return [record for payload in payloads for record in RecordBatch.decode(payload).records()]


@dataclass
class Order:
    number: int


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def producer(queue: Queue, **options: Any) -> Any:
        made.append(queue.producer(**options))
        return made[-1]

    yield producer
    for each in made:
        with contextlib.suppress(DeliveryFailedError):
            each.close(timeout_ms=5000)


def test_every_way_to_send(make: Make) -> None:
    queue = Queue()
    producer = make(queue, model=Order, key_serializer="str", linger_ms=0)
    producer.send("orders", Order(1), key="a").result(timeout_ms=5000)
    producer.send_many("orders", (Order(number) for number in (2, 3)), keys=["b", None]).result(timeout_ms=5000)

    async def awaited() -> None:
        await producer.send_async("orders", Order(4), key="c")
        await producer.send_many_async("orders", [Order(5), None], keys=["d", "e"])

    asyncio.run(awaited())
    producer.send("orders", None, key="f").result(timeout_ms=5000)
    assert [(record.key, record.value) for record in queue.read()] == [
        (b"a", b'{"number":1}'),
        (b"b", b'{"number":2}'),
        (None, b'{"number":3}'),
        (b"c", b'{"number":4}'),
        (b"d", b'{"number":5}'),
        (b"e", None),
        (b"f", None),
    ]


def test_a_partitioner_of_the_application_sees_bytes(make: Make) -> None:
    queue = Queue(partitions=2)
    seen: list[Any] = []

    def choose(key: bytes | None, value: bytes | None, partitions: int) -> int:
        seen.append((key, value))
        return 1

    producer = make(queue, value_serializer="json", key_serializer="str", partitioner=choose)
    producer.send("orders", [1], key="k").result(timeout_ms=5000)
    assert seen == [(b"k", b"[1]")]
    assert queue.values() == [[], [b"[1]"]]


def boom(value: Any) -> bytes:
    raise RecursionError("too deep")


def own(value: Any) -> bytes:
    raise InvalidInputError("an error of ours, from a function of theirs")


@pytest.mark.parametrize(
    ("options", "value", "key", "says"),
    [
        ({"model": Order}, {"number": 1}, None, "a value for orders.*of type dict, cannot be written as Order"),
        ({"value_serializer": "str"}, b"bytes", None, "of type bytes, cannot be written as str"),
        ({"value_serializer": "json"}, object(), None, "of type object, cannot be written as json"),
        ({"value_serializer": "msgpack"}, 2**70, None, "of type int"),
        ({"key_serializer": "str"}, b"fine", 5, "a key for orders.*of type int"),
        ({"model": Order, "key_serializer": "json"}, Order(1), {1: object()}, "a key for orders"),
        ({"value_serializer": boom}, "x", None, "boom: RecursionError: too deep"),
        ({"value_serializer": own}, "x", None, "own: InvalidInputError"),
        ({"value_serializer": lambda value: "text"}, "x", None, "it made str of it, not bytes"),
        ({"value_serializer": lambda value: None}, "x", None, "it made NoneType of it, not bytes"),
    ],
)
def test_what_cannot_be_written_is_told_at_once_and_nothing_is_accepted(
    make: Make, options: Any, value: Any, key: Any, says: str
) -> None:
    queue = Queue()
    producer = make(queue, **options)

    def sends() -> Iterator[Callable[[], Any]]:
        good = Order(1) if options.get("model") else None
        yield lambda: producer.send("orders", value, key=key)
        yield lambda: asyncio.run(producer.send_async("orders", value, key=key))
        yield lambda: producer.send_many("orders", [good, value], keys=[None, key])
        yield lambda: asyncio.run(producer.send_many_async("orders", [good, value], keys=[None, key]))

    for row, send in zip((None, None, 1, 1), sends(), strict=True):
        with pytest.raises(SerializationError, match=says) as caught:
            send()
        assert caught.value.details["topic"] == "orders"
        assert caught.value.details.get("row") == row
        assert isinstance(caught.value, InvalidInputError)
    producer.flush(timeout_ms=5000)
    assert producer._accumulator.used_bytes == 0
    assert queue.values() == [[]]


def test_what_is_no_column_is_refused(make: Make) -> None:
    producer = make(Queue(), value_serializer="json", key_serializer="str")
    for wrong in ({"a": 1}, "text", b"bytes", 5):
        with pytest.raises(InvalidInputError, match="values is a column"):
            producer.send_many("orders", wrong)
    with pytest.raises(InvalidInputError, match="Arrow columns hold bytes"):
        producer.send_many("orders", pa.array([b"1"]))
    with pytest.raises(InvalidInputError, match="Arrow columns hold bytes"):
        asyncio.run(producer.send_many_async("orders", ["1"], keys=pa.array([b"1"])))


def test_arrow_goes_on_where_only_keys_have_a_serializer(make: Make) -> None:
    queue = Queue()
    producer = make(queue, key_serializer="str")
    producer.send_many("orders", pa.array([b"1", b"2"])).result(timeout_ms=5000)
    assert queue.values() == [[b"1", b"2"]]


def test_bytes_are_the_plain_producer(make: Make) -> None:
    """What costs nothing is not there."""
    queue = Queue()
    for options in ({}, {"model": None}, {"value_serializer": None, "key_serializer": None}):
        assert type(make(queue, **options)) is Producer
    assert type(make(queue, value_serializer="bytes")) is EncodingProducer
    with pytest.raises(InvalidInputError, match="value_serializer='str'"):
        make(queue).send("orders", "text")
    with pytest.raises(InvalidInputError, match="key_serializer='json'"):
        make(queue).send("orders", b"text", key=5)


def test_mistakes(make: Make) -> None:
    queue = Queue()
    with pytest.raises(InvalidInputError, match="both say how values are written"):
        make(queue, model=Order, value_serializer="json")
    with pytest.raises(InvalidInputError, match="model is a pydantic model"):
        make(queue, model=lambda value: value)
    with pytest.raises(InvalidInputError, match="value_serializer is a function"):
        make(queue, value_serializer="jason")
    with pytest.raises(ConfigError, match="did you mean value_serializer"):
        make(queue, value_serialiser="json")
    with pytest.raises(ConfigError, match="did you mean partition"):
        make(queue, model=Order).send("orders", Order(1), partitions=1)


class Elsewhere(Queue):
    """Made again where it arrives, as a handle is."""

    def __reduce__(self) -> Any:
        return Elsewhere, ()


@pytest.mark.parametrize(
    "options",
    [
        {"model": Order, "key_serializer": "str"},
        {"model": values.model(Order, "msgpack"), "key_serializer": "str"},
        {"value_serializer": values.avro({"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]})},
    ],
)
def test_a_producer_is_sent_with_its_serializers(make: Make, options: Any) -> None:
    producer = make(Elsewhere(), linger_ms=7, **options)
    there = pickle.loads(pickle.dumps(producer))
    value: Any = Order(1) if "model" in options else {"n": 1}
    key = "k" if "key_serializer" in options else None
    with there:
        assert type(there) is EncodingProducer
        assert there.settings.linger_ms == 7
        there.send("orders", value, key=key)
    [record] = there._rq.read()
    producer.send("orders", value, key=key).result(timeout_ms=5000)
    [expected] = producer._rq.read()
    assert (record.key, record.value) == (expected.key, expected.value)


# -- topics ------------------------------------------------------------------------------------


def test_a_topics_producer_sends_to_it(make: Make) -> None:
    queue = Elsewhere()
    orders = queue.topic("orders", model=Order, key_model="str")
    assert isinstance(orders, Topic)
    assert repr(orders) == "<Topic orders: values Order (json), keys str>"
    with orders.producer(linger_ms=1) as producer:
        assert isinstance(producer, TopicProducer)
        producer.send(Order(1), key="a", headers={"h": b"v"}, timestamp_ms=5)
        producer.send_many([Order(2), Order(3)], keys=["b", "c"]).result(timeout_ms=5000)
        producer.flush()
    assert [record.value for record in queue.read()] == [b'{"number":1}', b'{"number":2}', b'{"number":3}']
    first = queue.read()[0]
    assert (first.key, first.headers, first.timestamp) == (b"a", (("h", b"v"),), 5)

    async def awaited() -> None:
        async with pickle.loads(pickle.dumps(orders)).producer() as other:
            assert (await other.send_async(Order(4), key="d")).offset == 0
            assert len(await other.send_many_async([Order(5)], keys=["e"], priority=0)) == 1
            await other.flush_async()

    asyncio.run(awaited())
    with pickle.loads(pickle.dumps(orders.producer())) as third:
        assert third.topic == "orders"
        assert third.send(Order(6)).result(timeout_ms=5000).offset == 0


def test_mistakes_with_topics() -> None:
    queue = Queue()
    with pytest.raises(InvalidInputError, match="key_model is a pydantic model"):
        queue.topic("orders", model=Order, key_model=len)  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="did you mean key_model"):
        queue.topic("orders", model=Order, key_modle="str")  # type: ignore[call-overload]
    with pytest.raises(RayQueueError):
        queue.topic("no such name!", model=Order)
    with queue.topic("orders", model=Order).producer() as producer:
        with pytest.raises(SerializationError, match="for orders, of type dict"):
            producer.send({"number": 1})  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="by name only"):
            producer.send(Order(1), b"key")  # type: ignore[call-arg]
