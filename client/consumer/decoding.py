"""Decoding of values and keys: the polls of a consumer that was given deserializers.

The application's functions run in its own thread, without a lock: records are
looked at, decoded, and taken only then, as far as all of them could be read.
A record that cannot be read raises ``DeserializationError`` when it is the next
one, before it counts as handed out; ``Polling`` then does what ``on_corrupt``
says, for this record alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayqueue.client.consumer.poll import Block, Listener, Polling, Records
from rayqueue.client.consumer.reader import ConsumerTasks
from rayqueue.client.consumer.subscription import Stretch
from rayqueue.client.io import IoThread
from rayqueue.config import ConsumerSettings
from rayqueue.errors import DeserializationError, InvalidInputError
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from rayqueue.records.room import Room
from rayqueue.values import Decoder, decoder_of, form_of, shortened


class Decoding:
    """A consumer's deserializers."""

    def __init__(self, value: Decoder | None, key: Decoder | None) -> None:
        self._value = value
        self._key = key

    @classmethod
    def of(cls, model: Any, value_deserializer: Any, key_deserializer: Any) -> Decoding | None:
        """None if records are handed out as bytes."""
        if model is not None and value_deserializer is not None:
            raise InvalidInputError("model= and value_deserializer= both say how values are read: give one of them")
        if model is not None:
            value = decoder_of("model", form_of("model", model))
        else:
            value = decoder_of("value_deserializer", value_deserializer)
        key = decoder_of("key_deserializer", key_deserializer)
        return None if value is None and key is None else cls(value, key)

    def __call__(self, record: Record) -> Record[Any, Any]:
        """``DeserializationError`` if it cannot be read."""
        key: Any = record.key
        value: Any = record.value
        if key is not None and self._key is not None:
            key = _decoded(self._key, "key", key, record)
        if value is not None and self._value is not None:
            value = _decoded(self._value, "value", value, record)
        return Record(
            record.offset, record.timestamp, key, value, record.headers, record.lane, record.topic, record.partition
        )


def _decoded(decoder: Decoder, what: str, data: bytes, record: Record) -> Any:
    try:
        return decoder.decode(data)
    except Exception as error:
        place = TopicPartition(record.topic, record.partition)
        raise DeserializationError(
            f"{place} cannot be read at offset {record.offset}: its {what} of {len(data)} bytes is no {decoder.name}: "
            f"{shortened(error)}; seek to go on",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            end=record.offset + 1,
            record=record,
        ) from error


class DecodingPolling(Polling):
    """See the module's text."""

    def __init__(
        self,
        io: IoThread,
        core: ConsumerTasks,
        settings: ConsumerSettings,
        listener: Listener | None,
        decode: Decoding,
    ) -> None:
        super().__init__(io, core, settings, listener)
        self._decode = decode
        self._first: Record[Any, Any] | None = None
        """Of the block that is read record by record."""

    def decoded(self, records: Records) -> Records:
        return list(map(self._decode, records))

    def _take_some(self, most: int, room: Room | None) -> Records | None:
        while True:
            found = self._sub.look(most)
            if found is None:
                return None
            seen, records = found
            if room is not None:
                records = records[: room.fitting(records)[0]]
                if not records:
                    return None
            decoded: Records = []
            for record in records:
                try:
                    decoded.append(self._decode(record))
                except DeserializationError:
                    if not decoded:
                        self._sub.stuck = seen._replace(stop=seen.start + 1)
                        raise
                    break  # first what is before it
            if self._sub.take_seen(seen._replace(stop=seen.start + len(decoded))):
                if room is not None:
                    room.cut(records[: len(decoded)])
                return decoded
            # It went to another member meanwhile, or the application has sought.

    def _block(self) -> Block | None:
        block = super()._block()
        if block is None or isinstance(block, list):
            return block
        chunk = block.chunk
        try:
            self._first = self._decode(block.records[block.index])
        except DeserializationError:
            start = chunk.base + block.index
            self._sub.stuck = Stretch(block.assigned, block.epoch, block.lane, chunk, start, start + 1)
            raise
        return block

    def each(self, block: Block | None) -> Iterator[Record[Any, Any]]:
        if block is None or isinstance(block, list):
            yield from block or ()
            return
        records, sub, stamp = block.records, self._sub, block.stamp
        record, self._first = self._first, None
        for index in range(block.index, len(records)):
            if record is None:
                try:
                    record = self._decode(records[index])
                except DeserializationError:
                    return  # the next block begins with it, and there it is dealt with
            if sub.stamp != stamp:
                return  # something is more urgent, or this is not to be read any more
            block.index = index + 1
            yield record
            record = None
