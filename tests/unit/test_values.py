"""Forms of values: what is written is read back, and whatever bytes come are a value or an exception, never a crash."""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - what Ray does with a producer's options
import subprocess
import sys
import time
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any, Generic, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass as pydantic_dataclass

from rayqueue import values
from rayqueue.errors import InvalidInputError, MissingDependencyError
from rayqueue.values import Form, decoder_of, encoder_of, form_of

T = TypeVar("T")

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


class Line(msgspec.Struct):
    name: str
    price: float


class Struct(msgspec.Struct):
    number: int
    lines: list[Line] = []
    at: datetime | None = None


@dataclass
class Data:
    number: int
    lines: list[str] = dataclass_field(default_factory=list)


@pydantic_dataclass
class Checked:
    number: int


class Model(pydantic.BaseModel):
    number: int = pydantic.Field(alias="orderNumber")
    read_as: str = pydantic.Field(default="", validation_alias="readAs")
    inner: Data | None = None


class Page(msgspec.Struct, Generic[T]):
    items: list[T]


SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "lines", "type": {"type": "array", "items": "string"}, "default": []},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}]},
    ],
}
AVRO: Form[Any] = values.avro(SCHEMA)

FORMS: list[tuple[Form[Any], Any]] = [
    (values.model(Struct), Struct(1, [Line("tea", 2.5)], datetime(2026, 1, 1, tzinfo=timezone.utc))),
    (values.model(Struct, "msgpack"), Struct(1, [Line("tea", 2.5)])),
    (values.model(Data), Data(1, ["tea"])),
    (values.model(Data, "msgpack"), Data(1, ["tea"])),
    (values.model(Checked), Checked(1)),
    (values.model(Model), Model.model_validate({"orderNumber": 1, "readAs": "x", "inner": Data(2)})),
    (values.model(Model, "msgpack"), Model.model_validate({"orderNumber": 1, "readAs": "x", "inner": Data(2)})),
    (values.model(Page[Line]), Page([Line("tea", 2.5)])),
    (AVRO, {"number": 1, "lines": ["tea"], "price": Decimal("9999.99")}),
    (AVRO, {"number": -1, "lines": [], "price": None}),
    (values.STR, "tea ☕"),
    (values.JSON, {"number": [1, 2.5, None, "tea"]}),
    (values.MSGPACK, {"number": [1, 2.5, None, "tea", b"\xff"]}),
]


@pytest.mark.parametrize(("form", "value"), FORMS, ids=lambda each: getattr(each, "name", ""))
def test_a_value_is_read_as_it_was_written_also_by_a_form_that_went_through_pickle(form: Form[Any], value: Any) -> None:
    written = form.encode(value)
    assert type(written) is bytes
    assert form.decode(written) == value
    there = pickle.loads(pickle.dumps(form))
    assert there.name == form.name
    assert there.decode(written) == value
    assert there.encode(value) == written


@settings(max_examples=40)
@given(PLAIN)
def test_whatever_json_and_msgpack_have_comes_back(value: Any) -> None:
    for form in (values.JSON, values.MSGPACK):
        assert form.decode(form.encode(value)) == value


@given(st.text())
def test_text_comes_back_and_what_is_no_unicode_is_refused(text: str) -> None:
    assert values.STR.decode(values.STR.encode(text)) == text
    with pytest.raises(UnicodeEncodeError):
        values.STR.encode(f"{text}\ud800")


@given(number=st.integers(-(2**63), 2**63 - 1), lines=st.lists(st.text(), max_size=5))
@pytest.mark.slow
def test_models_come_back(number: int, lines: list[str]) -> None:
    forms: list[tuple[Form[Any], Any]] = [
        (values.model(Data), Data(number, lines)),
        (AVRO, {"number": number, "lines": lines, "price": None}),
    ]
    for form, value in forms:
        assert form.decode(form.encode(value)) == value


def hostile() -> list[bytes]:
    """What a stranger may write, found to be deep, to claim much, or to be cut."""
    deep = 200_000
    huge = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
    return [
        b"",
        b"\xff",
        b"null",
        b"nul",
        b"[" * deep,
        b"[" * deep + b"]" * deep,
        b'{"inner":' * deep + b"1" + b"}" * deep,
        b'{"number":' + b"9" * 100_000 + b"}",
        b'{"number":1e999999999}',
        b'{"number":1} trailing',
        b'{"number":"1"}',
        b"\x91" * deep,
        b"\x81\xa6number" * deep,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        huge,
        b"\x02" + huge,
        b"\x02\x00\x02" + huge,
        # A decimal of a megabyte: two minutes of fastavro.
        b"\x02\x00\x02" + b"\x80\x89\x7a" + b"\x7f" * 1_000_000,
        b"\x02" * deep,
    ]


def outcome(form: Form[Any], data: bytes) -> str:
    try:
        form.decode(data)
    except Exception as error:  # noqa: BLE001 - any that can be caught
        return values.shortened(error)
    return "a value"


@pytest.mark.parametrize("form", [form for form, _ in FORMS], ids=lambda form: form.name)
@pytest.mark.slow
def test_hostile_bytes_are_a_value_or_an_exception_and_soon(form: Form[Any]) -> None:
    for data in hostile():
        began_s = time.process_time()
        assert len(outcome(form, data)) < 400
        assert time.process_time() - began_s < 5


@settings(max_examples=200)
@given(st.binary(max_size=60))
@pytest.mark.slow
def test_any_bytes_are_a_value_or_an_exception(data: bytes) -> None:
    for form, _ in FORMS:
        assert outcome(form, data)


def test_what_contains_itself_is_an_exception_too() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for form in (values.JSON, values.MSGPACK):
        with pytest.raises(RecursionError):
            form.encode(circle)
    looped = Model.model_construct(number=1, inner=None)
    looped.inner = looped  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"ircular|Expected"):
        values.model(Model).encode(looped)


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        (values.model(Struct), {"number": 1}),
        (values.model(Data), Struct(1)),
        (values.model(Model), {"orderNumber": 1}),
        (values.model(Model), Model.model_construct(number="not a number", read_as="", inner=None)),
        (values.model(Data), Data(object())),  # type: ignore[arg-type]
        (values.STR, b"bytes"),
        (values.JSON, object()),
        (values.JSON, {object(): 1}),
        (values.MSGPACK, 2**64),
        (AVRO, {"number": 3.7, "price": None}),
        (AVRO, {"number": 2**63, "price": None}),
        (AVRO, {"price": None}),
        (AVRO, {"number": 1, "price": None, "prise": 1}),
        (AVRO, {"number": 1, "price": Decimal("99999.99")}),
        (AVRO, [1]),
    ],
)
def test_what_is_not_of_the_form_is_not_written(form: Form[Any], wrong: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whoever calls it says which
        form.encode(wrong)


def test_json_has_no_number_that_is_not_finite() -> None:
    assert values.JSON.encode([math.nan, math.inf]) == b"[null,null]"


# -- Avro --------------------------------------------------------------------------------------


def test_an_avro_schema_may_be_text() -> None:
    form = values.avro('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}')
    assert form.decode(form.encode({"a": 1})) == {"a": 1}
    assert values.avro('"string"').encode("a") == b"\x02a"
    assert form.name == "R (avro)"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]},
        {
            "type": "record",
            "name": "A",
            "namespace": "x",
            "fields": [
                {
                    "name": "b",
                    "type": {
                        "type": "map",
                        "values": {
                            "type": "record",
                            "name": "B",
                            "fields": [{"name": "a", "type": {"type": "array", "items": "x.A"}}],
                        },
                    },
                }
            ],
        },
        {"type": "array", "items": "null"},
        {"type": "array", "items": {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]}},
        {"type": "map", "values": {"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}},
        {"type": "recor"},
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "Q"}]},
        "no JSON",
        5,
        object(),
    ],
)
def test_schemas_that_are_none_or_cannot_be_read_safely_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidInputError):
        values.avro(schema)


def test_a_type_may_be_used_more_than_once() -> None:
    place = {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "int"}]}
    fields = [{"name": "start", "type": place}, {"name": "end", "type": "Place"}]
    form = values.avro({"type": "record", "name": "Way", "fields": fields})
    way = {"start": {"x": 1}, "end": {"x": 2}}
    assert form.decode(form.encode(way)) == way


def test_why_a_type_that_contains_itself_is_refused() -> None:
    """fastavro's decoder follows the bytes down the stack without a limit, and the process dies of it.

    If this fails, fastavro has learnt better, and ``values.avro`` may take such schemas.
    """
    code = """if True:
        import fastavro, io
        schema = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
        fastavro.schemaless_reader(io.BytesIO(b"\\x02" * 5_000_000), fastavro.parse_schema(schema), None)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode < 0, done.stderr


def test_without_fastavro_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"rayqueue\[avro\]"):
        values.avro(SCHEMA)


# -- what an application may give ------------------------------------------------------------------


def test_bytes_need_nobody() -> None:
    for nothing in (None, "bytes", values.BYTES):
        assert encoder_of("value_serializer", nothing) is None
        assert decoder_of("value_deserializer", nothing) is None


def test_names_forms_models_and_functions() -> None:
    def twice(data: bytes) -> int:
        return 2 * int(data)

    for something in ("json", values.JSON, Data, twice, int, lambda data: data):
        assert decoder_of("value_deserializer", something) is not None
    assert decoder_of("value_deserializer", twice).decode(b"4") == 8  # type: ignore[union-attr]
    assert encoder_of("value_serializer", Data).name == "Data (json)"  # type: ignore[union-attr]
    assert form_of("model", Page[Line]).name == "Page (json)"


@pytest.mark.parametrize("wrong", ["jason", b"json", 5, {}, ["json"]])
def test_what_is_none_of_them_is_refused(wrong: Any) -> None:
    for take in (encoder_of, decoder_of, form_of):
        with pytest.raises(InvalidInputError, match="'json' or 'msgpack'"):
            take("option", wrong)


def test_a_model_is_a_class_with_both_directions() -> None:
    for wrong in (len, int, str, lambda value: value):
        with pytest.raises(InvalidInputError, match=r"msgspec\.Struct"):
            form_of("model", wrong)
    with pytest.raises(InvalidInputError, match=r"msgspec\.Struct"):
        values.model(int)
    with pytest.raises(InvalidInputError, match="msgpack"):
        values.model(Data, "avro")  # type: ignore[arg-type]


def test_a_model_that_nobody_can_read_is_refused_when_it_is_given() -> None:
    class Lost(msgspec.Struct):
        number: NoSuchType  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidInputError, match="Lost cannot be used as a model: NameError"):
        values.model(Lost)
