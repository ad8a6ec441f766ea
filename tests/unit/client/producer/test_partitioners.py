"""Partitioners: a key's partition, for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.client.producer import partitioners
from rayqueue.client.producer.accumulator import ANY, Accumulator
from rayqueue.client.producer.destination import Target
from rayqueue.client.producer.partitioners import (
    CACHED_KEYS,
    KeyedPartitions,
    check_partitioner,
    consistent,
    consistent_many,
    jump,
    key_hash,
    murmur2,
    murmur2_partition,
)
from rayqueue.errors import ConfigError, InvalidInputError, UnknownPartitionError
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicSettings


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed
    assert murmur2_partition(key, 10) == (hashed & 0x7FFFFFFF) % 10


# Of the authors' C++ code; jump(0, 2) and the like are 0 in all implementations.
@pytest.mark.parametrize(
    ("hashed", "buckets", "bucket"),
    [(1, 1, 0), (42, 57, 43), (0xDEAD10CC, 1, 0), (0xDEAD10CC, 666, 361), (256, 1024, 520), (0, 1000, 0)],
)
def test_jump_is_the_published_one(hashed: int, buckets: int, bucket: int) -> None:
    assert jump(hashed, buckets) == bucket


def test_where_a_key_belongs_never_changes() -> None:
    """Golden: a change here sends the keys of existing topics to other partitions."""
    keys = [b"", b"a", b"abc", b"user-1", b"user-2", "schlüssel".encode(), bytes(range(256))]
    assert [key_hash(key) for key in keys] == GOLDEN_HASHES
    assert [[consistent(key, count) for key in keys] for count in (1, 2, 3, 10, 1000)] == GOLDEN_PARTITIONS


GOLDEN_HASHES = [
    16294208416658607535,
    7102740011021693165,
    4046518526874346504,
    10758385981036425458,
    14941092498879723402,
    10845330826454768349,
    10585171047313426193,
]
GOLDEN_PARTITIONS = [
    [0, 0, 0, 0, 0, 0, 0],
    [1, 0, 1, 1, 0, 0, 0],
    [2, 2, 1, 1, 2, 0, 0],
    [8, 5, 7, 4, 8, 6, 0],
    [258, 16, 179, 177, 334, 695, 340],
]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=300), st.integers(1, 5000))
def test_many_keys_at_once_are_the_same_as_one_by_one(keys: list[bytes], partitions: int) -> None:
    one_by_one = [consistent(key, partitions) for key in keys]
    assert consistent_many(keys, partitions) == one_by_one
    keyed = KeyedPartitions("consistent", partitions)
    assert keyed.many(keys) == one_by_one
    assert keyed.many(keys) == one_by_one  # from the cache
    assert [keyed[key] for key in keys] == one_by_one


def test_without_numpy_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"key-%d" % number for number in range(1000)]
    with_numpy = consistent_many(keys, 17)
    monkeypatch.setattr(partitioners, "np", None)
    assert consistent_many(keys, 17) == with_numpy


@pytest.mark.parametrize("partitions", [1, 2, 7, 40])
def test_one_more_partition_takes_its_share_and_nothing_else_moves(partitions: int) -> None:
    keys = [b"key-%d" % number for number in range(20_000)]
    before, after = consistent_many(keys, partitions), consistent_many(keys, partitions + 1)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {partitions}
    assert len(moved) == pytest.approx(len(keys) / (partitions + 1), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["consistent", "murmur2"])
def test_keys_are_spread_evenly(name: str) -> None:
    keys = [b"user-%d" % number for number in range(50_000)]
    found = KeyedPartitions(name, 16).many(keys)
    assert min(map(found.count, range(16))) > 0.9 * len(keys) / 16


@pytest.mark.slow
def test_the_cache_is_bounded_and_right_when_it_overflows() -> None:
    keyed = KeyedPartitions("consistent", 5)
    first = [b"a-%d" % number for number in range(CACHED_KEYS - 10)]
    second = [b"b-%d" % number for number in range(1000)]
    keyed.many(first)
    assert keyed.many(first[:500] + second) == [consistent(key, 5) for key in first[:500] + second]
    assert keyed.many(second * 2) == [consistent(key, 5) for key in second * 2]
    more = [b"c-%d" % number for number in range(CACHED_KEYS + 1)]
    assert keyed.many(more)[-1] == consistent(more[-1], 5)
    assert len(keyed) <= CACHED_KEYS


# -- a topic ---------------------------------------------------------------------------


def info(partitions: int, **settings: int) -> TopicInfo:
    parts = tuple(PartitionInfo(number, f"orders-{number}.1", ()) for number in range(partitions))
    return TopicInfo("orders", 1, TopicSettings(partitions=partitions, **settings), parts)  # type: ignore[arg-type]


def target(partitioner: object, partitions: int = 4) -> Target:
    limits: Any = {"batch_bytes": 1, "buffer_bytes": 1, "linger_ms": 0, "delivery_timeout_ms": 1}
    accumulator = Accumulator(**limits, clock_s=lambda: 0.0, wake=lambda: None)
    return Target(info(partitions), partitioner, 1 << 20, accumulator)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["consistent", "murmur2", "sticky"])
def test_records_without_a_key_go_to_any_partition(name: str) -> None:
    assert target(name).choose(None, b"v") == ANY
    assert target(name).choose_many([b"v"] * 3, None) is None


def test_sticky_ignores_keys() -> None:
    assert target("sticky").choose(b"k", b"v") == ANY


def test_roundrobin_takes_turns_across_calls() -> None:
    chosen = target("roundrobin")
    turns = [chosen.choose(b"the same", b"v") for _ in range(3)]
    rows = chosen.choose_many([b"v"] * 6, [b"the same"] * 6)
    assert rows is not None
    turns += [number for _, number in sorted((row, number) for number, each in rows.items() for row in each)]
    assert turns == [(turns[0] + turn) % 4 for turn in range(9)]


def test_a_callable_decides_and_is_checked() -> None:
    chosen = target(lambda key, value, partitions: (len(key or b"") + len(value or b"")) % partitions)
    assert chosen.choose(b"kk", b"v") == 3
    assert chosen.choose_many([b"", b"v", b"vv"], None) == {0: [0], 1: [1], 2: [2]}
    with pytest.raises(UnknownPartitionError):
        target(lambda key, value, partitions: partitions).choose(None, None)
    with pytest.raises(InvalidInputError):
        target(lambda key, value, partitions: "1").choose(None, None)


def test_keyed_rows_keep_their_order_and_the_rest_goes_anywhere() -> None:
    keys = [b"a", None, b"b", b"a", None]
    rows = target("consistent").choose_many([b"v"] * 5, keys)
    assert rows is not None
    assert rows[ANY] == [1, 4]
    assert 0 in rows[consistent(b"a", 4)]
    assert sorted(row for each in rows.values() for row in each) == list(range(5))
    assert all(list(each) == sorted(each) for each in rows.values())


def test_new_partitions_are_used() -> None:
    chosen = target("consistent", 1)
    assert {chosen.choose(b"%d" % number, None) for number in range(50)} == {0}
    chosen.changed(info(3, max_record_bytes=5))
    assert {chosen.choose(b"%d" % number, None) for number in range(50)} == {0, 1, 2}
    assert len(chosen.buffer.partitions) == 3
    assert chosen.max_bytes == 5


def test_an_unknown_partitioner_is_refused() -> None:
    with pytest.raises(ConfigError, match="consistent, murmur2, roundrobin, sticky"):
        check_partitioner("random")
