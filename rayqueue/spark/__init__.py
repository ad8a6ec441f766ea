"""Topics as Spark DataFrames, streams too, on the same Ray (RayDP) or any Spark that reaches it.

    spark = rayqueue.spark.session(rq, executors=2)
    df = spark.read.format("rayqueue").option("topic", "orders").load()
    rayqueue.spark.to_dataframe(rq, "orders", value_schema="id long, amount double")

``start.py`` starts Spark, and only ``raydp.py`` knows RayDP. ``source.py`` is what
Spark knows as format "rayqueue"; ``options.py`` what may be said to it, ``reader.py``,
``stream.py`` and ``writer.py`` what it does, ``worker.py`` what makes its tasks cheap.
``frames.py`` has the one-liners, ``values.py`` the columns inside values, ``avro.py``
those in Avro. What does not need Spark is ``rayqueue.bridge``.

Importing this package does not load Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayqueue.spark.avro import avro_schema
    from rayqueue.spark.frames import from_dataframe, stream_dataframe, to_dataframe
    from rayqueue.spark.start import Spark, engine_of, register, session, settings, stop
    from rayqueue.spark.values import decode_values, encode_values

_HOMES = {
    "session": "start",
    "stop": "start",
    "register": "start",
    "engine_of": "start",
    "Spark": "start",
    "settings": "start",
    "to_dataframe": "frames",
    "stream_dataframe": "frames",
    "from_dataframe": "frames",
    "avro_schema": "avro",
    "decode_values": "values",
    "encode_values": "values",
}

__all__ = [
    "Spark",
    "avro_schema",
    "decode_values",
    "encode_values",
    "engine_of",
    "from_dataframe",
    "register",
    "session",
    "settings",
    "stop",
    "stream_dataframe",
    "to_dataframe",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from rayqueue.spark.needs import need_pyspark

    need_pyspark()
    return getattr(import_module(f"rayqueue.spark.{home}"), name)
