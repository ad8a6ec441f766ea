"""A range of a partition as Arrow: exactly its records, and what cannot be read raised or left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.bridge.scan import read
from rayqueue.errors import TopicRecreatedError, UnreadableBatchError
from rayqueue.net.scan import Range, ScanSettings
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import RecordBatch
from rayqueue.records.table import COLUMNS, schema_of
from tests.unit.client.queue_in_memory import MemoryQueue
from tests.unit.records.test_records_batch import resealed


def queue_of(batches: int) -> Any:
    queue = MemoryQueue()
    queue.create_topic("t", partitions=1)
    for at in range(batches):
        queue.append("t", 0, *[b"%d" % (5 * at + row) for row in range(5)])
    return queue


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([1, 1 << 20]))
def test_reading_a_range_gives_exactly_it(start: int, end: int, fetch_bytes: int) -> None:
    options = ScanSettings(follower=False, fetch_bytes=fetch_bytes)
    batches = list(read(queue_of(10), Range("t", 1, 0, start, end), COLUMNS, options))
    assert all(batch.schema == schema_of(COLUMNS) for batch in batches)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(start, end))
    assert all(row["value"] == b"%d" % row["offset"] and row["topic"] == "t" for row in rows)


def test_a_range_without_topic_id_is_of_whichever_topic_has_the_name() -> None:
    """As decisions of releases have it that kept none."""
    (batch,) = read(queue_of(1), Range("t", 0, 0, 0, 5), ("offset",), ScanSettings(follower=False))
    assert batch.num_rows == 5
    with pytest.raises(TopicRecreatedError):
        list(read(queue_of(1), Range("t", 2, 0, 0, 5), ("offset",), ScanSettings(follower=False)))


def test_a_reader_that_stops_early_ends_its_fetches() -> None:
    queue = queue_of(10)
    batches = read(queue, Range("t", 1, 0, 0, 50), ("offset",), ScanSettings(follower=False, fetch_bytes=1))
    assert next(batches).num_rows == 5
    batches.close()  # type: ignore[attr-defined]
    queue.io.call(asyncio.sleep(0.05))
    assert queue.steps <= 2, "one that was handed out, and one ahead of it"


def poisoned() -> Any:
    """Two batches, and one between them whose header is right and whose offsets are not."""
    queue = queue_of(1)
    good = RecordBatch.encode([b"12345678", b""], timestamps=1)
    at = good.index((8).to_bytes(4, "little") * 2)
    bad = resealed(good[:at] + (2**30).to_bytes(4, "little") + good[at + 4 :])
    queue.partitions[TopicPartition("t", 0)].log.apply(bad)
    queue.append("t", 0, b"7")
    return queue


def test_what_cannot_be_read_is_raised_with_its_place() -> None:
    with pytest.raises(UnreadableBatchError) as told:
        list(read(poisoned(), Range("t", 1, 0, 0, 8), COLUMNS, ScanSettings(follower=False)))
    assert told.value.details == {"topic": "t", "partition": 0, "offset": 5, "end": 7}


def test_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    options = ScanSettings(follower=False, on_corrupt="skip")
    (batch,) = read(poisoned(), Range("t", 1, 0, 0, 8), COLUMNS, options)
    assert batch.column("offset").to_pylist() == [0, 1, 2, 3, 4, 7]
    assert "t-0 cannot be read from offset 5 to 7" in caplog.text


def test_columns_that_are_in_no_record_need_none_to_be_decoded() -> None:
    (batch,) = read(poisoned(), Range("t", 1, 0, 0, 8), ("offset", "lane"), ScanSettings(follower=False))
    assert batch.column("offset").to_pylist() == list(range(8))
