"""Spark and topics: read, aggregate, write and stream, beside Spark reading the same rows from Parquet.

    python benchmarks/spark_read.py [--quick] [--json] [--engine local|raydp] [--records N]

Records of 100 B in four partitions, one replica each unless ``--replication``
says otherwise; two cores. Warm: medians after runs that do not count, and of
reads and Parquet in turns.

``read``      a full scan: count, sum of the values' lengths, largest offset; of these two columns only
``read_all``  the same with all eight columns asked for
``parquet``   the same aggregate of the same rows in Parquet files (snappy, Spark's default), two columns
``write``     those rows from Parquet into a topic, exactly once (staged, then published)
``direct``    the same with delivery=at_least_once
``stream``    a streaming query from topic to topic, exactly once, 250,000 records per trigger; without its first batch
``latency``   from ``send`` of one record to its copy in the output topic of a streaming query
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Steps, median, parser, percentile
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.client.connection import RayQueue
from rayqueue.client.embedded import embedded_ray

RECORD_BYTES = 100
COLUMN_RECORDS = 10_000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--engine", choices=("local", "raydp", "auto"), default="local")
    options.add_argument("--records", type=int, help="default: 1,000,000; 200,000 with --quick")
    options.add_argument("--replication", type=int, default=1)
    given = options.parse_args()
    bench = Bench("spark_read", given)
    records = given.records or (200_000 if bench.quick else 1_000_000)
    with bench.data_dir() as home, embedded_ray():
        rq = rayqueue.connect(data_dir=home / "data")
        try:
            Run(bench, rq, home, records, given.replication).all(given.engine)
        finally:
            rq.shutdown()
    bench.table("Spark", ("figure", "value"), [*bench.figures.items()])
    bench.finish()


class Run:
    def __init__(self, bench: Bench, rq: RayQueue, home: Path, records: int, replication: int) -> None:
        self.bench = bench
        self.rq = rq
        self.home = home
        self.records = records
        self.replication = replication
        self.warm, self.rounds = (1, 2) if bench.quick else (3, 7)
        self.spark: Any = None

    def all(self, engine: str) -> None:
        import rayqueue.spark

        with self.bench.progress(7) as steps:
            steps.next(f"{self.records:,} records of {RECORD_BYTES} B")
            self.fill()
            steps.next("Spark starts")
            began_s = time.perf_counter()
            self.spark = rayqueue.spark.session(self.rq, cores=2, engine=engine)  # type: ignore[arg-type]
            runs = rayqueue.spark.engine_of(self.spark)
            self.bench.note(engine=runs.engine)
            self.bench.add(records=self.records, spark_start_s=time.perf_counter() - began_s)
            try:
                self.read(steps)
                self.write(steps)
                self.stream(steps)
                self.latency(steps)
            finally:
                rayqueue.spark.stop(self.spark)

    def fill(self) -> None:
        self.rq.create_topic("rows", partitions=4, replication=self.replication)
        values = [os.urandom(RECORD_BYTES) for _ in range(COLUMN_RECORDS)]
        with self.rq.producer() as producer:
            for number in range(self.records // COLUMN_RECORDS):
                producer.send_many("rows", values, partition=number % 4)
            producer.flush()

    # -- bounded -------------------------------------------------------------------------

    def frame(self, topic: str, **options: str) -> Any:
        return self.spark.read.format("rayqueue").options(topic=topic, **options).load()

    def aggregate(self, frame: Any) -> float:
        """Rows per second of one full scan."""
        from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

        began_s = time.perf_counter()
        (row,) = frame.agg(F.count("*").alias("n"), F.sum(F.length("value")).alias("b"), F.max("offset")).collect()
        seconds = time.perf_counter() - began_s
        if (row.n, row.b) != (self.records, self.records * RECORD_BYTES):
            raise SystemExit(f"read {row.n} rows of {row.b} bytes instead of {self.records}")
        return float(row.n / seconds)

    def read(self, steps: Steps) -> None:
        steps.next("the same rows as Parquet")
        path = str(self.home / "parquet")
        self.frame("rows", columns="value,offset,partition").write.parquet(path)
        frames: dict[str, Callable[[], Any]] = {
            "read": lambda: self.frame("rows", columns="value,offset"),
            "read_all": lambda: self.frame("rows"),
            "parquet": lambda: self.spark.read.parquet(path),
        }
        steps.next("read, beside Parquet")
        rates: dict[str, list[float]] = {name: [] for name in frames}
        for turn in range(self.warm + self.rounds):
            for name, frame in frames.items():  # in turns, so that what else the machine does falls on all alike
                rate = self.aggregate(frame())
                if turn >= self.warm:
                    rates[name].append(rate)
        for name in frames:
            self.bench.add(**{f"{name}_rows_per_s": median(rates[name])})
        ratios = [ours / theirs for ours, theirs in zip(rates["read"], rates["parquet"], strict=True)]
        self.bench.add(read_mb_per_s=median(rates["read"]) * RECORD_BYTES / 1e6, read_to_parquet=median(ratios))

    def write(self, steps: Steps) -> None:
        steps.next("write")
        rows = self.spark.read.parquet(str(self.home / "parquet")).select("value")
        for name, delivery in (("write", "exactly_once"), ("direct", "at_least_once")):
            topic = f"written-{name}"
            self.rq.create_topic(topic, partitions=4, replication=self.replication)
            rows.limit(20_000).write.format("rayqueue").options(topic=topic, delivery=delivery).mode("append").save()
            began_s = time.perf_counter()
            rows.write.format("rayqueue").options(topic=topic, delivery=delivery).mode("append").save()
            rate = self.records / (time.perf_counter() - began_s)
            self.bench.add(**{f"{name}_rows_per_s": rate, f"{name}_mb_per_s": rate * RECORD_BYTES / 1e6})
            if self.count(topic) != self.records + 20_000:
                raise SystemExit(f"{topic} has {self.count(topic)} records")

    def count(self, topic: str) -> int:
        return sum(map(len, Lookup(self.rq).ranges([topic], Places(EARLIEST), Places(LATEST))))

    # -- unbounded -----------------------------------------------------------------------

    def query(self, source: str, sink: str, **options: Any) -> Any:
        self.rq.create_topic(sink, partitions=4, replication=self.replication)
        frame = self.spark.readStream.format("rayqueue").options(topic=source, columns="value", **options).load()
        writer = frame.writeStream.format("rayqueue")
        return writer.options(topic=sink, checkpointLocation=str(self.home / f"checkpoint-{sink}"))

    def stream(self, steps: Steps) -> None:
        steps.next("stream")
        batch = min(250_000, self.records // 4)
        writer = self.query("rows", "streamed", startingOffsets="earliest", maxRecordsPerTrigger=batch)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [each for each in query.recentProgress if each["numInputRows"]]
        rows = sum(each["numInputRows"] for each in batches[1:])
        seconds = sum(each["durationMs"]["triggerExecution"] for each in batches[1:]) / 1000
        self.bench.add(stream_rows_per_s=rows / seconds, stream_mb_per_s=rows / seconds * RECORD_BYTES / 1e6)
        if self.count("streamed") != self.records:
            raise SystemExit(f"{self.count('streamed')} records were streamed")

    def latency(self, steps: Steps) -> None:
        steps.next("latency")
        self.rq.create_topic("ticks", partitions=1, replication=self.replication)
        query = self.query("ticks", "echo", startingOffsets="earliest").trigger(processingTime="0 seconds").start()
        delays_ms: list[float] = []
        try:
            with self.rq.producer() as producer, self.rq.consumer("echo") as consumer:
                for turn in range(8 if self.bench.quick else 40):
                    value = b"tick %d" % turn
                    began_s = time.perf_counter()
                    producer.send("ticks", value).result()
                    while not any(record.value == value for record in consumer.poll(timeout_ms=1000)):
                        if time.perf_counter() - began_s > 120:
                            raise SystemExit("a record never came out of the stream")
                    if turn > 2:
                        delays_ms.append((time.perf_counter() - began_s) * 1000)
        finally:
            query.stop()
        self.bench.add(stream_latency_p50_ms=median(delays_ms), stream_latency_p95_ms=percentile(delays_ms, 95))
        shutil.rmtree(self.home / "parquet", ignore_errors=True)


if __name__ == "__main__":
    main()
