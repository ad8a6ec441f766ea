"""Producers, consumers and topics of a ``RayQueue``, typed by the form of their records.

The overloads are for editors and type checkers: a model, a form or a function
says what ``Record.value`` is, "str" is str, and what the names "json" and
"msgpack" give can be anything. Without any of them records are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from typing_extensions import Unpack

from rayqueue.client import admin
from rayqueue.client.arguments import check_topics, hinted
from rayqueue.values import SERIALIZERS, Deserializer, Model, Name, Serializer

if TYPE_CHECKING:
    from rayqueue.client.connection import RayQueue
    from rayqueue.client.consumer import Consumer
    from rayqueue.client.options import ConsumerOptions, ProducerOptions
    from rayqueue.client.producer import Producer
    from rayqueue.client.topic import Topic

_V = TypeVar("_V")
_K = TypeVar("_K")

_Topics = str | Iterable[str]
_Str = Literal["str"]
_Bytes = Literal["bytes"]
_AnyModel = Model[Any] | Name | None
_AnySerializer = Serializer[Any] | Name | None
_AnyDeserializer = Deserializer[Any] | Name | None


class Handles:
    """What ``RayQueue`` makes to send and receive."""

    # -- producers -------------------------------------------------------------------------

    @overload
    def producer(self, **options: Unpack[ProducerOptions]) -> Producer: ...
    @overload
    def producer(self, *, model: Model[_V], **options: Unpack[ProducerOptions]) -> Producer[_V]: ...
    @overload
    def producer(
        self, *, model: Model[_V], key_serializer: _Str, **options: Unpack[ProducerOptions]
    ) -> Producer[_V, str]: ...
    @overload
    def producer(
        self, *, model: Model[_V], key_serializer: Serializer[_K], **options: Unpack[ProducerOptions]
    ) -> Producer[_V, _K]: ...
    @overload
    def producer(self, *, value_serializer: _Str, **options: Unpack[ProducerOptions]) -> Producer[str]: ...
    @overload
    def producer(
        self, *, value_serializer: _Str, key_serializer: _Str, **options: Unpack[ProducerOptions]
    ) -> Producer[str, str]: ...
    @overload
    def producer(self, *, value_serializer: Serializer[_V], **options: Unpack[ProducerOptions]) -> Producer[_V]: ...
    @overload
    def producer(
        self, *, value_serializer: Serializer[_V], key_serializer: Serializer[_K], **options: Unpack[ProducerOptions]
    ) -> Producer[_V, _K]: ...
    @overload
    def producer(self, *, key_serializer: _Str, **options: Unpack[ProducerOptions]) -> Producer[bytes, str]: ...
    @overload
    def producer(
        self,
        *,
        model: _AnyModel = None,
        value_serializer: _AnySerializer = None,
        key_serializer: _AnySerializer = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Any, Any]: ...
    def producer(self, **options: Any) -> Producer[Any, Any]:
        """Send records. Options are those of ``ProducerSettings``: ``acks``, ``linger_ms`` and others.

        Values are bytes; or objects of ``model``, or whatever ``value_serializer`` makes bytes of: a name ("str",
        "json", "msgpack"), a form of ``rayqueue.values``, a model's class or a function. ``key_serializer`` is the same
        for keys.
        """
        if any(options.get(name) is not None for name in SERIALIZERS):
            from rayqueue.client.encoding import EncodingProducer

            return EncodingProducer(self, **options)
        from rayqueue.client.producer import Producer

        return Producer(self, **{name: given for name, given in options.items() if name not in SERIALIZERS})

    # -- consumers -------------------------------------------------------------------------

    @overload
    def consumer(self, *topics: _Topics, group: str | None = None, **options: Unpack[ConsumerOptions]) -> Consumer: ...
    @overload
    def consumer(
        self, *topics: _Topics, group: str | None = None, model: Model[_V], **options: Unpack[ConsumerOptions]
    ) -> Consumer[_V]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        model: Model[_V],
        key_deserializer: _Str,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[_V, str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        model: Model[_V],
        key_deserializer: Deserializer[_K],
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[_V, _K]: ...
    @overload
    def consumer(
        self, *topics: _Topics, group: str | None = None, value_deserializer: _Str, **options: Unpack[ConsumerOptions]
    ) -> Consumer[str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        value_deserializer: _Str,
        key_deserializer: _Str,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[str, str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        value_deserializer: Deserializer[_V],
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[_V]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        value_deserializer: Deserializer[_V],
        key_deserializer: Deserializer[_K],
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[_V, _K]: ...
    @overload
    def consumer(
        self, *topics: _Topics, group: str | None = None, key_deserializer: _Str, **options: Unpack[ConsumerOptions]
    ) -> Consumer[bytes, str]: ...
    @overload
    def consumer(
        self,
        *topics: _Topics,
        group: str | None = None,
        model: _AnyModel = None,
        value_deserializer: _AnyDeserializer = None,
        key_deserializer: _AnyDeserializer = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[Any, Any]: ...
    def consumer(self, *topics: _Topics, group: str | None = None, **options: Any) -> Consumer[Any, Any]:
        """Receive records of these topics, given one by one or as a list, as a member of ``group`` or alone.

        ``pattern=`` instead of topics reads all whose whole name matches this regular expression, also later ones.
        Options are those of ``ConsumerSettings`` and of ``Consumer``. Values are bytes; or objects of ``model``, or
        what ``value_deserializer`` makes of them: a name ("str", "json", "msgpack"), a form of ``rayqueue.values``, a
        model's class or a function. ``key_deserializer`` is the same for keys. What cannot be read goes the way that
        ``on_corrupt`` says.
        """
        from rayqueue.client.consumer import Consumer

        return Consumer(cast("RayQueue", self), check_topics(topics), group, **options)

    # -- topics ----------------------------------------------------------------------------

    @overload
    def topic(self, name: str) -> admin.TopicDescription: ...
    @overload
    def topic(self, name: str, *, model: Model[_V]) -> Topic[_V]: ...
    @overload
    def topic(self, name: str, *, model: Model[_V], key_model: _Str) -> Topic[_V, str]: ...
    @overload
    def topic(self, name: str, *, model: Model[_V], key_model: Model[_K]) -> Topic[_V, _K]: ...
    @overload
    def topic(self, name: str, *, model: _Str) -> Topic[str]: ...
    @overload
    def topic(self, name: str, *, model: _Str, key_model: _Str) -> Topic[str, str]: ...
    @overload
    def topic(self, name: str, *, model: _AnyModel = None, key_model: _AnyModel = None) -> Topic[Any, Any]: ...
    @hinted
    def topic(self, name: str, *, model: Any = None, key_model: Any = None) -> Any:
        """A topic as it is now: who leads, offsets and sizes of each partition.

        With ``model``, and ``key_model``, which say what its values and keys are: a handle to send to it and to receive
        from it (``Topic``). Both are a pydantic model, a ``msgspec.Struct``, a dataclass, a form of ``rayqueue.values``
        or the name of one.
        """
        if model is None and key_model is None:
            return admin.topic(cast("RayQueue", self), name)
        from rayqueue.client.topic import Topic

        return Topic(cast("RayQueue", self), name, model, key_model)
