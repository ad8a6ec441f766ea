"""Topic handles: a topic with the form of its records, for producers and consumers of it.

    orders = rq.topic("orders", model=Order)

    with orders.producer() as producer:
        producer.send(Order(...))

A handle asks nobody anything; whether there is such a topic is told by what is
made of it. It may be passed into Ray tasks and actors, and so may a producer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, TypeVar

from typing_extensions import ParamSpec

from rayqueue.client.admin import TopicDescription
from rayqueue.client.arguments import explained, refuse_misfit, show, with_given
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.consumer.poll import Listener
from rayqueue.client.producer.partitioners import CustomPartitioner
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.transactions.transaction import Transaction
from rayqueue.client.twins import Twin, awaiting, blocking, part
from rayqueue.config import ConsumerSettings, ProducerSettings
from rayqueue.protocol.topics import TopicPartition, check_name
from rayqueue.records import KeyT, ValueT
from rayqueue.values import form_of

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
    @with_given
    async def producer(
        self,
        given: Mapping[str, Any],
        *,
        linger_ms: int | None = None,
        batch_bytes: int | None = None,
        in_flight_bytes: int | None = None,
        in_flight_batches: int | None = None,
        buffer_bytes: int | None = None,
        delivery_timeout_ms: int | None = None,
        on_full: Literal["block", "raise"] | None = None,
        acks: Literal["all", "leader", "none"] | None = None,
        compression: Literal["none", "lz4", "zstd"] | None = None,
        partitioner: Literal["consistent", "murmur2", "roundrobin", "sticky"] | CustomPartitioner | None = None,
        transactional_id: str | None = None,
        transaction_timeout_ms: int | None = None,
    ) -> TopicProducer[ValueT, KeyT]:
        """Send records to this topic."""
        forms = {"model": self._model, "key_serializer": self._key_model}
        made: Producer[Any, Any] = await part(self._rq.producer)(**forms, **given)
        return TopicProducer(made, self.name)

    producer_async = awaiting(producer)

    @blocking
    @explained(ConsumerSettings)
    @with_given
    async def consumer(
        self,
        given: Mapping[str, Any],
        group: str | None = None,
        *,
        partitions: Iterable[TopicPartition | tuple[str, int]] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        delivery: Literal["at_least_once", "at_most_once", "exactly_once"] = "at_least_once",
        auto_commit: bool = True,
        ack: Literal["poll", "record"] = "poll",
        listener: Listener | None = None,
        instance: str | None = None,
        client: str | None = None,
        pin: bool = False,
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        fetch_bytes: int | None = None,
        fetch_wait_ms: int | None = None,
        prefetch_bytes: int | None = None,
        max_poll_records: int | None = None,
        auto_commit_ms: int | None = None,
        session_timeout_ms: int | None = None,
        heartbeat_ms: int | None = None,
        max_poll_interval_ms: int | None = None,
        assignor: Literal["balanced", "sticky", "range", "roundrobin"] | None = None,
        start: Literal["earliest", "latest", "error"] | None = None,
        on_corrupt: Literal["raise", "skip", "set_aside"] | None = None,
        on_topic_deleted: Literal["raise", "drop"] | None = None,
        refresh_ms: int | None = None,
    ) -> Consumer[ValueT, KeyT]:
        """Receive its records, as a member of ``group`` or alone. ``partitions=``: these of its partitions only."""
        topics = () if partitions is not None else (self.name,)
        forms = {"model": self._model, "key_deserializer": self._key_model}
        made: Consumer[Any, Any] = await part(self._rq.consumer)(*topics, **{**forms, **given, "group": group})
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
