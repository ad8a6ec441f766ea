"""Tables to batches, without an object per row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.bridge.rows import Cut, Rows, RowSettings
from rayqueue.client.producer.partitioners import consistent, murmur2_partition
from rayqueue.errors import InvalidInputError, OversizedRecordError
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicSettings
from rayqueue.records import BatchHeader, Compression, Record, RecordBatch, with_producer


def topic(name: str = "t", partitions: int = 4, **settings: Any) -> TopicInfo:
    parts = tuple(PartitionInfo(number, "g", ()) for number in range(partitions))
    return TopicInfo(name, 1, TopicSettings(partitions=partitions, **settings), parts)


def written(rows: Rows, *tables: Any) -> list[Cut]:
    cuts = [cut for table in tables for cut in rows.add(table)]
    return cuts + list(rows.finish())


def records(cuts: list[Cut]) -> list[Record]:
    return [r for cut in cuts for r in RecordBatch.decode(cut.payload).records(cut.topic, cut.partition)]


def one(info: TopicInfo | None = None, **options: Any) -> Rows:
    info = info or topic()
    return Rows({info.name: info}, RowSettings(topic=info.name, **options))


binary = st.none() | st.binary(max_size=20)
headers = st.none() | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=5)), max_size=3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(binary, binary, headers, st.integers(0, 2), st.integers(0, 10**12)), min_size=1, max_size=60),
    st.integers(50, 3000),
)
def test_every_row_arrives_once_in_order_and_where_a_producer_would_put_it(given_rows: list[Any], size: int) -> None:
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    table = pa.record_batch(
        {
            "value": pa.array([row[0] for row in given_rows], pa.binary()),
            "key": pa.array([row[1] for row in given_rows], pa.binary()),
            "headers": pa.array(
                [
                    None if row[2] is None else [dict(zip(("key", "value"), p, strict=True)) for p in row[2]]
                    for row in given_rows
                ],
                pa.list_(pair),
            ),
            "lane": pa.array([row[3] for row in given_rows]),
            "timestamp": pa.array([row[4] * 1000 for row in given_rows], pa.timestamp("us", tz="UTC")),
        }
    )
    cuts = written(one(topic(lanes=3), batch_bytes=size), table)
    found = [(cut, r) for cut in cuts for r in RecordBatch.decode(cut.payload).records()]
    wanted = [(v, k, tuple(h or ()), lane, stamp) for v, k, h, lane, stamp in given_rows]
    assert Counter((r.value, r.key, r.headers, cut.lane, r.timestamp) for cut, r in found) == Counter(wanted)
    for cut, record in found:
        if record.key is not None:
            assert cut.partition == consistent(record.key, 4)
    for key in {row[1] for row in given_rows} - {None}:
        for lane in range(3):
            assert [(r.value, r.timestamp) for c, r in found if (r.key, c.lane) == (key, lane)] == [
                (v, stamp) for v, k, _, at, stamp in given_rows if (k, at) == (key, lane)
            ]


def test_rows_without_keys_are_spread_evenly() -> None:
    cuts = written(one(), pa.record_batch({"value": pa.array([b"v"] * 1000)}))
    assert Counter(r.partition for r in records(cuts)) == dict.fromkeys(range(4), 250)


def test_strings_maps_topics_partitions() -> None:
    table = pa.record_batch(
        {
            "value": ["a", "b", "c"],
            "key": ["x", "x", None],
            "topic": ["u", None, "t"],
            "partition": pa.array([None, 3, 2], pa.int32()),
            "headers": pa.array([{"n": b"1"}, None, {}], pa.map_(pa.string(), pa.binary())),
        }
    )
    rows = Rows({"t": topic("t"), "u": topic("u", 7)}, RowSettings(topic="t", partitioner="murmur2"))
    found = {(r.topic, r.partition, r.value, r.headers) for r in records(written(rows, table))}
    assert found == {
        ("u", murmur2_partition(b"x", 7), b"a", (("n", b"1"),)),
        ("t", 3, b"b", ()),
        ("t", 2, b"c", ()),
    }


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"key": ["a"]}, "no column 'value'"),
        ({"value": ["a"], "amount": [1]}, "column 'amount' cannot be written"),
        ({"value": [1]}, "cannot be read as binary.*to_json"),
        ({"value": ["a"], "topic": ["elsewhere"]}, "topic 'elsewhere'"),
        ({"value": ["a"], "partition": [4]}, "no partition 4"),
        ({"value": ["a"], "lane": [1]}, "no lane 1"),
        ({"value": ["a"], "lane": [-1]}, "a lane is"),
        ({"value": ["a"], "headers": ["x"]}, "must be maps"),
        ({"value": ["a"], "timestamp": ["now"]}, "column 'timestamp' cannot be read"),
    ],
)
def test_what_cannot_be_written(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        written(one(), pa.record_batch(columns))


def test_a_row_that_is_too_large_is_refused_before_anything_is_staged() -> None:
    with pytest.raises(OversizedRecordError):
        written(one(topic(max_record_bytes=10)), pa.record_batch({"value": [b"x" * 11]}))


def test_batches_stay_below_the_limit() -> None:
    cuts = written(one(topic(partitions=1)), pa.record_batch({"value": [b"x" * 90_000] * 50}))
    assert sum(cut.count for cut in cuts) == 50
    assert all(len(cut.payload) < 1024 * 1024 for cut in cuts)


def test_compression() -> None:
    (cut,) = written(
        one(topic(partitions=1), compression=Compression.LZ4), pa.record_batch({"value": [b"x" * 1000] * 50})
    )
    assert BatchHeader.parse(cut.payload).compression == Compression.LZ4
    assert len(cut.payload) < 5000


def test_a_batch_of_another_producer_has_the_same_records() -> None:
    (cut,) = written(one(topic(partitions=1)), pa.record_batch({"value": ["a", "b"], "key": ["k", None]}))
    batch = RecordBatch.decode(with_producer(cut.payload, producer_id=2**63 + 5, epoch=3, sequence=9, lane=1))
    assert [(r.key, r.value, r.lane) for r in batch.records()] == [(b"k", b"a", 1), (None, b"b", 1)]
    header = batch.header
    assert (header.producer_id, header.epoch, header.sequence, header.lane) == (2**63 + 5, 3, 9, 1)
