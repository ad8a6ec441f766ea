"""Dead letters: records that were given up, as they were, with where they were and why in their headers.

A letter always fits into its topic. What is too long is cut, and the header
``dead-letter-cut`` says what, and how long it was: the record is at its place
in the source for as long as that keeps it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from rayqueue.client.process.results import Result
from rayqueue.client.producer.columns import check_headers
from rayqueue.records import Record

MAX_REASON_BYTES = 4000
SHORT_REASON_BYTES = 200
"""So much of the reason is left before anything of the record goes."""

_Headers = tuple[tuple[str, bytes], ...]


def dead_letter(record: Record, error: BaseException, attempts: int, topic: str, most_bytes: int) -> Result:
    """``most_bytes``: of key, value and headers together, what the topic takes."""
    return next(each for each in _letters(record, error, attempts, topic, most_bytes) if _size(each) <= most_bytes)


def _letters(record: Record, error: BaseException, attempts: int, topic: str, most_bytes: int) -> Iterator[Result]:
    """From the whole to nothing."""
    place: _Headers = (
        ("dead-letter-topic", record.topic.encode()),
        ("dead-letter-partition", b"%d" % record.partition),
        ("dead-letter-offset", b"%d" % record.offset),
        ("dead-letter-attempts", b"%d" % attempts),
    )
    reason = _reason(error)
    key, value, own = record.key, record.value, tuple(record.headers)

    def letter(reason_bytes: int, value: bytes | None, key: bytes | None, headers: _Headers, *cuts: bytes) -> Result:
        told = (*place, ("dead-letter-reason", _shortened(reason, reason_bytes)))
        cut = (("dead-letter-cut", b", ".join(cuts)),) if cuts else ()
        return Result(value, key, topic, (*headers, *told, *cut))

    whole = letter(MAX_REASON_BYTES, value, key, own)
    yield whole
    yield letter(max(SHORT_REASON_BYTES, len(reason) + most_bytes - _size(whole)), value, key, own)
    cuts = [b"value of %d bytes" % len(value or b"")]
    for kept_key, kept_headers in ((key, own), (key, ()), (None, ())):
        if kept_headers != own and own:
            cuts[1:] = [b"headers of %d bytes" % check_headers(own)[1]]
        if kept_key is None and key is not None:
            cuts.append(b"key of %d bytes" % len(key))
        empty = letter(SHORT_REASON_BYTES, None if value is None else b"", kept_key, kept_headers, *cuts)
        room = most_bytes - _size(empty)
        yield letter(SHORT_REASON_BYTES, value and value[: max(room, 0)], kept_key, kept_headers, *cuts)
    yield Result(None, None, topic, place)
    yield Result(None, None, topic)


def _size(letter: Result) -> int:
    return len(letter.value or b"") + len(letter.key or b"") + check_headers(letter.headers)[1]


def _reason(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception_only(error)).strip()
    return _shortened(text.encode(errors="backslashreplace"), MAX_REASON_BYTES)


def _shortened(text: bytes, most_bytes: int) -> bytes:
    """Not in the middle of a character."""
    return text if len(text) <= most_bytes else text[:most_bytes].decode(errors="ignore").encode()
