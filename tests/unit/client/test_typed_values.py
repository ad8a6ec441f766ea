"""Types of records' values, as an editor and mypy know them: ``make types`` fails on each line that is not so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
from typing_extensions import assert_type

from rayqueue import Consumer, Producer, RayQueue, Record, values
from rayqueue.client.admin.admin import TopicDescription
from rayqueue.client.producer.topic import Topic, TopicProducer


@dataclass
class Order:
    number: int


class Event(msgspec.Struct):
    name: str


class Bill(pydantic.BaseModel):
    total: int


def from_bytes(data: bytes) -> Order:
    return Order(int(data))


def to_bytes(order: Order) -> bytes:
    return b"%d" % order.number


AVRO = values.avro('"string"')
PACKED = values.model(Event, "msgpack")


def consumers(rq: RayQueue) -> None:
    """Never called: only its types matter."""
    assert_type(rq.consumer("t"), Consumer[bytes, bytes])
    assert_type(rq.consumer("t").poll()[0].value, bytes | None)
    assert_type(rq.consumer(["t"], group="g", on_corrupt="skip").poll()[0].key, bytes | None)
    assert_type(rq.consumer("t", group="g", model=Order).poll()[0].value, Order | None)
    assert_type(rq.consumer("t", model=Order, max_poll_records=3).poll()[0].key, bytes | None)
    assert_type(rq.consumer("t", model=Event), Consumer[Event, bytes])
    assert_type(rq.consumer("t", model=Bill, key_deserializer="str"), Consumer[Bill, str])
    assert_type(rq.consumer("t", model=PACKED, key_deserializer=from_bytes), Consumer[Event, Order])
    assert_type(rq.consumer("t", model=AVRO).poll()[0].value, Any | None)
    assert_type(rq.consumer("t", value_deserializer="str"), Consumer[str, bytes])
    assert_type(rq.consumer("t", value_deserializer="str", key_deserializer="str"), Consumer[str, str])
    assert_type(rq.consumer("t", value_deserializer=from_bytes), Consumer[Order, bytes])
    assert_type(rq.consumer("t", value_deserializer=Order), Consumer[Order, bytes])
    assert_type(rq.consumer("t", value_deserializer=int).poll()[0].value, int | None)
    assert_type(rq.consumer("t", value_deserializer=from_bytes, key_deserializer=PACKED), Consumer[Order, Event])
    assert_type(rq.consumer("t", key_deserializer="str"), Consumer[bytes, str])
    assert_type(rq.consumer("t", value_deserializer="json").poll()[0].value, Any | None)
    assert_type(rq.consumer("t", value_deserializer="msgpack", key_deserializer="str"), Consumer[Any, Any])
    for record in rq.consumer("t", model=Order):
        assert_type(record, Record[Order, bytes])
    rq.consumer("t", value_deserializer="jason")  # type: ignore[call-overload]
    rq.consumer("t", model=5)  # type: ignore[call-overload]


async def awaited(rq: RayQueue) -> None:
    async with rq.consumer("t", model=Order) as consumer:
        assert_type(await consumer.poll_async(), list[Record[Order, bytes]])
        async for record in consumer:
            assert_type(record.value, Order | None)
    await rq.producer(model=Order).send_async("t", Event("x"))  # type: ignore[arg-type]


def producers(rq: RayQueue) -> None:
    """Never called: only its types matter."""
    assert_type(rq.producer(), Producer[bytes, bytes])
    assert_type(rq.producer(linger_ms=1), Producer[bytes, bytes])
    assert_type(rq.producer(model=Order), Producer[Order, bytes])
    assert_type(rq.producer(model=Bill, key_serializer="str", acks="all"), Producer[Bill, str])
    assert_type(rq.producer(model=PACKED, key_serializer=to_bytes), Producer[Event, Order])
    assert_type(rq.producer(value_serializer=to_bytes), Producer[Order, bytes])
    assert_type(rq.producer(value_serializer="str", key_serializer="str"), Producer[str, str])
    assert_type(rq.producer(key_serializer="str"), Producer[bytes, str])
    assert_type(rq.producer(value_serializer="json"), Producer[Any, Any])
    rq.producer(value_serializer=lambda value: str(value).encode()).send("t", {"any": "thing"})
    rq.producer(model=Order).send("t", Order(1), key=b"k")
    rq.producer(model=Order).send("t", None)
    rq.producer().send("t", "text")  # type: ignore[arg-type]
    rq.producer(model=Order).send("t", Event("x"))  # type: ignore[arg-type]
    rq.producer(model=Order).send("t", Order(1), key="k")  # type: ignore[arg-type]
    rq.producer(model=Order, linger=1)  # type: ignore[call-overload]


def topics(rq: RayQueue) -> None:
    """Never called: only its types matter."""
    assert_type(rq.topic("t"), TopicDescription)
    assert_type(rq.topic("t", model=Order), Topic[Order, bytes])
    assert_type(rq.topic("t", model=Order, key_model="str"), Topic[Order, str])
    assert_type(rq.topic("t", model=Order, key_model=Event).producer(), TopicProducer[Order, Event])
    assert_type(rq.topic("t", model="json"), Topic[Any, Any])
    assert_type(rq.topic("t", model=Order).consumer("g").poll()[0].value, Order | None)
    rq.topic("t", model=Order).producer().send(Event("x"))  # type: ignore[arg-type]


def plain(record: Record) -> None:
    """Without parameters it is what it has always been."""
    assert_type(record.value, bytes | None)
    assert_type(record.key, bytes | None)


def test_the_forms_of_this_page_are_real() -> None:
    assert PACKED.decode(PACKED.encode(Event("x"))) == Event("x")
    assert from_bytes(to_bytes(Order(7))) == Order(7)
