"""The signatures of the one-liners for DataFrames: every option of the format, with its type and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyspark")

from rayqueue.spark import options
from rayqueue.spark.frames import from_dataframe, options_of, stream_dataframe, text_of, to_dataframe

NO_END = {"endingoffsets", "endingtimestamp"}

CALLS: list[tuple[Callable[..., Any], set[str], Callable[[dict[str, str]], Any]]] = [
    (to_dataframe, options._READ - {"topic", "topics", "columns"}, options.read_options),
    (
        stream_dataframe,
        (options._READ | options._STREAM) - {"topic", "topics", "columns"} - NO_END,
        options.stream_options,
    ),
    (from_dataframe, options._WRITE - {"topic", "stagingpartitions"}, options.write_options),
]


@pytest.mark.parametrize(("call", "names", "parse"), CALLS, ids=lambda each: getattr(each, "__name__", ""))
def test_every_option_is_shown_with_its_type_and_default(
    call: Callable[..., Any], names: set[str], parse: Callable[[dict[str, str]], Any]
) -> None:
    parameters = inspect.signature(call).parameters.values()
    assert not [each for each in parameters if each.kind is each.VAR_KEYWORD]
    assert all(each.annotation not in (each.empty, "Any") for each in parameters)
    shown = options_of(call)
    assert {name.lower() for name in shown} == names
    told = {name: text_of(default) for name, default in shown.items() if default is not None}
    assert parse({"topic": "orders", **told}) == parse({"topic": "orders"}), "the defaults are those of the format"
