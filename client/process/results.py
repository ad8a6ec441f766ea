"""Results of a processing function: nothing, a value, a ``Result``, or several of them; and how they are sent.

Results of one batch are sent as columns, in the order of their records, one call
for each topic and kind of place.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rayqueue.errors import InvalidInputError
from rayqueue.records import HeadersIn, Record

MAX_REASON = 1000


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
        if each.topic is None and sink is None:
            raise InvalidInputError("there is no sink, so every result must say its topic: Result(value, topic=...)")
    return found


def _plain(value: Any, record: Record) -> Result:
    if not isinstance(value, bytes):
        raise InvalidInputError(
            f"a function returns None, bytes, a Result, or a list of them, not {type(value).__name__}"
        )
    return Result(value, record.key)


def dead_letter(record: Record, error: BaseException, attempts: int, topic: str) -> Result:
    """A record that was given up: as it was, with where it was and why in its headers."""
    reason = "".join(traceback.format_exception_only(error)).strip()[:MAX_REASON]
    told = (
        ("dead-letter-topic", record.topic.encode()),
        ("dead-letter-partition", b"%d" % record.partition),
        ("dead-letter-offset", b"%d" % record.offset),
        ("dead-letter-attempts", b"%d" % attempts),
        ("dead-letter-reason", reason.encode()),
    )
    return Result(record.value, record.key, topic, (*record.headers, *told))


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
