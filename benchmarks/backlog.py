"""Does a long log cost more? Produce, acknowledge and consume on a topic that gets longer and longer.

    python benchmarks/backlog.py [--quick] [--json] [--plot]

One partition on three replicas, fsync, records of 100 B, the public API. The
topic is filled by ``send_many`` to 10,000, 100,000, 1 million and 10 million
records (``--quick``: to 1 million). At each length:

``send_many``    msg/s of the next 100,000 records
``ack``          p50 of single records with one in flight
``beginning``    msg/s of the first 10,000 records by ``poll``, from a new consumer
``end``          the same for the last 10,000

A second topic, made anew with 10,000 records at each length, is measured in turns with it:
``*_to_short`` is the long topic's figure divided by the short one's. The machine is a different one every minute; a
ratio that moves away from 1 as the topic grows would be the length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Steps, figure, median, parser
from rayqueue import TopicPartition
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.producer import Producer

TOPIC = "backlog"
SHORT_RECORDS = 10_000
COLUMN = [b"x" * 100] * 10_000
PROBE_RECORDS = 100_000
SINGLES = 200
READ_RECORDS = 10_000
ROUNDS = 3
LENGTHS = (10_000, 100_000, 1_000_000, 10_000_000)
PATIENCE_S = 60.0


def fill(producer: Producer, topic: str, records: int) -> None:
    for first in range(0, records, len(COLUMN)):
        producer.send_many(topic, COLUMN[: records - first])
    producer.flush()


def rate(producer: Producer, topic: str) -> float:
    started_s = time.perf_counter()
    fill(producer, topic, PROBE_RECORDS)
    return PROBE_RECORDS / (time.perf_counter() - started_s)


def ack_ms(producer: Producer, topic: str) -> float:
    started_s = time.perf_counter()
    producer.send(topic, COLUMN[0]).result()
    return (time.perf_counter() - started_s) * 1000


def read_rate(rq: RayQueue, topic: str, offset: int) -> float:
    """Of a new consumer, with its start."""
    with rq.consumer(topic) as consumer:
        consumer.seek(TopicPartition(topic, 0), offset)
        started_s = time.perf_counter()
        read = 0
        while read < READ_RECORDS and time.perf_counter() - started_s < PATIENCE_S:
            read += len(consumer.poll(max_records=READ_RECORDS - read, timeout_ms=1000))
        return read / (time.perf_counter() - started_s)


def in_turns(rounds: int, probe: Callable[[str], float], *topics: str) -> list[float]:
    """The median of each topic."""
    found = [[probe(topic) for topic in topics] for _ in range(rounds)]
    return [median(list(column)) for column in zip(*found, strict=True)]


def probe(rq: RayQueue, producer: Producer, short: str) -> dict[str, tuple[float, float]]:
    """Each figure of the long topic, and of the short one."""
    rates = in_turns(ROUNDS, lambda topic: rate(producer, topic), TOPIC, short)
    acks = in_turns(SINGLES, lambda topic: ack_ms(producer, topic), TOPIC, short)
    ends = {topic: rq.topic(topic).partitions[0].end_offset for topic in (TOPIC, short)}
    first = in_turns(ROUNDS, lambda topic: read_rate(rq, topic, 0), TOPIC, short)
    last = in_turns(ROUNDS, lambda topic: read_rate(rq, topic, ends[topic] - READ_RECORDS), TOPIC, short)
    names = ("send_many", "ack_p50", "beginning", "end")
    return {name: (pair[0], pair[1]) for name, pair in zip(names, (rates, acks, first, last), strict=True)}


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
                    short = f"short-{length}"
                    rq.create_topic(short, replication=3)
                    fill(producer, short, SHORT_RECORDS)
                    fill(producer, TOPIC, length - end)
                    found = probe(rq, producer, short)
                    rq.delete_topic(short)
                    end = rq.topic(TOPIC).partitions[0].end_offset
                    for name, (value, beside) in found.items():
                        unit = "ms" if name == "ack_p50" else "msgs_per_s"
                        bench.add(
                            **{f"{name}_at_{length}_{unit}": value, f"{name}_at_{length}_to_short": value / beside}
                        )
                    rows.append(
                        [f"{length:,}", *(cell for value, beside in found.values() for cell in (value, value / beside))]
                    )
        finally:
            rq.shutdown()
    names = ("send_many msg/s", "ack p50 ms", "first 10,000 msg/s", "last 10,000 msg/s")
    columns = ("records in the topic", *(cell for name in names for cell in (name, "to a short topic")))
    bench.table("By length of the backlog", columns, rows)


def draw(bench: Bench, lengths: tuple[int, ...]) -> None:
    with figure("backlog", width_in=6.0) as axes:
        for name in ("send_many", "ack_p50", "beginning", "end"):
            ratios = [bench.figures[f"{name}_at_{length}_to_short"] for length in lengths]
            axes.plot(lengths, ratios, "o-", label=name)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(
            xscale="log",
            xlabel="records in the topic",
            ylabel="figure, divided by a short topic's",
            ylim=(0, None),
            title="Long topics beside short ones",
        )
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
