"""Factories of a ``RayQueue``: its producers, consumers and topics, typed by the form of their records.

The overloads are for editors and type checkers: a model, a form or a function
says what ``Record.value`` is, "str" is str, and what the names "json" and
"msgpack" give can be anything. Without any of them records are bytes. The first
overload spells the options out.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from typing_extensions import Unpack, overload

from rayqueue.client.admin.admin import Admin, TopicDescription
from rayqueue.client.arguments import check_topics, chosen, explained, with_given
from rayqueue.client.twins import awaiting, beside, blocking
from rayqueue.config import ConsumerSettings, ProducerSettings
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.topics import TopicSettings, check_name, declared
from rayqueue.records import KeyT, ValueT
from rayqueue.values import SERIALIZERS, Deserializer, Model, Name, Serializer

if TYPE_CHECKING:
    import re

    from rayqueue.client.consumer.consumer import Consumer
    from rayqueue.client.consumer.poll import Listener
    from rayqueue.client.handle import RayQueue
    from rayqueue.client.options import ConsumerOptions, ProducerOptions
    from rayqueue.client.process.handle import Processing
    from rayqueue.client.producer.partitioners import CustomPartitioner
    from rayqueue.client.producer.producer import Producer
    from rayqueue.client.producer.topic import Topic
    from rayqueue.client.queue.queue import JobQueue
    from rayqueue.protocol.topics import TopicPartition

_Topics = str | Iterable[str]
_Str = Literal["str"]
_AnyModel = Model[Any] | Name | None
_AnySerializer = Serializer[Any] | Name | None
_AnyDeserializer = Deserializer[Any] | Name | None


class Factories:
    """The calls of ``RayQueue`` that make producers, consumers, topics and queues."""

    async def _connection(self) -> object:
        """Connected from now on: nothing that is made then has to wait for that."""

    # -- producers -------------------------------------------------------------------------

    @overload
    def producer(
        self,
        *,
        model: Model[ValueT] | None = None,
        value_serializer: Serializer[ValueT] | None = None,
        key_serializer: Serializer[KeyT] | None = None,
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
    ) -> Producer[ValueT, KeyT]: ...
    @overload
    def producer(
        self,
        *,
        value_serializer: _Str,
        key_serializer: Serializer[KeyT] | None = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[str, KeyT]: ...
    @overload
    def producer(
        self, *, value_serializer: _Str, key_serializer: _Str, **options: Unpack[ProducerOptions]
    ) -> Producer[str, str]: ...
    @overload
    def producer(
        self,
        *,
        model: Model[ValueT] | None = None,
        value_serializer: Serializer[ValueT] | None = None,
        key_serializer: _Str,
        **options: Unpack[ProducerOptions],
    ) -> Producer[ValueT, str]: ...
    @overload
    def producer(
        self,
        *,
        model: _AnyModel = None,
        value_serializer: _AnySerializer = None,
        key_serializer: _AnySerializer = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Any, Any]: ...
    @blocking
    @explained(ProducerSettings)
    async def producer(self, **options: Any) -> Producer[Any, Any]:
        """Send records.

        Values are bytes; or objects of ``model``, or whatever ``value_serializer`` makes bytes of: a name ("str",
        "json", "msgpack"), a form of ``rayqueue.values``, a model's class or a function. ``key_serializer`` is the same
        for keys.

        With ``transactional_id`` it sends in transactions only (``Producer.transaction``). There is one producer of
        each id: a newer one fences the one before, so the name stays with the work, not with the process.
        """
        await self._connection()
        options = chosen(options)
        if options.keys() & SERIALIZERS.keys():
            from rayqueue.client.producer.encoding import EncodingProducer

            return EncodingProducer(self, **options)
        from rayqueue.client.producer.producer import Producer

        return Producer(self, **options)

    producer_async = awaiting(producer)

    # -- consumers -------------------------------------------------------------------------

    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        model: Model[ValueT] | None = None,
        value_deserializer: Deserializer[ValueT] | None = None,
        key_deserializer: Deserializer[KeyT] | None = None,
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
    ) -> Consumer[ValueT, KeyT]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        value_deserializer: _Str,
        key_deserializer: Deserializer[KeyT] | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[str, KeyT]: ...
    @overload
    def consumer(
        self, *topics: _Topics, value_deserializer: _Str, key_deserializer: _Str, **options: Unpack[ConsumerOptions]
    ) -> Consumer[str, str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        model: Model[ValueT] | None = None,
        value_deserializer: Deserializer[ValueT] | None = None,
        key_deserializer: _Str,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[ValueT, str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        model: _AnyModel = None,
        value_deserializer: _AnyDeserializer = None,
        key_deserializer: _AnyDeserializer = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[Any, Any]: ...
    @blocking
    @explained(ConsumerSettings)
    async def consumer(self, *topics: _Topics, **options: Any) -> Consumer[Any, Any]:
        """Receive records of these topics, given one by one or as a list, as a member of ``group`` or alone.

        ``pattern=`` instead of topics reads all whose whole name matches this regular expression, also later ones;
        ``partitions=`` just these. Values are bytes; or objects of ``model``, or what ``value_deserializer`` makes of
        them: a name ("str", "json", "msgpack"), a form of ``rayqueue.values``, a model's class or a function.
        ``key_deserializer`` is the same for keys. What cannot be read goes the way that ``on_corrupt`` says.

        Of transactions only what is committed is seen; ``isolation="read_uncommitted"`` sees all that was sent, at
        once, also what is aborted. Positions of ``delivery="exactly_once"`` are committed in transactions
        (``Transaction.commit_offsets``).
        """
        from rayqueue.client.consumer.consumer import Consumer, opened

        await self._connection()
        return await opened(Consumer(cast("RayQueue", self), check_topics(topics), **chosen(options)))

    consumer_async = awaiting(consumer)

    # -- topics ----------------------------------------------------------------------------

    @overload
    def topic(self, name: str) -> TopicDescription: ...
    @overload
    def topic(self, name: str, *, model: Model[ValueT], key_model: Model[KeyT] = ...) -> Topic[ValueT, KeyT]: ...
    @overload
    def topic(self, name: str, *, model: Model[ValueT], key_model: _Str) -> Topic[ValueT, str]: ...
    @overload
    def topic(self, name: str, *, model: _Str, key_model: Model[KeyT] = ...) -> Topic[str, KeyT]: ...
    @overload
    def topic(self, name: str, *, model: _Str, key_model: _Str) -> Topic[str, str]: ...
    @overload
    def topic(self, name: str, *, model: _AnyModel = None, key_model: _AnyModel = None) -> Topic[Any, Any]: ...
    @blocking
    async def topic(self, name: str, *, model: Any = None, key_model: Any = None) -> Any:
        """A topic as it is now: who leads, offsets and sizes of each partition.

        With ``model``, and ``key_model``, which say what its values and keys are: a handle to send to it and to receive
        from it (``Topic``). Both are a pydantic model, a ``msgspec.Struct``, a dataclass, a form of ``rayqueue.values``
        or the name of one.
        """
        if model is None and key_model is None:
            return await cast("RayQueue", self)._admin(Admin.topic, name)
        from rayqueue.client.producer.topic import Topic

        return Topic(cast("RayQueue", self), name, model, key_model)

    topic_async = awaiting(topic)

    # -- work queues -----------------------------------------------------------------------

    @blocking
    @explained(TopicSettings)
    @with_given
    async def queue(
        self,
        given: Mapping[str, Any],
        name: str,
        *,
        model: Any = None,
        key_model: Any = None,
        result_model: Any = None,
        create: bool = True,
        partitions: int = 1,
        replication: int = 3,
        lanes: int = 1,
        lease_ms: int = 30_000,
        max_lease_ms: int = 43_200_000,
        max_deliveries: int | None = 5,
        retry_backoff_ms: int = 1_000,
        retry_backoff_max_ms: int = 300_000,
        dead_letter: bool = True,
        ordered_by_key: bool = False,
        fair_by_key: bool = False,
        dedupe_window_ms: int = 300_000,
        result_ttl_ms: int = 3_600_000,
        max_leased: int = 50_000,
        max_results_bytes: int | None = None,
        max_record_bytes: int = 1_000_000,
        max_backlog_bytes: int | None = None,
        max_backlog_records: int | None = None,
    ) -> JobQueue[Any, Any]:
        """A work queue of this name, made if there is none: jobs that are leased to workers, retried, and kept as dead
        letters when all retries failed.

        A queue that is there is taken as it is; ``TopicDiffersError`` says in which of the settings that were given
        here it differs. ``create=False``: ``UnknownTopicError`` if there is none.

        Jobs' values and keys are bytes; or what ``model`` and ``key_model`` write and read: a pydantic model, a
        ``msgspec.Struct``, a dataclass, a form of ``rayqueue.values`` or the name of one ("str", "json", "msgpack").
        ``result_model`` is the same for results.

        >>> queue = rq.queue("emails", model="json", max_deliveries=3)
        >>> queue.put({"to": "ann@example.com"})
        <JobHandle emails 0-0>
        >>> [job] = queue.get()
        >>> job.value
        {'to': 'ann@example.com'}
        >>> job.ack()
        """
        from rayqueue.client.queue.queue import JobQueue

        made: JobQueue[Any, Any] = JobQueue(cast("RayQueue", self), name, model, key_model, result_model)
        if create:
            settings = {key: given[key] for key in declared(TopicSettings) if key in given} | {"queue": True}
            await cast("RayQueue", self)._admin(Admin.create_topic, name, settings, if_missing=True)
        await made.open()
        return made

    queue_async = awaiting(queue)

    # -- read, process, write --------------------------------------------------------------

    @blocking
    async def process(
        self,
        source: str | Sequence[str],
        sink: str | None,
        function: Callable[..., Any],
        *,
        group: str,
        batch: int = 500,
        workers: int = 0,
        retries: int = 3,
        retry_backoff_ms: int = 100,
        dead_letters: str | None = None,
        state: str | None = None,
        transaction_timeout_ms: int = 30_000,
        idle_ms: int | None = None,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Processing:
        """Put every record of ``source`` through ``function``, once, and its results into ``sink``. In the background.

        ``function(record)`` returns None, bytes, a ``Result`` (of which the topic may be another one), or a list of
        them; it may be a coroutine. Up to ``batch`` records, their results and the group's positions are one
        transaction. A function that raises, or returns what its topic does not take, is called ``retries`` times more;
        then the record goes to the topic ``dead_letters``, or without one the loop ends with the error. That ``sink``
        itself is gone ends it at once.

        ``workers``: so many Ray actors, made with ``ray_options``, which Ray restarts wherever they die; 0: a thread
        of this process. They end by ``stop`` of what this returns, or after ``idle_ms`` without records.

        ``state``: a topic with as many partitions as the source. ``function(record, state)`` has a mapping of bytes
        to bytes, of the record's partition, that is committed with the results and is there again after a restart.

        >>> with rq.process("orders", "invoices", lambda record: b"to pay: " + record.value, group="billing") as run:
        ...     run.wait(timeout_ms=1000)
        """
        from rayqueue.client.process.handle import LocalWorker, Processing, RayWorkers, check
        from rayqueue.client.process.settings import ProcessSettings

        settings = ProcessSettings(
            check_topics((source,)),
            *(sink, check_name("group", group), batch, retries, retry_backoff_ms, dead_letters, state),
            *(transaction_timeout_ms, idle_ms, uuid.uuid4().hex[:12]),
        )
        check(settings, function, workers)
        rq = cast("RayQueue", self)
        await self._connection()
        infos = [await rq._admin(Admin.topic, name) for name in (*settings.sources, sink, dead_letters, state) if name]
        if state is not None and len(infos[-1].partitions) < len(infos[0].partitions):
            raise InvalidInputError(
                f"the state of {settings.sources[0]}, {state}, has {len(infos[-1].partitions)} partitions, and needs "
                f"{len(infos[0].partitions)}"
            )
        if workers == 0:
            return Processing(LocalWorker(rq, settings, function), settings)
        made = await beside(RayWorkers, rq, settings, function, workers, dict(ray_options or {}))
        return Processing(made, settings)

    process_async = awaiting(process)
