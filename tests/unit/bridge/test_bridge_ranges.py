"""Ranges: beginnings and ends of reads, and how they are cut and shared."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Instant, Places, parse_places, parse_time_ms, resolve
from rayqueue.bridge.ranges import clip, share, split
from rayqueue.errors import DataLossError, InvalidInputError, UnknownTopicError
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import Bounds
from rayqueue.protocol.topics import TopicPartition
from tests.unit.client.queue_in_memory import MemoryQueue

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


# -- places ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", Places(EARLIEST)),
        (" Latest ", Places(LATEST)),
        ('{"t": {"0": 5, "1": "latest"}}', Places(EARLIEST, {P0: 5, P1: LATEST})),
        ('{"0": 5}', Places(EARLIEST, {P0: 5})),
        ({"t": {0: 5, 1: "earliest"}}, Places(EARLIEST, {P0: 5, P1: EARLIEST})),
        ("1000", Places(Instant(1000))),
        ("1970-01-01T00:00:01Z", Places(Instant(1000))),
        ("1970-01-01T02:00:01+02:00", Places(Instant(1000))),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc), Places(Instant(1000))),
    ],
)
def test_places(text: Any, expected: Places) -> None:
    assert parse_places("startingOffsets", text, ["t"], EARLIEST) == expected


@pytest.mark.parametrize(
    "text",
    ["soon", '{"t": {"0": -1}}', '{"t": {"x": 1}}', '{"u": {"0": 1}}', '{"t": 5}', "{", True, '{"t": {"0": true}}'],
)
def test_what_is_no_place(text: Any) -> None:
    with pytest.raises(InvalidInputError):
        parse_places("startingOffsets", text, ["t", "v"], EARLIEST)


def test_a_time_without_zone_is_utc() -> None:
    assert parse_time_ms("x", "1970-01-02") == 24 * 3600 * 1000


def test_resolve() -> None:
    bounds = Bounds(10, 20)
    assert [resolve(place, bounds, 15) for place in (EARLIEST, LATEST, 12, Instant(5))] == [10, 20, 12, 15]


# -- ranges ---------------------------------------------------------------------------------

ranges = st.lists(
    st.builds(
        lambda number, start, size: Range("t", 1, number, start, start + size),
        st.integers(0, 5),
        st.integers(0, 100),
        st.integers(0, 50),
    ),
    max_size=6,
)


@given(ranges, st.none() | st.integers(1, 60), st.integers(0, 40))
def test_pieces_are_the_same_records_in_order(wholes: list[Range], max_records: int | None, at_least: int) -> None:
    pieces = split(wholes, max_records=max_records, at_least=at_least)
    assert [(p.partition, o) for p in pieces for o in range(p.start, p.end)] == [
        (w.partition, o) for w in wholes for o in range(w.start, w.end)
    ]
    assert all(len(piece) for piece in pieces)
    assert max_records is None or all(len(piece) <= max_records for piece in pieces)


def test_at_least_so_many_pieces() -> None:
    pieces = split([Range("t", 1, 0, 0, 900), Range("t", 1, 1, 0, 100)], at_least=10)
    assert [len(piece) for piece in pieces] == [100] * 10


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 1000), max_size=12), st.integers(1, 2000))
def test_shares(counts: dict[int, int], limit: int) -> None:
    backlog = {TopicPartition("t", number): count for number, count in counts.items()}
    taken = share(backlog, limit)
    assert taken.keys() == backlog.keys()
    assert all(0 <= taken[each] <= backlog[each] for each in backlog)
    assert sum(taken.values()) == min(limit, sum(backlog.values()))
    waiting = [each for each, count in backlog.items() if count]
    if len(waiting) <= limit:
        assert all(taken[each] for each in waiting), "one is starved"


def test_what_retention_took() -> None:
    whole = Range("t", 1, 0, 5, 50)
    assert clip(whole, Bounds(5, 60), fail_on_data_loss=True) == whole
    assert clip(whole, Bounds(20, 60), fail_on_data_loss=False).start == 20
    assert not len(clip(whole, Bounds(60, 60), fail_on_data_loss=False))
    with pytest.raises(DataLossError, match="records 5 to 19 of t-0"):
        clip(whole, Bounds(20, 60), fail_on_data_loss=True)


# -- planning and reading, on real partitions -------------------------------------------------


@pytest.fixture
def queue() -> Any:
    made = MemoryQueue()
    made.create_topic("t", partitions=2, lanes=2)
    for number in range(2):
        for at in range(10):
            made.append("t", number, *[b"%d-%d-%d" % (number, at, row) for row in range(5)], timestamps=1000 * at)
    return made


def test_planning(queue: Any) -> None:
    lookup = Lookup(queue)
    found = lookup.ranges(["t"], Places(Instant(3000), {P1: 7}), Places(LATEST, {P0: 40}))
    assert [(r.partition, r.start, r.end) for r in found] == [(0, 15, 40), (1, 7, 50)]
    with pytest.raises(InvalidInputError, match="past its end"):
        lookup.ranges(["t"], Places(EARLIEST), Places(LATEST, {P0: 51}))
    with pytest.raises(InvalidInputError, match="no partition"):
        lookup.ranges(["t"], Places(EARLIEST, {TopicPartition("t", 9): 0}), Places(LATEST))
    with pytest.raises(UnknownTopicError):
        lookup.ranges(["nobody"], Places(EARLIEST), Places(LATEST))


def test_moments_are_rounded_to_milliseconds() -> None:
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=1234)
    assert parse_time_ms("x", moment) == 1234
