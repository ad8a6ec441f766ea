"""The format "rayqueue": options, filters, schemas and offsets. No JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: scripts/setup installs the extra 'spark'")

from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from rayqueue.bridge.connection import Where
from rayqueue.bridge.places import EARLIEST, LATEST, Instant, Places
from rayqueue.errors import DataLossError, InvalidInputError, MissingDependencyError
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import Trim
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Compression
from rayqueue.records.table import COLUMNS
from rayqueue.spark import needs
from rayqueue.spark.filters import Wanted
from rayqueue.spark.options import read_options, stream_options, write_options
from rayqueue.spark.reader import FilteredTopicReader, RangePartition, TopicReader
from rayqueue.spark.schema import arrow_schema_of, schema_of
from rayqueue.spark.source import RayQueueDataSource, source_for
from rayqueue.spark.start import session, settings
from rayqueue.spark.stream import TopicStreamReader, decode_offset, encode_offset
from tests.unit.client.queue_in_memory import MemoryQueue

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


# -- options ----------------------------------------------------------------------------------


def test_reading() -> None:
    options = read_options(
        {
            "Topics": "a, b",
            "startingOffsets": '{"a": {"0": 5}}',
            "endingTimestamp": "1000",
            "columns": "value,offset",
            "maxRecordsPerSplit": "10",
            "failOnDataLoss": "false",
            "readFrom": "leader",
            "onCorrupt": "skip",
            "address": "127.0.0.1:1",
            "partitions": "1,2",
        }
    )
    assert options.topics == ("a", "b")
    assert options.start == Places(EARLIEST, {TopicPartition("a", 0): 5})
    assert options.end == Places(Instant(1000))
    assert options.columns == ("value", "offset")
    assert options.max_records_per_split == 10
    assert options.partitions == frozenset({1, 2})
    assert not options.scan.follower
    assert not options.scan.fail_on_data_loss
    assert options.scan.on_corrupt == "skip"
    assert options.where == Where("127.0.0.1:1", None)


def test_a_stream_begins_at_the_end_and_a_batch_at_the_start() -> None:
    assert read_options({"topic": "t"}).start == Places(EARLIEST)
    assert stream_options({"topic": "t"}).read.start == Places(LATEST)


def test_times_per_partition() -> None:
    options = read_options({"topic": "t", "startingTimestamp": '{"t": {"0": 1000}}'})
    assert options.start == Places(EARLIEST, {P0: Instant(1000)})


def test_writing() -> None:
    options = write_options({"topic": "t", "compression": "ZSTD", "checkpointLocation": "/c", "lane": "2"}, stream=True)
    assert (options.topic, options.compression, options.writer, options.lane) == ("t", Compression.ZSTD, None, 2)
    assert write_options({"topics": "a,b"}).topic is None


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (read_options, {}, "say what to read"),
        (read_options, {"topic": "t", "startingOfsets": "latest"}, "no option 'startingofsets'"),
        (read_options, {"topic": "bad name"}, "cannot name a topic"),
        (read_options, {"topic": "t", "columns": "price"}, "no column 'price'"),
        (read_options, {"topic": "t", "fetchBytes": "-1"}, "fetchBytes"),
        (read_options, {"topic": "t", "failOnDataLoss": "maybe"}, "true or false"),
        (read_options, {"topic": "t", "startingOffsets": "latest", "startingTimestamp": "1"}, "not both"),
        (read_options, {"topic": "t", "partitions": "one"}, "numbers with commas"),
        (stream_options, {"topic": "t", "endingOffsets": "latest"}, "no end"),
        (stream_options, {"topic": "t", "pin": "true"}, "say the group"),
        (write_options, {}, "say where to write"),
        (write_options, {"topic": "a,b"}, "one topic"),
        (write_options, {"topic": "t", "batchId": "1"}, "belong together"),
        (write_options, {"topic": "t", "delivery": "maybe"}, "delivery"),
    ],
)
def test_bad_options(make: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        make(options)


def test_a_stream_that_writes_at_least_once() -> None:
    assert not write_options({"topic": "t", "delivery": "at_least_once"}, stream=True).exactly_once


# -- schema -----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [COLUMNS, ("value", "timestamp"), ("headers",)])
def test_what_is_read_has_the_schema_that_spark_wants(
    columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = MemoryQueue()
    queue.create_topic("t", partitions=1)
    queue.append("t", 0, b"a", b"b", headers=[[("n", b"v")], []])
    monkeypatch.setattr("rayqueue.spark.reader.connected", lambda place: queue)
    schema = schema_of(columns)
    reader = TopicReader(read_options({"topic": "t", "readFrom": "leader"}), schema)
    (made,) = reader.read(RangePartition(Range("t", 1, 0, 1, 2)))
    assert made.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    whole = {
        "topic": "t",
        "partition": 0,
        "offset": 1,
        "timestamp": datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc),
        "key": None,
        "value": b"b",
        "headers": [],
        "lane": 0,
    }
    assert made.to_pylist() == [{name: whole[name] for name in columns}]


def test_a_timestamp_that_spark_cannot_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MemoryQueue()
    queue.create_topic("t", partitions=1)
    queue.append("t", 0, b"a", timestamps=2**62)
    monkeypatch.setattr("rayqueue.spark.reader.connected", lambda place: queue)
    task = RangePartition(Range("t", 1, 0, 0, 1))
    reader = TopicReader(read_options({"topic": "t", "readFrom": "leader"}), schema_of(COLUMNS))
    with pytest.raises(InvalidInputError, match="t-0 has a timestamp"):
        list(reader.read(task))
    without = TopicReader(read_options({"topic": "t", "readFrom": "leader"}), schema_of(("value", "offset")))
    (made,) = without.read(task)
    assert made.num_rows == 1


def test_a_users_schema_may_leave_out_but_not_change() -> None:
    with pytest.raises(InvalidInputError, match="column 'value' is binary"):
        arrow_schema_of(StructType([StructField("value", StringType())]))
    with pytest.raises(InvalidInputError, match="no column"):
        arrow_schema_of(StructType([StructField("price", LongType())]))


def test_the_source_knows_the_sessions_queue() -> None:
    source = source_for(Where("127.0.0.1:6379", "rq"))({"TOPIC": "t"})
    assert source.name() == "rayqueue"
    reader = source.reader(source.schema())
    assert isinstance(reader, TopicReader)
    assert reader._options.where == Where("127.0.0.1:6379", "rq")
    other = source_for(Where("127.0.0.1:6379", "rq"))({"topic": "t", "namespace": "other", "pushFilters": "true"})
    pushing = other.reader(other.schema())
    assert isinstance(pushing, FilteredTopicReader)
    assert pushing._options.where.namespace == "other"


def test_a_topic_is_not_overwritten() -> None:
    with pytest.raises(InvalidInputError, match="a log"):
        RayQueueDataSource({"topic": "t"}).writer(schema_of(("value",)), overwrite=True)


# -- filters ----------------------------------------------------------------------------------

WHOLE = Range("t", 1, 0, 0, 100)


@pytest.mark.parametrize(
    ("pushed", "expected"),
    [
        ([GreaterThan(("offset",), 10), LessThanOrEqual(("offset",), 20)], [(11, 21)]),
        ([GreaterThanOrEqual(("offset",), 10), LessThan(("offset",), 20)], [(10, 20)]),
        ([EqualTo(("offset",), 5)], [(5, 6)]),
        ([In(("offset",), (7, 3, 4, 200))], [(3, 5), (7, 8)]),
        ([EqualTo(("partition",), 0)], [(0, 100)]),
        ([In(("partition",), (1, 2))], []),
        ([EqualTo(("topic",), "u")], []),
        ([IsNotNull(("offset",)), LessThan(("offset",), -5)], []),
    ],
)
def test_filters_that_are_carried_out_here(pushed: list[Any], expected: list[tuple[int, int]]) -> None:
    wanted = Wanted()
    assert wanted.push(pushed) == []
    assert [(r.start, r.end) for r in wanted.cut(WHOLE)] == expected


def test_filters_that_spark_must_carry_out() -> None:
    stamp = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    left = [
        GreaterThanOrEqual(("timestamp",), stamp),
        LessThan(("timestamp",), stamp),
        EqualTo(("value",), b"x"),
        Not(EqualTo(("partition",), 0)),
        StringContains(("topic",), "t"),
        GreaterThan(("partition",), 0),
        IsNotNull(("key",)),
    ]
    wanted = Wanted()
    assert wanted.push(left) == left
    (cut,) = wanted.cut(WHOLE)
    assert (cut.min_timestamp_ms, cut.max_timestamp_ms) == (1000, 1000)


# -- streams ----------------------------------------------------------------------------------


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = MemoryQueue()
    made.create_topic("t", partitions=2, lanes=2)
    monkeypatch.setattr("rayqueue.spark.stream.connected", lambda _: made)
    return made


def fill(queue: Any, number: int, count: int) -> None:
    for _ in range(count // 10):
        queue.append("t", number, *[b"x" * 100] * 10)


def stream(**options: str) -> TopicStreamReader:
    return TopicStreamReader(stream_options({"topic": "t", **options}), schema_of(("value",)))


def offsets(**numbers: int) -> dict[str, Any]:
    return {"t": {"id": 1, "offsets": {name.removeprefix("p"): each for name, each in numbers.items()}}}


def planned(reader: TopicStreamReader, start: Any, end: Any) -> list[tuple[int, int, int]]:
    return [(p.range.partition, p.range.start, p.range.end) for p in reader.partitions(start, end)]  # type: ignore[attr-defined]


def test_offsets_are_json_and_read_back(queue: Any) -> None:
    encoded = encode_offset(queue.infos, {P1: 5, P0: 3})
    assert json.dumps(encoded) == '{"t": {"id": 1, "offsets": {"0": 3, "1": 5}}}'
    assert decode_offset(encoded, queue.infos) == {P0: 3, P1: 5}
    with pytest.raises(InvalidInputError, match="not an offset"):
        decode_offset({"t": 5}, queue.infos)


def test_a_stream_begins_where_it_is_told(queue: Any) -> None:
    fill(queue, 0, 50)
    assert stream().initialOffset() == offsets(p0=50, p1=0)
    assert stream(startingOffsets="earliest").initialOffset() == offsets(p0=0, p1=0)
    assert stream(startingOffsets='{"0": 7}').initialOffset() == offsets(p0=7, p1=0)


def test_admission_is_shared_by_backlog(queue: Any) -> None:
    fill(queue, 0, 300)
    fill(queue, 1, 100)
    start = offsets(p0=0, p1=0)
    reader = stream(maxRecordsPerTrigger="100")
    assert reader.getDefaultReadLimit() == ReadMaxRows(100)
    assert reader.latestOffset(start, ReadMaxRows(100)) == offsets(p0=75, p1=25)
    assert reader.latestOffset(start, ReadAllAvailable()) == offsets(p0=300, p1=100)  # Trigger.Once
    assert stream().latestOffset(start, ReadAllAvailable()) == offsets(p0=300, p1=100)
    assert reader.reportLatestOffset() == offsets(p0=300, p1=100)


def test_admission_by_bytes(queue: Any) -> None:
    fill(queue, 0, 1000)
    reader = stream(maxBytesPerTrigger="20000")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(20000)
    end = reader.latestOffset(offsets(p0=0, p1=0), limit)
    assert 50 < end["t"]["offsets"]["0"] < 200


def test_available_now_ends_where_it_ended_when_it_began(queue: Any) -> None:
    fill(queue, 0, 100)
    reader = stream(maxRecordsPerTrigger="60")
    reader.prepareForTriggerAvailableNow()
    fill(queue, 0, 500)
    queue.add_partition("t")
    at = offsets(p0=0, p1=0)
    seen = []
    for _ in range(4):
        at = reader.latestOffset(at, ReadMaxRows(60))
        seen.append(at["t"]["offsets"]["0"])
    assert seen == [60, 100, 100, 100]
    assert "2" not in at["t"]["offsets"]


def test_a_new_partition_is_read_from_its_start(queue: Any) -> None:
    reader = stream()
    start = reader.initialOffset()
    queue.add_partition("t")
    fill(queue, 2, 30)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end == offsets(p0=0, p1=0, p2=30)
    assert planned(reader, start, end) == [(2, 0, 30)]


def test_ranges_of_a_micro_batch(queue: Any) -> None:
    fill(queue, 0, 100)
    reader = stream(maxRecordsPerSplit="40")
    parts = planned(reader, offsets(p0=10, p1=0), offsets(p0=90, p1=0))
    assert parts == [(0, 10, 50), (0, 50, 90)]
    assert planned(reader, offsets(p0=90, p1=0), offsets(p0=90, p1=0)) == []


def test_what_the_checkpoint_needs_and_retention_took(queue: Any) -> None:
    fill(queue, 0, 100)
    queue.partitions[P0].call(Trim(before=50))
    start, end = offsets(p0=10, p1=0), offsets(p0=100, p1=0)
    with pytest.raises(DataLossError, match="records 10 to 49 of t-0"):
        stream().partitions(start, end)
    assert planned(stream(failOnDataLoss="false"), start, end) == [(0, 50, 100)]


def test_a_checkpoint_of_another_topic_of_the_same_name(queue: Any) -> None:
    with pytest.raises(DataLossError, match="made again"):
        stream().partitions({"t": {"id": 9, "offsets": {}}}, offsets(p0=1))
    with pytest.raises(DataLossError, match="before offset"):
        stream().partitions(offsets(p0=5), offsets(p0=10))


def test_progress_is_the_groups_position_in_every_lane(queue: Any) -> None:
    fill(queue, 0, 100)
    reader = stream(group="billing", pin="true")
    reader.latestOffset(offsets(p0=0, p1=0), ReadAllAvailable())
    reader.commit(offsets(p0=40, p1=0))
    position = queue.partitions[P0].log.partition.position("billing")
    assert (position.offsets, position.pinned) == ({0: 40, 1: 40}, True)
    reader.latestOffset(offsets(p0=70, p1=0), ReadAllAvailable())  # what is before the next batch is through
    assert queue.partitions[P0].log.partition.position("billing").offsets == {0: 70, 1: 70}
    stream().commit(offsets(p0=90))  # without a group: nothing to tell
    assert queue.partitions[P0].log.partition.position("billing").offsets == {0: 70, 1: 70}


# -- what must be installed ---------------------------------------------------------------------


def test_settings_of_a_session() -> None:
    made = settings({"spark.sql.shuffle.partitions": "7"})
    assert made["spark.sql.shuffle.partitions"] == "7"
    assert made["spark.pyspark.python"] == sys.executable
    assert "java.base/java.math=ALL-UNNAMED" in made["spark.driver.extraJavaOptions"]
    assert made["spark.sql.python.filterPushdown.enabled"] == "true"


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="openjdk-17-jre-headless"):
        needs.need_java()


def test_a_java_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="Java 17"):
        needs.need_java()


def test_a_spark_without_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("raydp")
    assert needs.raydp_problem() is None
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.3.0" if name == "pyspark" else "1")
    assert "no shim for Spark 4.3.0" in str(needs.raydp_problem())


def test_an_engine_that_does_not_exist() -> None:
    with pytest.raises(InvalidInputError, match="engine"):
        session(None, engine="flink")  # type: ignore[arg-type]


def test_a_session_can_be_started_more_than_once() -> None:
    """No module of the package may have the name of one of its functions: it would take its place."""
    import rayqueue.spark

    for _ in range(2):
        assert all(callable(getattr(rayqueue.spark, name)) for name in rayqueue.spark.__all__)


def test_importing_the_package_does_not_load_spark() -> None:
    code = "import sys, rayqueue.spark, rayqueue.data; print('pyspark' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
