"""Spark and topics: read, aggregate, write and stream, beside Spark reading the same rows from Parquet.

    python benchmarks/spark_read.py [--quick] [--json] [--engine local|raydp] [--replication R] [--records N]

Records of 100 B, first 1,000,000 and then 10,000,000 of them unless ``--records``
says how many; figures of the larger size have ``10m`` in their names. Four
partitions (two with ``--quick``), one replica each unless ``--replication`` says
otherwise; two cores. Everything is measured warm: what comes first does not
count, and the rest is a median. Reads and Parquet take turns.

``read``      a full scan: count, sum of the values' lengths, largest offset; of these two columns only
``read_all``  the same with all eight columns asked for
``parquet``   the same aggregate of the same rows in Parquet files (snappy, Spark's default)
``write``     those rows from Parquet into a topic, exactly once (in transactions)
``direct``    the same with delivery=at_least_once
``stream``    a streaming query from topic to topic, exactly once, 250,000 records per trigger
``latency``   from ``send`` of one record to its copy in the output topic of that query, once it has caught up

``--quick`` leaves ``read_all`` and ``direct`` out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Steps, median, parser, percentile
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue

RECORD_BYTES = 100
COLUMN_RECORDS = 10_000
BATCH_RECORDS = 250_000
LATENCY_WARM = 3


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run: records, and rounds over them."""

    records: int
    warm: int
    rounds: int
    name: str = ""
    """Goes into the names of figures."""

    @property
    def topic(self) -> str:
        return f"rows-{self.records}"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--engine", choices=("local", "raydp", "auto"), default="local")
    options.add_argument("--records", type=int, help="default: 1,000,000 and 10,000,000; 200,000 with --quick")
    options.add_argument("--replication", type=int, default=1)
    given = options.parse_args()
    bench = Bench("spark_read", given)
    if bench.quick:
        sizes = [Size(given.records or 200_000, warm=1, rounds=2)]
    elif given.records:
        large = given.records >= 5_000_000
        sizes = [Size(given.records, warm=1 if large else 3, rounds=3 if large else 7)]
    else:
        sizes = [Size(1_000_000, warm=3, rounds=7), Size(10_000_000, warm=1, rounds=3, name="10m_")]
    for size in sizes:
        if size.records % COLUMN_RECORDS:
            raise SystemExit(f"--records must be a multiple of {COLUMN_RECORDS}")
    with bench.data_dir() as home, embedded_ray():
        rq = rayqueue.connect(data_dir=home / "data")
        try:
            Run(bench, rq, home, given.replication).all(sizes, given.engine)
        finally:
            rq.shutdown()
    bench.table("Spark", ("figure", "value"), [*bench.figures.items()])
    bench.finish()


class Run:
    def __init__(self, bench: Bench, rq: RayQueue, home: Path, replication: int) -> None:
        self.bench = bench
        self.rq = rq
        self.home = home
        self.replication = replication
        self.partitions = 2 if bench.quick else 4
        self.spark: Any = None

    def all(self, sizes: list[Size], engine: str) -> None:
        import rayqueue.spark

        with self.bench.progress(8 * len(sizes)) as steps, ThreadPoolExecutor(1) as aside:
            steps.next("Spark starts, topics are filled")
            began_s = time.perf_counter()
            filled = aside.submit(self.prepare, sizes[0])
            self.spark = rayqueue.spark.session(self.rq, cores=2, engine=engine)  # type: ignore[arg-type]
            try:
                filled.result()
                self.bench.note(engine=rayqueue.spark.engine_of(self.spark).engine)
                self.bench.add(start_s=time.perf_counter() - began_s)
                for number, size in enumerate(sizes):
                    if number:
                        self.fill(size)
                    self.bench.add(**{f"{size.name}records": size.records})
                    self.read(size, steps)
                    self.write(size, steps)
                    self.stream(size, steps, last=number == len(sizes) - 1)
            finally:
                rayqueue.spark.stop(self.spark)

    def prepare(self, size: Size) -> None:
        self.topic("sink")
        self.fill(size)

    def topic(self, name: str) -> None:
        self.rq.create_topic(name, partitions=self.partitions, replication=self.replication)

    def fill(self, size: Size) -> None:
        self.topic(size.topic)
        values = [os.urandom(RECORD_BYTES) for _ in range(COLUMN_RECORDS)]
        with self.rq.producer() as producer:
            for number in range(size.records // COLUMN_RECORDS):
                producer.send_many(size.topic, values, partition=number % self.partitions)
            producer.flush()

    def add(self, size: Size, what: str, rates: list[float]) -> None:
        rate = median(rates)
        name = f"{what}_{size.name}"
        self.bench.add(**{f"{name}rows_per_s": rate, f"{name}mb_per_s": rate * RECORD_BYTES / 1e6})

    # -- bounded -------------------------------------------------------------------------

    def frame(self, topic: str, **options: str) -> Any:
        return self.spark.read.format("rayqueue").options(topic=topic, **options).load()

    def aggregate(self, frame: Any, records: int) -> float:
        """Rows per second of one full scan."""
        from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

        began_s = time.perf_counter()
        (row,) = frame.agg(F.count("*").alias("n"), F.sum(F.length("value")).alias("b"), F.max("offset")).collect()
        seconds = time.perf_counter() - began_s
        if (row.n, row.b) != (records, records * RECORD_BYTES):
            raise SystemExit(f"read {row.n} rows of {row.b} bytes instead of {records}")
        return float(row.n / seconds)

    def parquet(self, size: Size) -> str:
        return str(self.home / f"parquet-{size.records}")

    def read(self, size: Size, steps: Steps) -> None:
        steps.next(f"{size.records:,} rows as Parquet")
        self.frame(size.topic, columns="value,offset,partition").write.parquet(self.parquet(size))
        frames: dict[str, Callable[[], Any]] = {
            "read": lambda: self.frame(size.topic, columns="value,offset"),
            "parquet": lambda: self.spark.read.parquet(self.parquet(size)),
        }
        if not self.bench.quick:
            frames["read_all"] = lambda: self.frame(size.topic)
        steps.next("read, beside Parquet")
        rates: dict[str, list[float]] = {name: [] for name in frames}
        for turn in range(size.warm + size.rounds):
            for name, frame in frames.items():  # in turns, so that what else the machine does falls on all alike
                rate = self.aggregate(frame(), size.records)
                if turn >= size.warm:
                    rates[name].append(rate)
        for name in frames:
            self.add(size, name, rates[name])
        ratios = [ours / theirs for ours, theirs in zip(rates["read"], rates["parquet"], strict=True)]
        self.bench.add(**{f"{size.name}read_to_parquet": median(ratios)})

    def write(self, size: Size, steps: Steps) -> None:
        steps.next("write")
        rows = self.spark.read.parquet(self.parquet(size)).select("value")
        deliveries = (
            {"write": "exactly_once"} if self.bench.quick else {"write": "exactly_once", "direct": "at_least_once"}
        )
        for name, delivery in deliveries.items():
            self.write_once(rows.limit(COLUMN_RECORDS), COLUMN_RECORDS, delivery)
            turns = 1 if self.bench.quick or size.name else 4
            rates = [self.write_once(rows, size.records, delivery) for _ in range(turns)]
            self.add(size, name, rates[1:] or rates)

    def write_once(self, rows: Any, records: int, delivery: str) -> float:
        before = self.count("sink")
        began_s = time.perf_counter()
        rows.write.format("rayqueue").options(topic="sink", delivery=delivery).mode("append").save()
        seconds = time.perf_counter() - began_s
        if self.count("sink") - before != records:
            raise SystemExit(f"{self.count('sink') - before} records were written")
        return records / seconds

    def count(self, topic: str) -> int:
        return sum(map(len, Lookup(self.rq).ranges([topic], Places(EARLIEST), Places(LATEST))))

    # -- unbounded -----------------------------------------------------------------------

    def query(self, size: Size, number: int) -> Any:
        batch = min(BATCH_RECORDS, size.records // 3)
        frame = self.spark.readStream.format("rayqueue").options(topic=size.topic, columns="value")
        frame = frame.options(startingOffsets="earliest", maxRecordsPerTrigger=batch).load()
        checkpoint = str(self.home / f"checkpoint-{size.records}-{number}")
        writer = frame.writeStream.format("rayqueue").options(topic="sink", checkpointLocation=checkpoint)
        return writer.trigger(processingTime="0 seconds").start()

    def stream(self, size: Size, steps: Steps, *, last: bool) -> None:
        """The first batch of a query does not count, nor does the first query if there are several."""
        rates: list[float] = []
        queries = 1 if self.bench.quick or size.name else 3
        for number in range(queries):
            steps.next("stream")
            before = self.count("sink")
            query = self.query(size, number)
            try:
                query.processAllAvailable()
                if self.count("sink") - before != size.records:
                    raise SystemExit(f"{self.count('sink') - before} records were streamed")
                batches = [each for each in query.recentProgress if each["numInputRows"]][1:]
                rows = sum(each["numInputRows"] for each in batches)
                rate = rows / sum(each["durationMs"]["triggerExecution"] for each in batches) * 1000
                if number or queries == 1:
                    rates.append(rate)
                if last and number == queries - 1:
                    steps.next("latency")
                    self.latency(size)
                    query.processAllAvailable()  # a query that is stopped in the middle complains at length
            finally:
                query.stop()
        self.add(size, "stream", rates)

    def latency(self, size: Size) -> None:
        """Of the query that has caught up."""
        delays_ms: list[float] = []
        with self.rq.producer() as producer, self.rq.consumer("sink", start="latest") as consumer:
            consumer.poll(timeout_ms=0)
            for turn in range(LATENCY_WARM + (4 if self.bench.quick else 40)):
                value = b"tick %d" % turn
                began_s = time.perf_counter()
                producer.send(size.topic, value).result()
                while not any(record.value == value for record in consumer.poll(timeout_ms=1000)):
                    if time.perf_counter() - began_s > 120:
                        raise SystemExit("a record never came out of the stream")
                if turn >= LATENCY_WARM:
                    delays_ms.append((time.perf_counter() - began_s) * 1000)
        self.bench.add(stream_latency_p50_ms=median(delays_ms), stream_latency_p95_ms=percentile(delays_ms, 95))


if __name__ == "__main__":
    main()
