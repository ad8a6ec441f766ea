"""Ray Data and topics: rows per second of ``read_topic`` and of ``TopicSink``.

    python benchmarks/ray_data.py [--quick] [--json] [--records N]

Records of 100 B in four partitions of one replica; two CPUs. Warm: the median
after a first run that does not count. ``read`` materializes the column of
values, ``read_all`` all columns; ``write`` writes in transactions, exactly once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

import rayqueue
from benchmarks._bench import Bench, median, parser
from rayqueue.client.embedded import embedded_ray
from rayqueue.config import MIB

RECORD_BYTES = 100
COLUMN_RECORDS = 10_000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--records", type=int, help="default: 1,000,000; 200,000 with --quick")
    given = options.parse_args()
    bench = Bench("ray_data", given)
    records = given.records or (200_000 if bench.quick else 1_000_000)
    store_bytes = max(256 * MIB, records * RECORD_BYTES * 8)
    with bench.data_dir() as home, embedded_ray(object_store_bytes=store_bytes):
        rq = rayqueue.connect(data_dir=home / "data")
        try:
            with bench.progress(4) as steps:
                steps.next(f"{records:,} records of {RECORD_BYTES} B")
                fill(rq, records)
                steps.next("read")
                measure(bench, rq, records, steps.next)
        finally:
            rq.shutdown()
    bench.table("Ray Data", ("figure", "value"), [*bench.figures.items()])
    bench.finish()


def fill(rq: rayqueue.RayQueue, records: int) -> None:
    rq.create_topic("rows", partitions=4, replication=1)
    values = [os.urandom(RECORD_BYTES) for _ in range(COLUMN_RECORDS)]
    with rq.producer() as producer:
        for number in range(records // COLUMN_RECORDS):
            producer.send_many("rows", values, partition=number % 4)
        producer.flush()


def measure(bench: Bench, rq: rayqueue.RayQueue, records: int, step: Callable[[str], None]) -> None:
    import rayqueue.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    rounds = 2 if bench.quick else 5

    def rate(work: Callable[[], int]) -> float:
        rates = []
        for turn in range(rounds + 1):
            began_s = time.perf_counter()
            done = work()
            if done != records:
                raise SystemExit(f"{done} rows instead of {records}")
            if turn:
                rates.append(done / (time.perf_counter() - began_s))
        return median(rates)

    def read(columns: list[str] | None) -> int:
        return int(rayqueue.data.read_topic(rq, "rows", columns=columns).materialize().count())

    values = rate(lambda: read(["value"]))
    step("read, all columns")
    everything = rate(lambda: read(None))
    step("write")
    rows = rayqueue.data.read_topic(rq, "rows", columns=["value"]).materialize()
    topics = [f"written-{turn}" for turn in range(rounds + 1)]
    for topic in topics:
        rq.create_topic(topic, partitions=4, replication=1)

    def write() -> int:
        topic = topics.pop()
        rows.write_datasink(rayqueue.data.TopicSink(rq, topic))
        return sum(each.end_offset for each in rq.topic(topic).partitions)

    written = rate(write)
    bench.add(
        records=records,
        read_rows_per_s=values,
        read_mb_per_s=values * RECORD_BYTES / 1e6,
        read_all_rows_per_s=everything,
        write_rows_per_s=written,
        write_mb_per_s=written * RECORD_BYTES / 1e6,
    )


if __name__ == "__main__":
    main()
