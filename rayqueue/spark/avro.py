"""Avro values as columns, by fastavro: Spark's own needs a jar that PySpark does not bring.

A value is one Avro record without container or schema. Types follow those of
Spark's package spark-avro:

    boolean, int, long, float, double, string, bytes    the same; fixed is binary, an enum is a string
    date, timestamp-millis, timestamp-micros            date, timestamp
    local-timestamp-millis, local-timestamp-micros      timestamp_ntz
    decimal                                             decimal
    record, array, map, a union with null               struct, array, map, a column that may be null
    int or long; float or double                        long; double

Other logical types are read as what they are stored as. Other unions, and
types that contain themselves, are no columns and are refused; so is what
``rayqueue.values.avro``, which reads the values, does not read safely.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from rayqueue.errors import InvalidInputError, MissingDependencyError
from rayqueue.values import Form, avro, shortened

_PLAIN: dict[str, DataType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "string": StringType(),
    "bytes": BinaryType(),
    "fixed": BinaryType(),
    "enum": StringType(),
}
_LOGICAL: dict[tuple[str, str], DataType] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
}
_WIDER = ({"int", "long"}, "long"), ({"float", "double"}, "double")
_WRITTEN: dict[type[DataType], Any] = {
    BooleanType: "boolean",
    ByteType: "int",
    ShortType: "int",
    IntegerType: "int",
    LongType: "long",
    FloatType: "float",
    DoubleType: "double",
    StringType: "string",
    BinaryType: "bytes",
    DateType: {"type": "int", "logicalType": "date"},
    TimestampType: {"type": "long", "logicalType": "timestamp-micros"},
    TimestampNTZType: {"type": "long", "logicalType": "local-timestamp-micros"},
}
_RECORD = "topLevelRecord"
"""As spark-avro names what has no name."""


def _need_fastavro() -> None:
    if importlib.util.find_spec("fastavro") is None:
        raise MissingDependencyError("Avro values need fastavro: pip install 'rayqueue[spark]'", package="fastavro")


# -- schemas ------------------------------------------------------------------------------------


def columns_of(schema: str) -> StructType:
    """The columns that records of an Avro schema have."""
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidInputError(f"not an Avro schema: {error}", option="value_schema") from None
    kind, _ = _column(parsed, {}, ())
    if not isinstance(kind, StructType):
        raise InvalidInputError("values have fields: their Avro schema must be a record", option="value_schema")
    return kind


def _column(schema: Any, named: dict[str, Any], inside: tuple[str, ...]) -> tuple[DataType, bool]:
    """A type, and whether it may be null."""
    if isinstance(schema, list):
        return _union(schema, named, inside)
    if isinstance(schema, str):
        if schema in _PLAIN:
            return _PLAIN[schema], False
        if schema not in named:
            raise InvalidInputError(f"Avro type {schema!r} is not known", option="value_schema")
        return _column(named[schema], named, inside)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, (dict, list)):
        return _column(kind, named, inside)
    name = _full_name(schema) if isinstance(schema, dict) and "name" in schema else ""
    if name:
        if name in inside:
            raise InvalidInputError(f"Avro type {name!r} contains itself: it cannot be a column", option="value_schema")
        named[name] = named[name.rpartition(".")[2]] = schema
    match kind:
        case "record" | "error":
            fields = []
            for each in schema["fields"]:
                of, null = _column(each["type"], named, (*inside, name))
                fields.append(StructField(each["name"], of, null))
            return StructType(fields), False
        case "array":
            return ArrayType(*_column(schema["items"], named, inside)), False
        case "map":
            return MapType(StringType(), *_column(schema["values"], named, inside)), False
        case "bytes" | "fixed" if schema.get("logicalType") == "decimal":
            return DecimalType(schema["precision"], schema.get("scale", 0)), False
        case str() if kind in _PLAIN or kind in named:
            logical = _LOGICAL.get((kind, schema.get("logicalType", "")))
            return (logical, False) if logical is not None else _column(kind, named, inside)
    raise InvalidInputError(f"not an Avro schema: {schema!r}", option="value_schema")


def _union(schema: list[Any], named: dict[str, Any], inside: tuple[str, ...]) -> tuple[DataType, bool]:
    rest = [each for each in schema if each != "null"]
    null = len(rest) < len(schema)
    if len(rest) == 1:
        return _column(rest[0], named, inside)[0], null
    for members, wider in _WIDER:
        if all(isinstance(each, str) and each in members for each in rest) and rest:
            return _PLAIN[wider], null
    raise InvalidInputError(f"a union of several types cannot be a column: {json.dumps(schema)}", option="value_schema")


def _full_name(schema: dict[str, Any]) -> str:
    name, space = str(schema["name"]), schema.get("namespace")
    return name if "." in name or not space else f"{space}.{name}"


def avro_schema(columns: StructType) -> str:
    """The Avro schema of values that ``encode_values(df, "avro")`` makes of a DataFrame with these columns."""
    return json.dumps(_written(columns, False, _RECORD))


def _written(kind: DataType, null: bool, name: str) -> Any:
    schema: Any
    if isinstance(kind, StructType):
        fields = [
            {"name": each.name, "type": _written(each.dataType, each.nullable, f"{name}.{each.name}")}
            for each in kind.fields
        ]
        schema = {"type": "record", "name": name, "fields": fields}
    elif isinstance(kind, ArrayType):
        schema = {"type": "array", "items": _written(kind.elementType, kind.containsNull, name)}
    elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        schema = {"type": "map", "values": _written(kind.valueType, kind.valueContainsNull, name)}
    elif isinstance(kind, DecimalType):
        schema = {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    elif type(kind) in _WRITTEN:
        schema = _WRITTEN[type(kind)]
    else:
        raise InvalidInputError(f"a column of {kind.simpleString()} cannot be written as Avro")
    return [schema, "null"] if null else schema


# -- values -------------------------------------------------------------------------------------


def decoder(schema: str, kept: list[str], whole: StructType) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function on Arrow batches that replaces ``value`` by the fields of its records."""
    _need_fastavro()
    inside = whole.names[len(kept) :]
    form = avro(_stored(json.loads(schema)))

    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        target = to_arrow_schema(whole, timezone="UTC")
        for batch in batches:
            rows = [_read(form, value) for value in batch.column("value").to_pylist()]
            own = [batch.column(name) for name in kept]
            fields = [
                pa.array([None if row is None else row[name] for row in rows], target.field(name).type)
                for name in inside
            ]
            columns = [
                column.cast(field.type) if column.type != field.type else column
                for column, field in zip([*own, *fields], target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=target)

    return decode


def encoder(columns: StructType, key: str | None) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function on Arrow batches that packs the rows into ``value``, and one column into ``key`` too."""
    _need_fastavro()
    schema = avro_schema(columns)

    def encode(batches: Iterator[Any]) -> Iterator[Any]:
        import fastavro
        import pyarrow as pa

        parsed = fastavro.parse_schema(json.loads(schema))
        for batch in batches:
            values = []
            packed = batch.select(columns.names)
            for row in packed.to_pylist(maps_as_pydicts="strict"):
                sink = io.BytesIO()
                fastavro.schemaless_writer(sink, parsed, row)
                values.append(sink.getvalue())
            made = {"value": pa.array(values, pa.binary())}
            if key is not None:
                made["key"] = batch.column(key)
            yield pa.record_batch(made)

    return encode


def _read(form: Form[Any], value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return form.decode(value)
    except Exception as error:  # whatever bytes can do to a decoder
        raise InvalidInputError(
            f"a value of {len(value)} bytes is not of this Avro schema: {shortened(error)}"
        ) from error


def _stored(schema: Any) -> Any:
    """The schema without the logical types that are read as what they are stored as."""
    if isinstance(schema, list):
        return [_stored(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    logical = schema.get("logicalType")
    known = logical == "decimal" or (str(schema.get("type")), logical) in _LOGICAL
    kept = {name: value for name, value in schema.items() if name != "logicalType" or known}
    for name in ("type", "items", "values"):
        if name in kept:
            kept[name] = _stored(kept[name])
    if "fields" in kept:
        kept["fields"] = [_stored(each) for each in kept["fields"]]
    return kept
