"""Appends and fetches in their binary form: what is encoded is decoded, garbage is a typed error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import InvalidInputError, TransportError
from rayqueue.protocol.data import (
    ANY_LANE,
    Appended,
    Cursor,
    FetchRequest,
    decode_appended,
    decode_fetch,
    decode_fetched,
    encode_appended,
    encode_fetch,
    encode_fetched,
)

# A busy machine is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 2)
cursors = st.one_of(
    st.dictionaries(st.integers(0, ANY_LANE - 1), u64, min_size=1, max_size=255).map(
        lambda lanes: tuple(Cursor(lane, offset) for lane, offset in lanes.items())
    ),
    u64.map(lambda offset: (Cursor(ANY_LANE, offset),)),
)


@relaxed
@given(st.none() | u64, u32, st.booleans())
def test_appended(base_offset: int | None, count: int, duplicate: bool) -> None:
    encoded = encode_appended(base_offset, count, duplicate)
    assert decode_appended(memoryview(encoded)) == Appended(base_offset, count, duplicate)


@relaxed
@given(st.builds(FetchRequest, cursors, u32, u32, st.integers(0, 255)))
def test_fetch(request: FetchRequest) -> None:
    assert decode_fetch(memoryview(encode_fetch(request))) == request


@relaxed
@given(u64, u64, st.lists(st.tuples(u64, u32, st.binary(max_size=200)), max_size=20))
def test_fetched(high_watermark: int, start: int, batches: list[tuple[int, int, bytes]]) -> None:
    answer = decode_fetched(memoryview(b"".join(encode_fetched(high_watermark, start, batches))))
    assert (answer.high_watermark, answer.start_offset) == (high_watermark, start)
    assert [(base, count, bytes(payload)) for base, count, payload in answer.batches] == batches


@relaxed
@given(st.lists(st.tuples(u64, u32, st.binary(max_size=200)), max_size=5), cursors)
@pytest.mark.slow
def test_an_answer_says_where_to_continue(batches: list[tuple[int, int, bytes]], then: tuple[Cursor, ...]) -> None:
    answer = decode_fetched(memoryview(b"".join(encode_fetched(9, 1, batches, then))))
    assert answer.cursors == then
    assert [(base, count, bytes(payload)) for base, count, payload in answer.batches] == batches
    assert decode_fetched(memoryview(b"".join(encode_fetched(9, 1, batches)))).cursors == ()


def test_what_follows_the_batches_must_be_cursors() -> None:
    whole = b"".join(encode_fetched(9, 1, [(0, 1, b"batch")], (Cursor(0, 5),)))
    for wrong in (whole[:-1], whole + b"\0"):
        with pytest.raises(TransportError):
            decode_fetched(memoryview(wrong))


@relaxed
@given(st.binary(max_size=300))
def test_garbage_is_a_typed_error(garbage: bytes) -> None:
    with suppress(InvalidInputError):
        decode_fetch(memoryview(garbage))
    with suppress(TransportError):
        decode_fetched(memoryview(garbage))


@relaxed
@given(st.binary(max_size=30).filter(lambda data: len(data) != 13))
def test_an_answer_of_another_length_is_none(garbage: bytes) -> None:
    with pytest.raises(TransportError):
        decode_appended(memoryview(garbage))


@pytest.mark.parametrize(
    "lanes", [[], [1, 1], [ANY_LANE, 0], [0, ANY_LANE]], ids=["none", "one twice", "any and one", "one and any"]
)
def test_each_lane_once_or_any_alone(lanes: list[int]) -> None:
    encoded = encode_fetch(FetchRequest(tuple(Cursor(lane, 0) for lane in lanes), 1))
    with pytest.raises(InvalidInputError):
        decode_fetch(memoryview(encoded))


def test_numbers_that_do_not_fit_are_the_callers_mistake() -> None:
    for request in (FetchRequest((Cursor(0, -1),), 1), FetchRequest((Cursor(0, 0),), 2**32)):
        with pytest.raises(InvalidInputError):
            encode_fetch(request)
