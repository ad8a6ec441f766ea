"""Values: records as JSON has them, in both directions.

A value comes in one of three forms: ``value``, any JSON, which is stored as its
JSON text; ``text``, which is stored as UTF-8; ``base64``, any bytes. It goes out
in one of the same three: the one that is asked for, or the first that fits.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rayqueue.errors import InvalidInputError
from rayqueue.gateway.operations import MAX_RECORDS, Columns
from rayqueue.protocol.topics import MAX_NAME
from rayqueue.records import Headers, Record

Form = Literal["auto", "json", "text", "base64"]
Int64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Base64 = Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]

_T = TypeVar("_T")
_C = TypeVar("_C")

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE = bytes.maketrans(b"{}", b"[]")

# Asked of every record of a batch: in C.
_VALUE, _TEXT, _BASE64 = attrgetter("value"), attrgetter("text"), attrgetter("base64")
_KEY, _KEY_BASE64 = attrgetter("key"), attrgetter("key_base64")
_HEADERS, _HEADERS_BASE64 = attrgetter("headers"), attrgetter("headers_base64")
_PRIORITY, _PARTITION, _TIMESTAMP = attrgetter("priority"), attrgetter("partition"), attrgetter("timestamp_ms")


class Value(Struct, forbid_unknown_fields=True, gc=False):
    """A value, in one of its three forms."""

    value: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: Base64 | UnsetType = UNSET


class Contents(Value, forbid_unknown_fields=True, gc=False):
    """Value, key and headers, of a record or a job."""

    key: str | None = None
    key_base64: Base64 | None = None
    headers: dict[str, str] | None = None
    headers_base64: dict[str, Base64] | None = None
    priority: Annotated[int, Meta(ge=0, le=254)] = 0


class RecordIn(Contents, forbid_unknown_fields=True, gc=False):
    """A record to be published. Of ``value``, ``text`` and ``base64`` one is given; none: a record without a value."""

    partition: Int32 | None = None
    timestamp_ms: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class Publish(Struct, forbid_unknown_fields=True):
    """Records to be published: those of one partition and priority in this order."""

    records: Annotated[list[RecordIn], Meta(min_length=1, max_length=MAX_RECORDS)]


class RecordOut(Struct, omit_defaults=True, gc=False):
    """A record. Its value is in ``value`` (JSON), ``text`` or ``base64``; in none of them if it has none."""

    topic: str
    partition: int
    offset: int
    lane: int
    timestamp_ms: int
    value: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET


def columns_of(records: Sequence[RecordIn], max_depth: int) -> Columns:
    """``InvalidInputError`` names the record that cannot be."""
    made = contents_of(records, max_depth)
    made.timestamps_ms = _some(records, _TIMESTAMP)
    made.partitions = _some(records, _PARTITION)
    return made


def contents_of(given: Sequence[Contents], max_depth: int, what: str = "record") -> Columns:
    """Columns that none of them has are left out."""
    made = Columns(_all_texts(given) or column(given, partial(value_of, max_depth), what))
    if _some(given, _KEY) or _some(given, _KEY_BASE64):
        made.keys = column(given, _key, what)
    if any(map(_HEADERS, given)) or any(map(_HEADERS_BASE64, given)):
        made.headers = column(given, _headers, what)
    if any(map(_PRIORITY, given)):
        made.priorities = [*map(_PRIORITY, given)]
    return made


def _all_texts(given: Sequence[Contents]) -> list[bytes | None] | None:
    """The values, if each is a text and nothing is wrong with any."""
    texts = [*map(_TEXT, given)]
    if UNSET in texts or not ([*map(_VALUE, given)].count(UNSET) == [*map(_BASE64, given)].count(UNSET) == len(given)):
        return None
    try:
        return [*map(str.encode, texts)]
    except UnicodeEncodeError:
        return None  # it is said later of which


def _some(given: Sequence[Any], field: Callable[[Any], Any]) -> list[Any] | None:
    """This field of each, or None if none has it."""
    found = [*map(field, given)]
    return None if found.count(None) == len(found) else found


def column(given: Sequence[_C], of: Callable[[_C], _T], what: str) -> list[_T]:
    """``InvalidInputError`` names the one that is wrong."""
    made: list[_T] = []
    try:
        made.extend(map(of, given))  # so much is there of it if one is wrong
    except InvalidInputError as error:
        raise InvalidInputError(f"{what} {len(made)}: {error}", row=len(made)) from None
    return made


def value_of(max_depth: int, record: Value) -> bytes | None:
    value, text, encoded = record.value, record.text, record.base64
    if text is not UNSET:
        if value is UNSET and encoded is UNSET:
            return utf8(text)
    elif value is not UNSET:
        if encoded is UNSET:
            raw = bytes(value)
            if raw.count(b"[") + raw.count(b"{") > max_depth and depth_of(raw, max_depth + 1) > max_depth:
                raise InvalidInputError(f"its JSON is nested deeper than {max_depth}")
            return raw
    else:
        return None if encoded is UNSET else from_base64(encoded)
    raise InvalidInputError("of value, text and base64 one is given")


def _key(record: Contents) -> bytes | None:
    if record.key_base64 is not None:
        if record.key is not None:
            raise InvalidInputError("of key and key_base64 one is given")
        return from_base64(record.key_base64)
    return None if record.key is None else utf8(record.key)


def _headers(record: Contents) -> Headers:
    text = tuple((utf8(name).decode(), utf8(value)) for name, value in (record.headers or {}).items())
    coded = tuple((utf8(name).decode(), from_base64(value)) for name, value in (record.headers_base64 or {}).items())
    return text + coded


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError("a text has half of a surrogate pair, which no UTF-8 has") from None


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInputError("base64 is wrong: the standard alphabet, with its padding") from None


def depth_of(text: bytes, most: int) -> int:
    """How deep JSON is nested, up to ``most``. Each round takes the innermost brackets away, in C."""
    brackets = _STRINGS.sub(b"", text).translate(_SQUARE, _NOT_BRACKETS)
    depth = 0
    while brackets and depth < most:
        depth += 1
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break  # not JSON; its decoder says so
        brackets = fewer
    return depth


# -- out ------------------------------------------------------------------------------------------


def shown(record: Record, form: Form) -> RecordOut:
    made = RecordOut(record.topic, record.partition, record.offset, record.lane, record.timestamp)
    show(made, record.value, record.key, record.headers, form)
    return made


def show(made: Any, value: bytes | None, key: bytes | None, headers: Headers, form: Form) -> None:
    """In the fields of the same names, of a ``RecordOut`` or of what has them, too."""
    if value is not None:
        _show_value(made, value, form)
    if key is not None:
        try:
            made.key = key.decode()
        except UnicodeDecodeError:
            made.key_base64 = _coded(key)
    if headers:
        _show_headers(made, headers)


def _show_value(made: Any, value: bytes, form: Form) -> None:
    if form == "base64":
        made.base64 = _coded(value)
        return
    try:
        text = value.decode()
    except UnicodeDecodeError:
        made.base64 = _coded(value)
        return
    if form != "text" and is_json(value):
        made.value = Raw(value)
    else:
        made.text = text


def _show_headers(made: Any, headers: Headers) -> None:
    """As an object: of a name that is there twice, the last."""
    text: dict[str, str] = {}
    coded: dict[str, str] = {}
    for name, value in headers:
        try:
            text[name] = value.decode()
        except UnicodeDecodeError:
            coded[name] = _coded(value)
    if text:
        made.headers = text
    if coded:
        made.headers_base64 = coded


def is_json(value: bytes) -> bool:
    try:
        msgspec.json.decode(value, type=Any)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _coded(value: bytes) -> str:
    return base64.b64encode(value).decode()
