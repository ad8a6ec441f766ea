"""Results of a processing function: nothing, a value, a ``Result``, or several of them; and how they are sent.

Results of one batch are sent as columns, in the order of their records, one call
for each topic and kind of place. Whether each could be written is found before,
while it is known which record it is of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayqueue.client.producer.columns import check_headers
from rayqueue.client.producer.destination import Target
from rayqueue.errors import (
    InvalidInputError,
    OversizedRecordError,
    RayQueueError,
    TopicError,
    TransactionTooLargeError,
    UnknownPartitionError,
)
from rayqueue.records import HeadersIn, Record

UNWRITABLE = (InvalidInputError, TopicError, TransactionTooLargeError)
"""Why results cannot be written, however often that is tried."""


@dataclass(frozen=True, slots=True)
class Result:
    """One record to be written. Without ``topic`` it goes to the sink, without ``key`` it has none."""

    value: bytes | None
    key: bytes | None = None
    topic: str | None = None
    headers: HeadersIn = None
    partition: int | None = None


def results_of(returned: Any, record: Record, sink: str | None) -> list[Result]:
    """What a function has returned for a record. ``InvalidInputError`` if that cannot be sent."""
    if returned is None:
        return []
    many = returned if isinstance(returned, Iterable) and not isinstance(returned, bytes | str) else (returned,)
    found = [each if isinstance(each, Result) else _plain(each, record) for each in many]
    for each in found:
        if any(not isinstance(given, bytes | None) for given in (each.value, each.key)):
            raise InvalidInputError(f"a result's value and key are bytes, not {each!r}")
        if not isinstance(each.topic, str | None):
            raise InvalidInputError(f"a result's topic is a name, not {each.topic!r}")
        if each.topic is None and sink is None:
            raise InvalidInputError("there is no sink, so every result must say its topic: Result(value, topic=...)")
    return found


def _plain(value: Any, record: Record) -> Result:
    if not isinstance(value, bytes):
        raise InvalidInputError(
            f"a function returns None, bytes, a Result, or a list of them, not {type(value).__name__}"
        )
    return Result(value, record.key)


class Topics:
    """The topics that a loop writes to, as its producer knows them: what each of them takes."""

    def __init__(self, producer: Any, sink: str | None, named: Collection[str]) -> None:
        """``named``: by whoever has started the loop. That one of these is gone is the fault of no record."""
        self._producer = producer
        self._sink = sink
        self._named = named

    async def refusal(self, results: Sequence[Result]) -> RayQueueError | None:
        """Why one of these can never be written; None if nothing is known against them. Awaits steps only
        (``rayqueue.client.twins``). Raises what is no fault of theirs."""
        for each in results:
            topic = each.topic or self._sink or ""
            try:
                target = self._producer._targets.get(topic)
                if target is None:
                    target = await self._producer._learn(topic)
                try:
                    _check(target, each)
                except (OversizedRecordError, UnknownPartitionError):  # the topic may take more than it did
                    _check(await self._producer._learn(topic, refresh=True), each)
            except UNWRITABLE as error:
                if topic in self._named and not isinstance(error, InvalidInputError | UnknownPartitionError):
                    raise
                return error
        return None

    async def most_bytes(self, topic: str) -> int:
        """Of key, value and headers of a record together. Awaits steps only."""
        target: Target = self._producer._targets.get(topic) or await self._producer._learn(topic)
        return target.most_bytes


def _check(target: Target, result: Result) -> None:
    size_bytes = len(result.value or b"") + len(result.key or b"")
    if result.headers is not None:
        size_bytes += check_headers(result.headers)[1]
    if size_bytes > target.max_bytes:
        raise target.oversized(size_bytes)
    if result.partition is not None:
        target.check_partition(result.partition)


def send_all(tx: Any, results: Iterable[Result], sink: str | None) -> None:
    """All of them, as columns."""
    columns: dict[tuple[str, int | None], list[Result]] = {}
    for each in results:
        columns.setdefault((each.topic or sink or "", each.partition), []).append(each)
    for (topic, partition), some in columns.items():
        keyed = any(each.key is not None for each in some)
        headed = any(each.headers is not None for each in some)
        tx.send_many(
            topic,
            [each.value for each in some],
            keys=[each.key for each in some] if keyed else None,
            headers=[each.headers for each in some] if headed else None,
            partition=partition,
        )
