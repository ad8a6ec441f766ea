"""Bytes in `rayqueue produce` and `consume`, without a queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.cli.consume import _shown, milliseconds
from rayqueue.cli.lines import MAX_LINE_BYTES, Lines, delimiter_of
from rayqueue.cli.produce import BadLineError, Form
from rayqueue.errors import InvalidInputError
from rayqueue.records import Record

_HOUR_MS = 3_600_000


@pytest.mark.slow
@given(st.lists(st.binary(max_size=20), max_size=8), st.sampled_from([b"\n", b"\0", b"\r\n", b"--"]), st.data())
def test_lines_are_cut_at_the_delimiter_wherever_a_read_ends(
    chunks: list[bytes], delimiter: bytes, data: st.DataObject
) -> None:
    whole = b"".join(chunk + delimiter * data.draw(st.integers(0, 2)) for chunk in chunks)
    lines, found, at = Lines(delimiter), [], 0
    while at < len(whole):
        step = data.draw(st.integers(1, 7))
        found += lines.feed(whole[at : at + step])
        at += step
    found += lines.end()
    expected = whole.split(delimiter)
    assert found == (expected if expected[-1] else expected[:-1])


def test_bytes_survive() -> None:
    lines = Lines()
    assert lines.feed(b"dos\r\n\xff\x00 \n") == [b"dos\r", b"\xff\x00 "]
    assert lines.end() == []


def test_a_line_without_end_is_refused_before_the_memory_is_gone() -> None:
    lines = Lines()
    lines.feed(bytes(MAX_LINE_BYTES))
    with pytest.raises(InvalidInputError, match="--file sends a whole file"):
        lines.feed(b"x")


def test_delimiters_may_be_escaped() -> None:
    assert delimiter_of("--delimiter", r"\0") == b"\0"
    assert delimiter_of("--delimiter", r"\r\n") == b"\r\n"
    assert delimiter_of("--delimiter", "::") == b"::"
    for wrong in ("", "\\x1"):
        with pytest.raises(InvalidInputError, match="--delimiter"):
            delimiter_of("--delimiter", wrong)


def test_a_bad_line_is_named_and_those_before_it_are_good() -> None:
    form = Form(None, b":", {}, 0, None)
    assert form.columns([b"a:1", b":2:3"], 1) == ([b"1", b"2:3"], [b"a", b""])
    with pytest.raises(BadLineError, match="line 18 has no ':'") as caught:
        form.columns([b"a:1", b"nothing", b"b:2"], 17)
    assert caught.value.good == 1


_RECORD = Record(7, 1_700_000_000_123, b"\xffk", b"v\0", (("h", b"1"),), 2, "orders", 3)


def test_a_form_of_ones_own_keeps_every_byte() -> None:
    shown = _shown(
        as_json=False, show_key=False, form=r"{topic}/{partition}@{offset}\t{key}={value} {headers} {time}", end=b"\0"
    )
    assert shown(_RECORD) == b"orders/3@7\t\xffk=v\0 h=1 2023-11-14T22:13:20.123+00:00\0"
    with pytest.raises(InvalidInputError, match=r"no field \{size\}; there are topic"):
        _shown(as_json=False, show_key=False, form="{size}", end=b"\n")


def test_json_hides_no_byte() -> None:
    line = _shown(as_json=True, show_key=False, form=None, end=b"\n")(_RECORD)
    assert b'"key_base64": "/2s="' in line
    assert b'"value": "v\\u0000"' in line


def test_points_in_time() -> None:
    assert milliseconds("1700000000123", 0.0) == 1_700_000_000_123
    assert milliseconds("2023-11-14T22:13:20Z", 0.0) == 1_700_000_000_000
    assert milliseconds("-2h", 10_000.0) == 10_000_000 - 2 * _HOUR_MS
    with pytest.raises(InvalidInputError, match="is no time"):
        milliseconds("yesterday", 0.0)
