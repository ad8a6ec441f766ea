"""Topic handles: a topic with the form of its records, for producers and consumers of it.

    orders = rq.topic("orders", model=Order)

    with orders.producer() as producer:
        producer.send(Order(...))

A handle asks nobody anything; whether there is such a topic is told by what is
made of it. It may be passed into Ray tasks and actors, and so may a producer.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import Self, Unpack

from rayqueue.client.admin import TopicDescription
from rayqueue.client.arguments import hinted
from rayqueue.client.consumer import Consumer
from rayqueue.client.delivery import Deliveries, Delivery, RecordMetadata
from rayqueue.client.options import ConsumerOptions, ProducerOptions, SendOptions
from rayqueue.client.producer import OnDeliveries, OnDelivery, Producer
from rayqueue.protocol.topics import check_name
from rayqueue.records import KeyT, ValueT
from rayqueue.values import form_of

if TYPE_CHECKING:
    from rayqueue.client.connection import RayQueue


class Topic(Generic[ValueT, KeyT]):
    """Made by ``RayQueue.topic`` where it was given a model."""

    def __init__(self, rq: RayQueue, name: str, model: Any = None, key_model: Any = None) -> None:
        check_name("topic", name)
        form_of("model", model)
        form_of("key_model", key_model)
        self.name = name
        self._rq = rq
        self._model = model
        self._key_model = key_model

    def producer(self, **options: Unpack[ProducerOptions]) -> TopicProducer[ValueT, KeyT]:
        """Send records to this topic. Options are those of ``RayQueue.producer``."""
        made: Producer[Any, Any] = self._rq.producer(model=self._model, key_serializer=self._key_model, **options)
        return TopicProducer(made, self.name)

    def consumer(self, group: str | None = None, **options: Unpack[ConsumerOptions]) -> Consumer[ValueT, KeyT]:
        """Receive its records, as a member of ``group`` or alone. Options are those of ``RayQueue.consumer``."""
        topics = () if options.get("partitions") is not None else (self.name,)
        made: Consumer[Any, Any] = self._rq.consumer(
            *topics, group=group, model=self._model, key_deserializer=self._key_model, **options
        )
        return made

    def describe(self) -> TopicDescription:
        """As it is now: who leads, offsets and sizes of each partition."""
        return self._rq.topic(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Topic, (self._rq, self.name, self._model, self._key_model)

    def __repr__(self) -> str:
        value, key = form_of("model", self._model), form_of("key_model", self._key_model)
        return f"<Topic {self.name}: values {value.name}, keys {key.name}>"


class TopicProducer(Generic[ValueT, KeyT]):
    """A producer of one topic: as ``Producer``, without naming the topic."""

    def __init__(self, producer: Producer[ValueT, KeyT], topic: str) -> None:
        self._producer = producer
        self.topic = topic

    @hinted
    def send(
        self,
        value: ValueT | None,
        *,
        key: KeyT | None = None,
        on_delivery: OnDelivery | None = None,
        **options: Unpack[SendOptions],
    ) -> Delivery:
        """Accept a record; see ``Producer.send``."""
        return self._producer.send(self.topic, value, key=key, on_delivery=on_delivery, **options)

    @hinted
    async def send_async(
        self, value: ValueT | None, *, key: KeyT | None = None, **options: Unpack[SendOptions]
    ) -> RecordMetadata:
        """Send a record and wait until it is acknowledged."""
        return await self._producer.send_async(self.topic, value, key=key, **options)

    @hinted
    def send_many(
        self,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        partition: int | None = None,
        timestamps_ms: Any = None,
        on_delivery: OnDeliveries | None = None,
    ) -> Deliveries:
        """Accept many records, given as columns; see ``Producer.send_many``."""
        return self._producer.send_many(
            self.topic,
            values,
            keys=keys,
            headers=headers,
            priority=priority,
            partition=partition,
            timestamps_ms=timestamps_ms,
            on_delivery=on_delivery,
        )

    @hinted
    async def send_many_async(
        self,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        partition: int | None = None,
        timestamps_ms: Any = None,
    ) -> Sequence[RecordMetadata]:
        """Send many records, and wait until all are acknowledged."""
        return await self._producer.send_many_async(
            self.topic,
            values,
            keys=keys,
            headers=headers,
            priority=priority,
            partition=partition,
            timestamps_ms=timestamps_ms,
        )

    @hinted
    def flush(self, *, timeout_ms: int | None = None) -> None:
        """Wait until all that was accepted is acknowledged or has failed; raises what failed."""
        self._producer.flush(timeout_ms=timeout_ms)

    @hinted
    async def flush_async(self, *, timeout_ms: int | None = None) -> None:
        await self._producer.flush_async(timeout_ms=timeout_ms)

    @hinted
    def close(self, *, timeout_ms: int | None = None) -> None:
        """Accept nothing more, and wait for what was accepted; raises what failed."""
        self._producer.close(timeout_ms=timeout_ms)

    @hinted
    async def close_async(self, *, timeout_ms: int | None = None) -> None:
        await self._producer.close_async(timeout_ms=timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._producer.__exit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._producer.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{self.topic}: {self._producer!r}>"
