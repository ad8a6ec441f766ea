"""Topic handles: a topic with the form of its records, for producers and consumers of it.

    orders = rq.topic("orders", model=Order)

    with orders.producer() as producer:
        producer.send(Order(...))

A handle asks nobody anything; whether there is such a topic is told by what is
made of it. It may be passed into Ray tasks and actors, and so may a producer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, TypeVar

from typing_extensions import ParamSpec, Unpack

from rayqueue.client.admin.admin import TopicDescription
from rayqueue.client.arguments import explained, passing_on, refuse_misfit, show
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.factories import Factories
from rayqueue.client.options import ProducerOptions, TopicConsumerOptions
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.transactions.transaction import Transaction
from rayqueue.client.twins import Twin, awaiting, blocking, part
from rayqueue.config import ConsumerSettings, ProducerSettings
from rayqueue.protocol.topics import check_name
from rayqueue.records import KeyT, ValueT
from rayqueue.values import DESERIALIZERS, SERIALIZERS, form_of

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue

_P = ParamSpec("_P")
_R = TypeVar("_R")


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

    @blocking
    @explained(ProducerSettings)
    @passing_on(Factories.producer, omit=SERIALIZERS)
    async def producer(self, **options: Unpack[ProducerOptions]) -> TopicProducer[ValueT, KeyT]:
        """Send records to this topic."""
        made = await part(self._rq.producer)(model=self._model, key_serializer=self._key_model, **options)
        return TopicProducer(made, self.name)

    producer_async = awaiting(producer)

    @blocking
    @explained(ConsumerSettings)
    @passing_on(Factories.consumer, omit=DESERIALIZERS)
    async def consumer(
        self, group: str | None = None, **options: Unpack[TopicConsumerOptions]
    ) -> Consumer[ValueT, KeyT]:
        """Receive its records, as a member of ``group`` or alone. ``partitions=``: these of its partitions only."""
        topics = () if options.get("partitions") is not None else (self.name,)
        forms = {"model": self._model, "key_deserializer": self._key_model}
        made: Consumer[Any, Any] = await part(self._rq.consumer)(*topics, **{**forms, **options, "group": group})
        return made

    consumer_async = awaiting(consumer)

    @blocking
    async def describe(self) -> TopicDescription:
        """As it is now: who leads, offsets and sizes of each partition."""
        return await part(self._rq.topic)(self.name)

    describe_async = awaiting(describe)

    def __reduce__(self) -> tuple[Any, ...]:
        return Topic, (self._rq, self.name, self._model, self._key_model)

    def __repr__(self) -> str:
        value, key = form_of("model", self._model), form_of("key_model", self._key_model)
        return f"<Topic {self.name}: values {value.name}, keys {key.name}>"


def _of_topic(
    method: Callable[Concatenate[Producer[ValueT, KeyT], str, _P], _R],
) -> Callable[Concatenate[TopicProducer[ValueT, KeyT], _P], _R]:
    """A producer's method, for its one topic."""
    name = method.__name__

    def call(self: TopicProducer[ValueT, KeyT], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return getattr(self._producer, name)(self.topic, *args, **kwargs)  # type: ignore[no-any-return]
        except TypeError:
            refuse_misfit(call, (self, *args), kwargs)
            raise  # it is from within

    call.__name__, call.__qualname__ = name, f"TopicProducer.{name}"
    show(call, method, omit=1)
    return call


class TopicProducer(Twin, Generic[ValueT, KeyT]):
    """A producer of one topic: as ``Producer``, without naming the topic."""

    def __init__(self, producer: Producer[ValueT, KeyT], topic: str) -> None:
        self._producer = producer
        self.topic = topic

    send = _of_topic(Producer.send)  # type: ignore[arg-type]  # for its **unknown, which cannot be a topic
    send_async = _of_topic(Producer.send_async)
    send_many = _of_topic(Producer.send_many)
    send_many_async = _of_topic(Producer.send_many_async)

    def transaction(self, *, wait: bool = True, wait_visible: bool = True) -> Transaction:
        """As ``Producer.transaction``: what is sent in it names its topics, of which this may be one."""
        return self._producer.transaction(wait=wait, wait_visible=wait_visible)

    @blocking
    async def flush(self, *, timeout_ms: int | None = None) -> None:
        """Wait until all that was accepted is acknowledged or has failed; raises what failed."""
        await part(self._producer.flush)(timeout_ms=timeout_ms)

    flush_async = awaiting(flush)

    @blocking
    async def close(self, *, timeout_ms: int | None = None) -> None:
        """Accept nothing more, and wait for what was accepted; raises what failed."""
        await part(self._producer.close)(timeout_ms=timeout_ms)

    close_async = awaiting(close)

    async def _leave(self, kind: type[BaseException] | None) -> None:
        await self._producer._leave(kind)

    def __repr__(self) -> str:
        return f"<{self.topic}: {self._producer!r}>"
