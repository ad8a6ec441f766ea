"""Forms of values: how an application's objects become the bytes of a record's value or key, and are read back.

A ``Form`` has both directions and a name for errors. There are four by name
("bytes", "str", "json", "msgpack"), one per model class (``model``), and Avro
(``avro``); anything else is a function of the application, for one direction.

Decoders get bytes that anybody may have written: whatever the bytes, a decoder
of this module returns a value or raises an ``Exception``; it does not crash the
process, and does not work for longer than the length of its input explains.
Whoever calls one turns the exception into an error with the record's place.
None, which is no value or no key, never comes here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_origin

import msgspec

from rayqueue.errors import InvalidInputError, MissingDependencyError

T = TypeVar("T")

Name = Literal["bytes", "str", "json", "msgpack"]

_BY_NAME = "'bytes', 'str', 'json' or 'msgpack'"
_MODEL = "what values are: a pydantic model, a msgspec.Struct, a dataclass, a form of rayqueue.values, or a name of one"
SERIALIZERS = {
    "model": _MODEL,
    "value_serializer": f"instead of a model: {_BY_NAME}, a model, a form, or a function from a value to bytes",
    "key_serializer": "the same for keys",
}
"""Options of a producer that are no settings, and what they are."""
DESERIALIZERS = {
    "model": _MODEL,
    "value_deserializer": f"instead of a model: {_BY_NAME}, a model, a form, or a function from bytes to a value",
    "key_deserializer": "the same for keys",
}
"""The same of a consumer."""


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """A way to write and read values of one kind. ``encode`` and ``decode`` raise what they like."""

    name: str
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    made_by: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """A function of this module and its arguments, for what holds a decoder, which cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made_by or (Form, (self.name, self.encode, self.decode))


Model = type[T] | Form[T]
"""What has both directions."""
Serializer = type[T] | Form[T] | Callable[[T], bytes]
Deserializer = type[T] | Form[T] | Callable[[bytes], T]


class Encoder(NamedTuple):
    name: str
    encode: Callable[[Any], Any]


class Decoder(NamedTuple):
    name: str
    decode: Callable[[bytes], Any]


# -- what an application may give ------------------------------------------------------------


def encoder_of(option: str, given: Any) -> Encoder | None:
    """The encoder of a producer's serializer: a name, a form, a model's class or a function. None for bytes."""
    form = _form(option, given)
    if form is None:
        return Encoder(_name_of(given), given)
    return None if form is BYTES else Encoder(form.name, form.encode)


def decoder_of(option: str, given: Any) -> Decoder | None:
    """The same for a consumer."""
    form = _form(option, given)
    if form is None:
        return Decoder(_name_of(given), given)
    return None if form is BYTES else Decoder(form.name, form.decode)


def form_of(option: str, given: Any) -> Form[Any]:
    """The form of a model: a class, a form, or the name of one. ``InvalidInputError`` for a function."""
    form = _form(option, given)
    if form is None:
        raise InvalidInputError(
            f"{option} is a pydantic model, a msgspec.Struct, a dataclass, a form of rayqueue.values or "
            f"{_names()}, not {given!r}",
            option=option,
        )
    return form


def _form(option: str, given: Any) -> Form[Any] | None:
    """None for a function."""
    if given is None:
        return BYTES
    if isinstance(given, str):
        if given not in _NAMED:
            raise InvalidInputError(f"{option} is a function, a model or {_names()}, not {given!r}", option=option)
        return _NAMED[given]
    if isinstance(given, Form):
        return given
    if _is_model(given):
        return model(given)
    if not callable(given):
        raise InvalidInputError(f"{option} is a function, a model or {_names()}, not {given!r}", option=option)
    return None


def _names() -> str:
    return " or ".join(map(repr, _NAMED))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


# -- by name -----------------------------------------------------------------------------------


def named(name: Name) -> Form[Any]:
    """The form of this name."""
    return form_of("name", name)


def _same(value: bytes) -> bytes:
    return value


def _text(data: bytes) -> str:
    return str(data, "utf-8")


BYTES: Form[bytes] = Form("bytes", _same, _same, (named, ("bytes",)))
"""As they are."""
STR: Form[str] = Form("str", str.encode, _text, (named, ("str",)))
"""Text in UTF-8."""
JSON: Form[Any] = Form("json", msgspec.json.encode, msgspec.json.decode, (named, ("json",)))
"""What JSON has. Dataclasses, dates and the like are written too, and read as the objects and texts that they became;
a number that is not finite becomes null."""
MSGPACK: Form[Any] = Form("msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode, (named, ("msgpack",)))
"""What MessagePack has; bytes stay bytes."""

_NAMED: Mapping[str, Form[Any]] = {form.name: form for form in (BYTES, STR, JSON, MSGPACK)}


# -- models ------------------------------------------------------------------------------------


def model(kind: type[T], written_as: Literal["json", "msgpack"] = "json") -> Form[T]:
    """Objects of a pydantic model, a ``msgspec.Struct`` or a dataclass; checked when they are read.

    A pydantic model is written by its aliases, and read by aliases or names.
    """
    if not _is_model(kind):
        raise InvalidInputError(
            f"a model is a pydantic model, a msgspec.Struct or a dataclass, not {kind!r}", option="model"
        )
    if written_as not in ("json", "msgpack"):
        raise InvalidInputError(f"a model is written as 'json' or 'msgpack', not {written_as!r}", option="written_as")
    plain = get_origin(kind) or kind
    try:
        write, read = (_pydantic if _is_pydantic(plain) else _msgspec)(kind, written_as)
    except Exception as error:
        raise InvalidInputError(
            f"{plain.__name__} cannot be used as a model: {shortened(error)}", option="model"
        ) from error

    def encode(value: T) -> bytes:
        if not isinstance(value, plain):
            raise TypeError(f"it is no {plain.__name__}")
        return write(value)

    return Form(f"{plain.__name__} ({written_as})", encode, read, (model, (kind, written_as)))


def _is_model(given: Any) -> bool:
    plain = get_origin(given) or given
    return isinstance(plain, type) and (
        issubclass(plain, msgspec.Struct) or dataclasses.is_dataclass(plain) or _is_pydantic(plain)
    )


def _is_pydantic(kind: type) -> bool:
    from pydantic import BaseModel
    from pydantic.dataclasses import is_pydantic_dataclass

    return issubclass(kind, BaseModel) or is_pydantic_dataclass(kind)


def _pydantic(kind: Any, written_as: str) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    from pydantic import TypeAdapter

    adapter = TypeAdapter(kind)
    if written_as == "json":
        return (
            lambda value: adapter.dump_json(value, by_alias=True, warnings="error"),
            lambda data: adapter.validate_json(data, by_alias=True, by_name=True),
        )
    return (
        lambda value: msgspec.msgpack.encode(adapter.dump_python(value, mode="json", by_alias=True, warnings="error")),
        lambda data: adapter.validate_python(msgspec.msgpack.decode(data), by_alias=True, by_name=True),
    )


def _msgspec(kind: Any, written_as: str) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    if written_as == "json":
        return msgspec.json.encode, msgspec.json.Decoder(kind).decode
    return msgspec.msgpack.encode, msgspec.msgpack.Decoder(kind).decode


# -- Avro --------------------------------------------------------------------------------------


def avro(schema: str | Mapping[str, Any] | list[Any]) -> Form[Any]:
    """Avro values of one schema, given as JSON or as what JSON means, each without container. Needs ``rayqueue[avro]``.

    A type that contains itself, and an array of what takes no bytes, are refused: a few bytes of a stranger would
    end the process, or fill its memory.
    """
    if importlib.util.find_spec("fastavro") is None:
        raise MissingDependencyError("Avro values need fastavro: pip install 'rayqueue[avro]'", package="fastavro")
    import fastavro
    from fastavro.validation import validate

    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        types: dict[str, Any] = {}
        parsed = fastavro.parse_schema(json.loads(text), types)
        read_by = fastavro.parse_schema(_bounded(json.loads(text)))
    except Exception as error:
        raise InvalidInputError(f"not an Avro schema: {shortened(error)}", option="schema") from error
    _check_avro(parsed, types, ())
    fastavro.read.LOGICAL_READERS[f"bytes-{_BOUNDED_DECIMAL}"] = _read_decimal

    def encode(value: Any) -> bytes:
        validate(value, parsed)  # the writer alone makes 3 of 3.7
        sink = io.BytesIO()
        fastavro.schemaless_writer(sink, parsed, value, strict_allow_default=True)
        return sink.getvalue()

    def decode(data: bytes) -> Any:
        source = io.BytesIO(data)
        value = fastavro.schemaless_reader(source, read_by, None)
        if source.tell() != len(data):
            raise ValueError(f"{len(data) - source.tell()} bytes are left")
        return value

    name = parsed.get("name") if isinstance(parsed, dict) else None
    return Form(f"{name} (avro)" if name else "avro", encode, decode, (avro, (text,)))


def _check_avro(schema: Any, types: Mapping[str, Any], inside: tuple[str, ...]) -> bool:
    """Whether each value of this schema takes a byte at least. ``InvalidInputError`` if it is not to be read."""
    if isinstance(schema, list):
        for each in schema:
            _check_avro(each, types, inside)
        return True
    if isinstance(schema, str):
        return _check_avro(types[schema], types, inside) if schema in types else schema != "null"
    kind = schema["type"]
    if kind in ("record", "error"):
        name = schema["name"]
        if name in inside:
            raise InvalidInputError(f"Avro type {name!r} contains itself: it cannot be read safely", option="schema")
        takes_bytes = [_check_avro(each["type"], types, (*inside, name)) for each in schema["fields"]]
        return any(takes_bytes)
    if kind == "array":
        if not _check_avro(schema["items"], types, inside):
            raise InvalidInputError("an Avro array of what takes no bytes cannot be read safely", option="schema")
        return True
    if kind == "map":
        _check_avro(schema["values"], types, inside)
        return True
    if kind == "fixed":
        return bool(schema["size"])
    return kind == "enum" or _check_avro(kind, types, inside)


_BOUNDED_DECIMAL = "rayqueue-decimal"


def _bounded(schema: Any) -> Any:
    """The schema with decimals in bytes as a logical type of ours."""
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bounded(each) for name, each in schema.items()}
    if schema.get("type") == "bytes" and schema.get("logicalType") == "decimal":
        bounded["logicalType"] = _BOUNDED_DECIMAL
    return bounded


def _read_decimal(data: bytes, schema: Any, *reader: Any) -> Any:
    """fastavro takes two minutes for a decimal of a megabyte, however few digits the schema says it has."""
    from fastavro.read import LOGICAL_READERS

    if len(data) > schema["precision"] // 2 + 1:  # a digit takes less than half a byte; one for the sign
        raise ValueError(f"a decimal of {schema['precision']} digits in {len(data)} bytes")
    return LOGICAL_READERS["bytes-decimal"](data, schema, *reader)


# -- errors ------------------------------------------------------------------------------------

_MAX_REASON = 300


def shortened(error: BaseException) -> str:
    """An error of somebody's decoder in one line: it may quote what it was given."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"
