"""Format "rayqueue" on a real Spark in this process: batch and streaming, with retried tasks, restarts and kills."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: scripts/setup installs the extra 'spark'")

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

import rayqueue.spark
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.bridge.scan import read
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.partitioners import consistent
from rayqueue.errors import BridgeError
from rayqueue.net.scan import ScanSettings
from rayqueue.protocol.calls import GetBounds, GetPosition, Trim
from rayqueue.protocol.topics import TopicPartition
from rayqueue.testing import wait_for
from tests.integration.consumers import leader_pid, running_queue
from tests.integration.sparks import local_spark, need_java

pytestmark = pytest.mark.timeout(400)

ROWS = 3000


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    need_java()
    with running_queue() as queue:
        queue.create_topic("orders", partitions=3, replication=1, lanes=2)
        with queue.producer() as producer:
            for lane in (0, 1):
                rows = range(lane, ROWS, 2)
                producer.send_many(
                    "orders",
                    [b"value %d" % row for row in rows],
                    keys=[b"key %d" % (row % 50) for row in rows],
                    headers=[[("row", b"%d" % row)] if row % 3 == 0 else [] for row in rows],
                    timestamps_ms=[1_700_000_000_000 + row for row in rows],
                    priority=lane,
                )
            producer.flush()
        yield queue


@pytest.fixture(scope="module")
def spark(rq: RayQueue) -> Iterator[SparkSession]:
    with local_spark(rq) as session:
        yield session


def frame(spark: SparkSession, topic: str = "orders", **options: Any) -> DataFrame:
    return spark.read.format("rayqueue").options(topic=topic, **options).load()


def values(rq: RayQueue, topic: str) -> Counter[bytes]:
    """What is committed in the topic, read without Spark."""
    found: Counter[bytes] = Counter()
    for each in Lookup(rq, committed=True).ranges([topic], Places(EARLIEST), Places(LATEST)):
        for batch in read(rq, each, ("value",), ScanSettings(committed=True)):
            found.update(batch.column(0).to_pylist())
    return found


def ask(rq: RayQueue, topic: str, partition: int, call: Any) -> Any:
    async def asked() -> Any:
        return await (await rq.routes.partition(TopicPartition(topic, partition))).call(call)

    return rq.io.call(asked())


# -- reading ----------------------------------------------------------------------------------


def test_every_record_with_all_its_columns(spark: SparkSession) -> None:
    rows = frame(spark).collect()
    assert len(rows) == ROWS
    places = set()
    for row in rows:
        number = int(bytes(row.value).split()[1])
        assert bytes(row.key) == b"key %d" % (number % 50)
        assert row.partition == consistent(bytes(row.key), 3)
        assert [(h.name, bytes(h.value)) for h in row.headers] == ([("row", b"%d" % number)] if number % 3 == 0 else [])
        assert round(row.timestamp.timestamp() * 1000) == 1_700_000_000_000 + number
        assert (row.lane, row.topic) == (number % 2, "orders")
        places.add((row.partition, row.offset))
    assert len(places) == ROWS


@pytest.mark.long
def test_a_dataframe_that_is_used_with_and_without_filters(spark: SparkSession) -> None:
    """Spark remembers what it pushed for the first of these queries: with push-down the second would miss rows."""
    whole = frame(spark)
    part = whole.filter("partition = 1 and offset between 10 and 12")
    assert sorted(row.offset for row in part.collect()) == [10, 11, 12]
    assert whole.count() == ROWS
    assert whole.filter("partition = 0").union(whole.filter("partition > 0")).count() == ROWS


def test_filters_that_are_pushed_read_less(spark: SparkSession) -> None:
    pushed = frame(spark, pushFilters="true").filter("partition = 1 and offset >= 100 and offset < 105")
    assert pushed.rdd.getNumPartitions() == 1
    assert sorted(row.offset for row in pushed.collect()) == [100, 101, 102, 103, 104]
    late = frame(spark, pushFilters="true").filter(
        F.col("timestamp") >= F.timestamp_millis(F.lit(1_700_000_000_000 + ROWS - 10))
    )
    assert late.count() == 10


def test_offsets_times_splits_and_columns(rq: RayQueue, spark: SparkSession) -> None:
    ends = [ask(rq, "orders", number, GetBounds()).end for number in range(3)]
    some = frame(spark, startingOffsets='{"0": 10}', endingOffsets='{"0": 15, "1": 5, "2": 0}')
    assert Counter(row.partition for row in some.collect()) == {0: 5, 1: 5}
    assert frame(spark, startingTimestamp=str(1_700_000_000_000 + 10 * ROWS)).count() == 0
    assert frame(spark, partitions="2").count() == ends[2]
    small = frame(spark, maxRecordsPerSplit="100", columns="offset")
    assert small.rdd.getNumPartitions() == sum(-(-end // 100) for end in ends)
    assert (small.columns, small.count()) == (["offset"], ROWS)
    with pytest.raises(PySparkException, match="past its end"):
        frame(spark, endingOffsets='{"0": 99999999}').count()
    with pytest.raises(PySparkException, match="nobody"):
        frame(spark, topic="nobody").count()


@pytest.mark.long
def test_one_liners_and_fields_inside_values(rq: RayQueue, spark: SparkSession) -> None:
    rq.create_topic("typed", partitions=2, replication=1)
    people = spark.createDataFrame([(n, f"name {n}") for n in range(100)], "id long, name string")
    rayqueue.spark.from_dataframe(rq, people, "typed", key="id", value_format="json")
    back = rayqueue.spark.to_dataframe(rq, "typed", value_schema="id long, name string")
    assert {(bytes(r.key), r.id, r.name) for r in back.collect()} == {(b"%d" % n, n, f"name {n}") for n in range(100)}
    rq.create_topic("packed", partitions=1, replication=1)
    rayqueue.spark.from_dataframe(rq, people, "packed", value_format="arrow")
    packed = rayqueue.spark.to_dataframe(
        rq, "packed", columns=["offset", "value"], value_schema="id long, name string", value_format="arrow"
    )
    assert {(r.id, r.name) for r in packed.collect()} == {(n, f"name {n}") for n in range(100)}
    assert packed.select("offset").distinct().count() == sum(values(rq, "packed").values()) < 100


@pytest.mark.long
def test_avro_values_there_and_back(rq: RayQueue, spark: SparkSession) -> None:
    rq.create_topic("avro", partitions=1, replication=1)
    schema = (
        "id long, name string, at timestamp, day date, price decimal(9,2), tags array<string>, "
        "sizes map<string,int>, inside struct<x: double, raw: binary>"
    )
    moment, day = datetime(2026, 11, 16, 6, 0, 0, 123456), date(2026, 11, 16)  # noqa: DTZ001  # in the session's zone
    rows = [
        (1, "one", moment, day, Decimal("12.34"), ["a", None], {"m": 3}, (0.5, bytearray(b"\x00\xff"))),
        (2, None, None, None, None, None, None, None),
    ]
    people = spark.createDataFrame(rows, schema)
    rayqueue.spark.from_dataframe(rq, people, "avro", key="id", value_format="avro")
    written = rayqueue.spark.avro_schema(people.schema)
    back = rayqueue.spark.to_dataframe(
        rq, "avro", columns=["key", "value"], value_schema=written, value_format="avro"
    ).orderBy("id")
    assert [tuple(row) for row in back.drop("key").collect()] == [tuple(row) for row in people.orderBy("id").collect()]
    assert [bytes(row.key) for row in back.collect()] == [b"1", b"2"]
    # What others write, and what Spark makes of it as a stream too.
    other = {
        "type": "record",
        "name": "r",
        "fields": [{"name": "id", "type": "int"}, {"name": "odd", "type": "boolean"}],
    }
    rq.create_topic("foreign", partitions=1, replication=1)
    with rq.producer() as producer:
        for number in range(5):
            sink = io.BytesIO()
            fastavro.schemaless_writer(sink, other, {"id": number, "odd": number % 2 == 1})
            producer.send("foreign", sink.getvalue())
        producer.send("foreign", None)
        producer.flush()
    read = rayqueue.spark.to_dataframe(
        rq, "foreign", columns=["offset", "value"], value_schema=json.dumps(other), value_format="avro"
    )
    expected = [*((n, n, n % 2 == 1) for n in range(5)), (5, None, None)]
    assert sorted(tuple(row) for row in read.collect()) == expected
    with pytest.raises(PySparkException, match="not of this Avro schema"):
        rayqueue.spark.to_dataframe(
            rq, "orders", columns=["offset", "value"], value_schema=json.dumps(other), value_format="avro"
        ).collect()


def test_spark_that_finds_no_room_on_ray_runs_here_and_says_so(rq: RayQueue, spark: SparkSession) -> None:
    pytest.importorskip("raydp")
    with pytest.raises(BridgeError, match="need 99 CPUs of Ray"):
        rayqueue.spark.session(rq, engine="raydp", cpu_per_executor=99)
    fallen = rayqueue.spark.session(rq, cpu_per_executor=99)
    told = rayqueue.spark.engine_of(fallen)
    assert told.engine == "local"
    assert "need 99 CPUs of Ray" in told.reason
    assert frame(fallen).count() == ROWS


# -- writing ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_task_that_fails_half_way_leaves_nothing(rq: RayQueue, spark: SparkSession) -> None:
    """Each task writes most of its rows, fails, and is run again: every row is seen once."""
    rq.create_topic("retried", partitions=2, replication=1)

    def stumble(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if context.attemptNumber() == 0 and number == 2:
                raise RuntimeError("half way")
            yield batch

    rows = spark.range(0, 120_000, 1, 2).select(
        F.format_string("row %d %s", "id", F.lit("x" * 30)).alias("value"),
        (F.col("id") % 9).cast("string").alias("key"),
    )
    rows.mapInArrow(stumble, "value string, key string").write.format("rayqueue").option("topic", "retried").mode(
        "append"
    ).save()
    found = values(rq, "retried")
    assert len(found) == 120_000
    assert set(found.values()) == {1}
    ends = [ask(rq, "retried", number, GetBounds()).end for number in (0, 1)]
    assert sum(ends) > 120_000, "no task had written anything when it failed: this test tests nothing"
    assert not [each for each in rq.transactions() if each.state == "open"]


def test_transactions_that_are_open_or_aborted(rq: RayQueue, spark: SparkSession, tmp_path: Path) -> None:
    """Batches and streams show what is committed, up to what is open; all of it only if they are asked to."""
    for name in ("isolated", "isolated-out"):
        rq.create_topic(name, partitions=1, replication=1)

    def seen(**options: str) -> list[bytes]:
        return sorted(bytes(row.value) for row in frame(spark, topic="isolated", **options).collect())

    def streamed() -> Counter[bytes]:
        finish(start(spark, "isolated", "isolated-out", tmp_path))
        return values(rq, "isolated-out")

    with rq.producer(transactional_id="spark-a") as first, rq.producer(transactional_id="spark-b") as second:
        with first.transaction() as tx:
            tx.send("isolated", b"1 committed")
        aborted = first.transaction()
        aborted.begin()
        aborted.send("isolated", b"2 aborted").result()
        aborted.abort()
        with first.transaction() as tx:
            tx.send("isolated", b"3 committed")
        still_open = second.transaction()
        still_open.begin()
        still_open.send("isolated", b"4 open").result()
        with first.transaction() as tx:
            tx.send("isolated", b"5 behind")
        assert seen() == [b"1 committed", b"3 committed"]
        assert streamed() == Counter([b"1 committed", b"3 committed"])
        assert len(seen(isolation="read_uncommitted")) == 5
        still_open.commit()
        assert seen() == [b"1 committed", b"3 committed", b"4 open", b"5 behind"]
        assert streamed() == Counter([b"1 committed", b"3 committed", b"4 open", b"5 behind"])


def test_the_same_batch_is_written_once(rq: RayQueue, spark: SparkSession) -> None:
    rq.create_topic("named", partitions=2, replication=1)
    for run in range(2):
        rows = spark.range(0, 100).select(F.format_string(f"run {run} row %d", "id").alias("value"))
        for batch_id in (0, 1) if run == 0 else (1, 2):
            options = {"topic": "named", "writerId": "job", "batchId": str(batch_id)}
            rows.write.format("rayqueue").options(**options).mode("append").save()
    found = values(rq, "named")
    assert Counter(value.split()[1] for value in found.elements()) == {b"0": 200, b"1": 100}


def test_columns_of_a_write(rq: RayQueue, spark: SparkSession) -> None:
    for name in ("left", "right"):
        rq.create_topic(name, partitions=2, replication=1, lanes=2)
    rows = spark.range(0, 20).select(
        F.col("id").cast("string").cast("binary").alias("value"),
        F.when(F.col("id") % 2 == 0, "left").otherwise("right").alias("topic"),
        F.lit(1).alias("partition"),
        F.lit(1).alias("lane"),
        F.timestamp_millis(F.col("id") + 1_700_000_000_000).alias("timestamp"),
        F.create_map(F.lit("id"), F.col("id").cast("string").cast("binary")).alias("headers"),
    )
    rows.write.format("rayqueue").options(topics="left,right", delivery="at_least_once").mode("append").save()
    back = frame(spark, topic="left,right").collect()
    assert {(r.topic, bytes(r.value)) for r in back} == {(("left", "right")[n % 2], b"%d" % n) for n in range(20)}
    assert all((r.partition, r.lane, r.headers[0].value) == (1, 1, r.value) for r in back)
    with pytest.raises(PySparkException, match="to_json"):
        spark.range(5).write.format("rayqueue").option("topic", "left").mode("append").save()


# -- streaming --------------------------------------------------------------------------------


def start(spark: SparkSession, source: str, sink: str, checkpoint: Path, **options: Any) -> Any:
    frame = spark.readStream.format("rayqueue").options(topic=source, startingOffsets="earliest", **options).load()
    writer = frame.select("key", "value", "headers").writeStream.format("rayqueue")
    return writer.options(topic=sink, checkpointLocation=str(checkpoint)).trigger(availableNow=True).start()


def finish(query: Any) -> int:
    """Its micro-batches."""
    assert query.awaitTermination(180)
    return sum(1 for progress in query.recentProgress if progress["numInputRows"])


@pytest.mark.long
def test_a_stream_that_is_started_again_goes_on_where_it_ended(
    rq: RayQueue, spark: SparkSession, tmp_path: Path
) -> None:
    rq.create_topic("in", partitions=2, replication=1)
    rq.create_topic("out", partitions=2, replication=1)
    sent: list[bytes] = []

    def send(first: int, count: int, partition: int | None = None) -> None:
        fresh = [b"%d" % number for number in range(first, first + count)]
        sent.extend(fresh)
        with rq.producer() as producer:
            producer.send_many("in", fresh, keys=fresh, partition=partition)

    send(0, 1000)
    assert finish(start(spark, "in", "out", tmp_path, maxRecordsPerTrigger=400, group="mirror", pin="true")) == 3
    assert values(rq, "out") == Counter(sent)
    rq.alter_topic("in", partitions=3)
    send(1000, 500)
    send(1500, 10, partition=2)
    assert finish(start(spark, "in", "out", tmp_path, group="mirror", pin="true")) == 1
    assert finish(start(spark, "in", "out", tmp_path)) == 0
    assert values(rq, "out") == Counter(sent)
    for number in range(3):
        position = ask(rq, "in", number, GetPosition(group="mirror"))
        assert (position.offsets[0], position.pinned) == (ask(rq, "in", number, GetBounds()).end, True)


@pytest.mark.long
def test_a_wiped_checkpoint_is_another_writer(rq: RayQueue, spark: SparkSession, tmp_path: Path) -> None:
    """Same path, same batch ids: Spark reads all again, and the sink must not take it for what it has."""
    for name in ("wiped-in", "wiped-out"):
        rq.create_topic(name, partitions=1, replication=1)
    sent = [b"%d" % n for n in range(100)]
    with rq.producer() as producer:
        producer.send_many("wiped-in", sent).result(timeout_ms=30_000)
    for runs in (1, 2):
        for _ in range(2):
            finish(start(spark, "wiped-in", "wiped-out", tmp_path / "checkpoint"))
        assert values(rq, "wiped-out") == Counter(sent * runs)
        shutil.rmtree(tmp_path / "checkpoint")


@pytest.mark.long
def test_what_retention_took_is_an_error_unless_it_is_allowed(
    rq: RayQueue, spark: SparkSession, tmp_path: Path
) -> None:
    rq.create_topic("short", partitions=1, replication=1)
    rq.create_topic("kept", partitions=1, replication=1)
    with rq.producer() as producer:
        producer.send_many("short", [b"%d" % n for n in range(100)]).result(timeout_ms=30_000)
    finish(start(spark, "short", "kept", tmp_path))
    with rq.producer() as producer:
        for n in range(100, 200):
            producer.send("short", b"%d" % n).result(timeout_ms=30_000)
    ask(rq, "short", 0, Trim(before=150))
    query = start(spark, "short", "kept", tmp_path)
    with pytest.raises(PySparkException, match="records 100 to 149 of short-0"):
        query.awaitTermination(180)
    finish(start(spark, "short", "kept", tmp_path, failOnDataLoss="false"))
    assert values(rq, "kept") == Counter(b"%d" % n for n in [*range(100), *range(150, 200)])


# -- kills ------------------------------------------------------------------------------------


@pytest.mark.long
def test_leaders_that_are_killed_in_the_middle(rq: RayQueue, spark: SparkSession, tmp_path: Path) -> None:
    """kill -9 of the leaders of source and sink while a stream runs: each record once."""
    for name in ("hard-in", "hard-out"):
        rq.create_topic(name, partitions=1, replication=3)
    count = 20_000
    with rq.producer() as producer:
        producer.send_many("hard-in", [b"%d" % n for n in range(count)]).result(timeout_ms=60_000)
    query = start(spark, "hard-in", "hard-out", tmp_path, maxRecordsPerTrigger=4_000)
    killed = threading.Event()

    def kill() -> None:
        wait_for(lambda: ask(rq, "hard-out", 0, GetBounds()).end > 0, "the first micro-batch", timeout_s=120)
        for name in ("hard-out", "hard-in"):
            os.kill(leader_pid(rq, name, 0), signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    assert finish(query) == 5
    thread.join()
    assert killed.is_set()
    assert values(rq, "hard-out") == Counter(b"%d" % n for n in range(count))
    assert frame(spark, topic="hard-in").count() == count
