"""A topic as a producer knows it, and which of its partitions a record goes to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from random import randrange

from rayqueue.client.producer.accumulator import ANY, BATCH_BYTES, KEY_BYTES, RECORD_BYTES, Accumulator
from rayqueue.client.producer.columns import ArrowColumns, Columns
from rayqueue.client.producer.partitioners import BY_KEY, STICKY, CustomPartitioner, KeyedPartitions
from rayqueue.errors import InvalidInputError, OversizedRecordError, UnknownPartitionError
from rayqueue.protocol.topics import TopicInfo


class Target:
    """One topic. Application threads ask it; the I/O thread tells it of new partitions."""

    def __init__(
        self, info: TopicInfo, partitioner: str | CustomPartitioner, max_batch_bytes: int, accumulator: Accumulator
    ) -> None:
        count = len(info.partitions)
        self.name = info.name
        self._max_batch_bytes = max_batch_bytes
        self.max_bytes = self._limit(info)
        """Of key, value and headers together."""
        # Not all producers begin with the first partition.
        turn = randrange(count)  # noqa: S311
        self.buffer = accumulator.add_topic(info.name, info.topic_id, count, info.settings.lanes, turn)
        self._bound(info)
        self._custom = None if isinstance(partitioner, str) else partitioner
        self._partitioner = partitioner if isinstance(partitioner, str) else ""
        self.keyed = self._by_key(count)
        """The partition of each key; None if it does not depend on the key alone."""
        self.sticks = self.keyed is not None or partitioner == STICKY
        """Records without a key go to ``ANY`` partition, a batch at a time."""
        self._count = count
        self._next = randrange(count)  # noqa: S311

    def changed(self, info: TopicInfo) -> None:
        """The topic has more partitions, or other limits. Never fewer partitions."""
        self.max_bytes = self._limit(info)
        self._bound(info)
        count = len(info.partitions)
        if count > self._count:
            self.buffer.grow(count)
            self.keyed = self._by_key(count)
            self._count = count

    def _by_key(self, partitions: int) -> KeyedPartitions | None:
        return KeyedPartitions(self._partitioner, partitions) if self._partitioner in BY_KEY else None

    def _bound(self, info: TopicInfo) -> None:
        self.buffer.bound(info.settings.max_backlog_records, info.settings.max_backlog_bytes)

    def _limit(self, info: TopicInfo) -> int:
        return min(info.settings.max_record_bytes, self._max_batch_bytes - BATCH_BYTES)

    @property
    def most_bytes(self) -> int:
        """Of key, value and headers of a record that also fits into an empty partition, if those are bounded."""
        bound = self.buffer.most_bytes
        if bound is None:
            return self.max_bytes
        return max(0, min(self.max_bytes, bound - BATCH_BYTES - RECORD_BYTES - 2 * KEY_BYTES))

    # -- one record ----------------------------------------------------------------------

    def choose(self, key: bytes | None, value: bytes | None) -> int:
        """The partition's number, or ``ANY``."""
        if self.keyed is not None:
            return ANY if key is None else self.keyed[key]
        if self._custom is not None:
            count = len(self.buffer.partitions)
            return self.check_partition(self._custom(key, value, count), "the partitioner's answer")
        return ANY if self.sticks else self._turn(1)

    def check_partition(self, number: int, what: str = "partition") -> int:
        if type(number) is not int:
            raise InvalidInputError(f"{what} is a whole number, not {number!r}")
        count = len(self.buffer.partitions)
        if not 0 <= number < count:
            raise UnknownPartitionError(f"{self.name} has partitions 0 to {count - 1}, not {number}", partition=number)
        return number

    def check_priority(self, priority: int) -> int:
        lanes = self.buffer.lanes
        if type(priority) is not int or not 0 <= priority < lanes:
            raise InvalidInputError(
                f"priority is from 0 to {lanes - 1} in {self.name}, which has {lanes} lanes, not {priority!r}",
                priority=priority,
            )
        return priority

    def oversized(self, size_bytes: int) -> OversizedRecordError:
        return OversizedRecordError(
            f"key, value and headers have {size_bytes} bytes; {self.name} takes {self.max_bytes}",
            size_bytes=size_bytes,
            limit=self.max_bytes,
        )

    # -- many ----------------------------------------------------------------------------

    def choose_many(
        self, values: Sequence[bytes | None], keys: Sequence[bytes | None] | None
    ) -> dict[int, Sequence[int]] | None:
        """The rows of each partition, or of ``ANY``; None if all go to ``ANY``."""
        if self._custom is not None:
            every = values if keys is None else keys
            chosen = [
                self.choose(None if keys is None else key, value) for key, value in zip(every, values, strict=True)
            ]
        elif self.keyed is None:
            return None if self.sticks else self._turns(len(values))
        elif keys is None:
            return None
        elif self.keyed.partitions == 1:  # also those without a key, in their order
            return {0: range(len(values))}
        elif None in keys:
            named = self.keyed.many([key for key in keys if key is not None])
            found = iter(named)
            chosen = [ANY if key is None else next(found) for key in keys]
        else:
            chosen = self.keyed.many(keys)  # type: ignore[arg-type]  # no None among them
        rows: dict[int, list[int]] = {number: [] for number in set(chosen)}
        for row, number in enumerate(chosen):
            rows[number].append(row)
        return dict(rows)

    def spread(self, columns: Columns | ArrowColumns) -> tuple[Mapping[int, Columns | ArrowColumns], list[int] | None]:
        """The columns of each partition, or of ``ANY``, and the order this leaves the records in, if it is another."""
        values, keys, keyed = columns.values, columns.keys, self.keyed
        if isinstance(columns, ArrowColumns):
            if keyed is not None and keyed.partitions > 1 and keys is not None:
                return columns.group(keyed.many)
            if self._custom is not None:
                values, keys = columns.values.to_pylist(), None if keys is None else columns.keys.to_pylist()
        rows = self.choose_many(values, keys)
        if rows is None or len(rows) == 1:
            return dict.fromkeys(rows or (ANY,), columns), None
        return {number: columns.take(each) for number, each in rows.items()}, list(chain(*rows.values()))

    def _turn(self, records: int) -> int:
        turn = self._next
        self._next = (turn + records) % len(self.buffer.partitions)
        return turn

    def _turns(self, records: int) -> dict[int, Sequence[int]]:
        count = len(self.buffer.partitions)
        first = self._turn(records)
        return {(first + row) % count: range(row, records, count) for row in range(min(count, records))}


class Targets(dict[str, Target]):
    """A producer's topics, by name, as the application's threads and the I/O thread have learnt them.

    Holds no producer, so that one can be let go.
    """

    def __init__(self, make: Callable[[TopicInfo], Target]) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self._make = make

    def learn(self, info: TopicInfo) -> Target:
        """Remember a topic as it is now."""
        with self.lock:
            target = self.get(info.name)
            if target is not None and target.buffer.topic_id == info.topic_id:
                target.changed(info)
            else:
                target = self[info.name] = self._make(info)
        return target

    def changed(self, info: TopicInfo) -> None:
        """If it is one of these."""
        target = self.get(info.name)
        if target is not None and info.topic_id == target.buffer.topic_id:
            target.changed(info)

    def gone(self, name: str, topic_id: int) -> None:
        """That topic was deleted. Another one may have its name: whoever sends next looks it up."""
        target = self.get(name)
        if target is not None and target.buffer.topic_id == topic_id:
            del self[name]
