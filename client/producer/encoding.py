"""Encoding of values and keys: a producer that was given serializers.

Everything is encoded in the call, before anything is accepted; from then on the
records are bytes, also for a partitioner of the application's own. A producer
without serializers is the plain ``Producer``, and pays nothing for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayqueue.client.arguments import show
from rayqueue.client.producer.columns import is_arrow, listed
from rayqueue.client.producer.delivery import Deliveries, Delivery, RecordMetadata
from rayqueue.client.producer.producer import Producer
from rayqueue.errors import InvalidInputError, SerializationError
from rayqueue.records import KeyT, ValueT
from rayqueue.values import Encoder, encoder_of, form_of, shortened


class EncodingProducer(Producer[ValueT, KeyT]):
    """Made by ``RayQueue.producer`` where it was given a model or serializers."""

    def __init__(
        self, rq: Any, *, model: Any = None, value_serializer: Any = None, key_serializer: Any = None, **options: Any
    ) -> None:
        if model is not None and value_serializer is not None:
            raise InvalidInputError("model= and value_serializer= both say how values are written: give one of them")
        if model is not None:
            value = encoder_of("model", form_of("model", model))
        else:
            value = encoder_of("value_serializer", value_serializer)
        self._values = _Column("value", value)
        self._keys = _Column("key", encoder_of("key_serializer", key_serializer))
        super().__init__(rq, **options)
        # What it is made of again where it is sent to.
        self._options = {
            "model": model,
            "value_serializer": value_serializer,
            "key_serializer": key_serializer,
            **options,
        }

    def send(self, topic: str, value: ValueT | None, *, key: KeyT | None = None, **options: Any) -> Delivery:
        encoded = self._values.one(topic, value)
        return super().send(topic, encoded, key=self._keys.one(topic, key), **options)

    async def send_async(
        self, topic: str, value: ValueT | None, *, key: KeyT | None = None, **options: Any
    ) -> RecordMetadata:
        encoded = self._values.one(topic, value)
        return await super().send_async(topic, encoded, key=self._keys.one(topic, key), **options)

    def send_many(self, topic: str, values: Any, *, keys: Any = None, **options: Any) -> Deliveries:
        encoded = self._values.all(topic, values)
        return super().send_many(topic, encoded, keys=self._keys.all(topic, keys), **options)

    async def send_many_async(
        self, topic: str, values: Any, *, keys: Any = None, **options: Any
    ) -> Sequence[RecordMetadata]:
        encoded = self._values.all(topic, values)
        return await super().send_many_async(topic, encoded, keys=self._keys.all(topic, keys), **options)


for _name in ("send", "send_async", "send_many", "send_many_async"):
    show(vars(EncodingProducer)[_name], as_=vars(Producer)[_name])


class _Column:
    """The values, or the keys, of a producer."""

    def __init__(self, what: str, encoder: Encoder | None) -> None:
        self._what = what
        self._encoder = encoder

    def one(self, topic: str, given: Any, row: int | None = None) -> Any:
        """As bytes. ``SerializationError`` if it cannot be written."""
        if given is None or self._encoder is None:
            return given
        try:
            made = self._encoder.encode(given)
        except Exception as error:
            raise self._refused(topic, given, row, shortened(error)) from error
        if not isinstance(made, (bytes, bytearray, memoryview)):
            raise self._refused(topic, given, row, f"it made {type(made).__name__} of it, not bytes")
        return made

    def all(self, topic: str, column: Any) -> Any:
        if column is None or self._encoder is None:
            return column
        if is_arrow(column):
            raise InvalidInputError(
                f"Arrow columns hold bytes: send them by a producer without {self._what}_serializer", topic=topic
            )
        return [self.one(topic, given, row) for row, given in enumerate(listed(f"{self._what}s", column))]

    def _refused(self, topic: str, given: Any, row: int | None, reason: str) -> SerializationError:
        assert self._encoder is not None  # noqa: S101  # or nothing would be refused
        kind = type(given).__name__
        where = {} if row is None else {"row": row}
        place = "" if row is None else f" in row {row}"
        return SerializationError(
            f"a {self._what} for {topic}{place}, of type {kind}, cannot be written as {self._encoder.name}: {reason}",
            topic=topic,
            type=kind,
            **where,
        )
