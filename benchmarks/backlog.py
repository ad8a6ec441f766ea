"""Does a long log cost more? Produce, acknowledge and consume on topics that get longer and longer.

    python benchmarks/backlog.py [--quick] [--json] [--plot]

One partition on three replicas, fsync, records of 100 B, the public API. The
topic is filled by ``send_many`` to 10,000, 100,000, 1 million and 10 million
records (``--quick``: to 1 million). At each length:

``send_many``    msg/s of the next 100,000 records
``ack``          p50 of single records with one in flight
``beginning``    msg/s of the first 10,000 records by ``poll``, from a new consumer
``end``          the same for the last 10,000
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Steps, figure, median, parser
from rayqueue import TopicPartition
from rayqueue.client.connection import RayQueue
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.producer import Producer

TOPIC = "backlog"
PLACE = TopicPartition(TOPIC, 0)
COLUMN = [b"x" * 100] * 10_000
PROBE_RECORDS = 100_000
SINGLES = 200
READ_RECORDS = 10_000
ROUNDS = 3
LENGTHS = (10_000, 100_000, 1_000_000, 10_000_000)
PATIENCE_S = 60.0


def fill(producer: Producer, records: int) -> None:
    for first in range(0, records, len(COLUMN)):
        producer.send_many(TOPIC, COLUMN[: records - first])
    producer.flush()


def rate(producer: Producer) -> float:
    started_s = time.perf_counter()
    fill(producer, PROBE_RECORDS)
    return PROBE_RECORDS / (time.perf_counter() - started_s)


def acks_ms(producer: Producer) -> float:
    took: list[float] = []
    for _ in range(SINGLES):
        started_s = time.perf_counter()
        producer.send(TOPIC, COLUMN[0]).result()
        took.append((time.perf_counter() - started_s) * 1000)
    return median(took)


def read_rate(rq: RayQueue, offset: int) -> float:
    """From the first record that arrives to the last one wanted."""
    with rq.consumer(TOPIC) as consumer:
        consumer.seek(PLACE, offset)
        started_s = time.perf_counter()
        read = 0
        while read < READ_RECORDS and time.perf_counter() - started_s < PATIENCE_S:
            read += len(consumer.poll(max_records=READ_RECORDS - read, timeout_ms=1000))
        return read / (time.perf_counter() - started_s)


def measure(bench: Bench, folder: Path, steps: Steps, lengths: tuple[int, ...]) -> None:
    steps.next("starting")
    rows: list[list[object]] = []
    with embedded_ray():
        rq = rayqueue.connect(data_dir=folder)
        try:
            rq.create_topic(TOPIC, replication=3)
            with rq.producer() as producer:
                end = 0
                for length in lengths:
                    steps.next(f"{length:,} records")
                    fill(producer, length - end)
                    rates = [rate(producer) for _ in range(ROUNDS)]
                    ack = acks_ms(producer)
                    end = rq.topic(TOPIC).partitions[0].end_offset
                    first = median([read_rate(rq, 0) for _ in range(ROUNDS)])
                    last = median([read_rate(rq, end - READ_RECORDS) for _ in range(ROUNDS)])
                    bench.add(
                        **{
                            f"send_many_at_{length}_msgs_per_s": median(rates),
                            f"ack_p50_at_{length}_ms": ack,
                            f"beginning_at_{length}_msgs_per_s": first,
                            f"end_at_{length}_msgs_per_s": last,
                        }
                    )
                    rows.append([f"{length:,}", median(rates), ack, first, last])
        finally:
            rq.shutdown()
    columns = ("records in the topic", "send_many msg/s", "ack p50 ms", "first 10,000 msg/s", "last 10,000 msg/s")
    bench.table("By length of the backlog", columns, rows)


def draw(bench: Bench, lengths: tuple[int, ...]) -> None:
    with figure("backlog", width_in=6.0) as axes:
        for name in ("send_many", "beginning", "end"):
            rates = [bench.figures[f"{name}_at_{length}_msgs_per_s"] for length in lengths]
            axes.plot(lengths, rates, "o-", label=name)
        axes.set(xscale="log", xlabel="records in the topic", ylabel="msg/s", ylim=(0, None), title="Backlog")
        axes.legend()


def main() -> None:
    chosen = parser(__doc__).parse_args()
    bench = Bench("backlog", chosen)
    lengths = LENGTHS[:-1] if bench.quick else LENGTHS
    with bench.data_dir() as folder, bench.progress(len(lengths) + 1) as steps:
        measure(bench, folder, steps, lengths)
    if bench.plot:
        draw(bench, lengths)
    bench.finish()


if __name__ == "__main__":
    main()
