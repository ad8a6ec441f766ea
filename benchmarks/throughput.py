"""Acknowledged messages per second through the public API, beside ``ray.util.queue`` in the same run.

    python benchmarks/throughput.py [--quick] [--json] [--plot]

One process, default settings, ``acks="all"``, topics on three replicas, fsync
before every acknowledgement. Per size of record and number of partitions:

``send``        one call per record, then ``flush``; the clock stops when the last one is acknowledged
``send_many``   columns of 10,000 records per call, then ``flush``
``records``     the whole topic from its beginning by ``poll``
``arrow``       the same by ``poll_arrow``

Each is the median of several rounds. ``cpu_us`` is what this process
spends per record, all threads: on a machine that is busy with other things it
tells more than the rate. ``ray.util.queue`` is one actor that keeps its items in
memory, unreplicated: ``put`` is one call per item, ``put_nowait_batch`` and
``get_nowait_batch`` are calls with 1,000 items each.

A figure without suffix is 100 B, one partition; ``_1kb``: 1,000 B; ``_4p``: four partitions.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Figures, Steps, figure, median, parser
from benchmarks._consume import consume
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.producer import Producer

SIZES_BYTES = (100, 1000)
PARTITIONS = (1, 4)
COLUMN_RECORDS = 10_000
RAY_BATCH_ITEMS = 1000


@dataclass(frozen=True)
class Scene:
    """One topic to write to and to read from."""

    rq: RayQueue
    topic: str
    record_bytes: int
    partitions: int
    records: int
    """Per round."""
    rounds: int

    @property
    def suffix(self) -> str:
        size = "" if self.record_bytes == SIZES_BYTES[0] else f"_{self.record_bytes // 1000}kb"
        return size + ("" if self.partitions == 1 else f"_{self.partitions}p")

    @property
    def title(self) -> str:
        return f"{self.record_bytes} B, {self.partitions} partition{'s' * (self.partitions > 1)}"


@dataclass(frozen=True)
class Rate:
    msgs_per_s: float
    cpu_us: float


def measured(work: Callable[[], int], rounds: int) -> Rate:
    """Median over the rounds. ``work`` returns how many records it has done."""
    rates: list[float] = []
    cpus_us: list[float] = []
    for _ in range(rounds):
        cpu_s, began_s = time.process_time(), time.perf_counter()
        records = work()
        rates.append(records / (time.perf_counter() - began_s))
        cpus_us.append((time.process_time() - cpu_s) / records * 1e6)
    return Rate(median(rates), median(cpus_us))


# -- producing ---------------------------------------------------------------------------


def produce(scene: Scene, steps: Steps) -> Figures:
    figures: Figures = {}
    with scene.rq.producer() as producer:
        values = [os.urandom(scene.record_bytes) for _ in range(COLUMN_RECORDS)]
        producer.send_many(scene.topic, values[:1000]).result()  # everything is connected and warm
        for name, work in (("send", send), ("send_many", send_many)):
            steps.next(f"{name}, {scene.title}")
            rate = measured(lambda work=work: work(scene, producer, values), scene.rounds)  # type: ignore[misc]
            figures[f"produce_{name}{scene.suffix}_msgs_per_s"] = rate.msgs_per_s
            figures[f"produce_{name}{scene.suffix}_cpu_us"] = rate.cpu_us
    return figures


def send(scene: Scene, producer: Producer, values: list[bytes]) -> int:
    topic, put = scene.topic, producer.send
    for _ in range(scene.records // len(values)):
        for value in values:
            put(topic, value)
    last = put(topic, values[0])
    producer.flush()
    last.result(0)
    return scene.records + 1


def send_many(scene: Scene, producer: Producer, values: list[bytes]) -> int:
    deliveries = [producer.send_many(scene.topic, values) for _ in range(scene.records // len(values))]
    producer.flush()
    for each in deliveries:
        each.result(0)
    return scene.records


# -- ray.util.queue ----------------------------------------------------------------------


def ray_queue(quick: bool, steps: Steps) -> Figures:
    from ray.util.queue import Empty, Queue

    queue = Queue(actor_options={"num_cpus": 0})
    items = [os.urandom(SIZES_BYTES[0]) for _ in range(RAY_BATCH_ITEMS)]
    rounds, puts, batches = (2, 300, 40) if quick else (5, 1000, 200)

    def put() -> int:
        for item in items[: puts % RAY_BATCH_ITEMS or None]:
            queue.put(item)
        return puts

    def put_batch() -> int:
        for _ in range(batches):
            queue.put_nowait_batch(items)
        return batches * len(items)

    def get_batch() -> int:
        for _ in range(batches):
            queue.get_nowait_batch(len(items))
        return batches * len(items)

    figures: Figures = {}
    try:
        queue.put(items[0])
        queue.get()
        for name, work in (("put", put), ("put_batch", put_batch), ("get_batch", get_batch)):
            steps.next(f"ray.util.queue, {name}")
            figures[f"ray_queue_{name}_msgs_per_s"] = measured(work, rounds).msgs_per_s
    finally:
        with suppress(Empty):
            queue.shutdown(force=True)
    return figures


# -- all of it ---------------------------------------------------------------------------

HALVES: tuple[Callable[[Scene, Steps], Figures], ...] = (produce, partial(consume, measured=measured))
"""What is done with each topic, in turn: the second one reads what the first has written."""
STEPS_PER_SCENE = 4


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    bench = Bench("throughput", options)
    scenes = [(size, partitions) for partitions in PARTITIONS for size in SIZES_BYTES]
    with (
        bench.data_dir() as data_dir,
        bench.progress(3 + len(scenes) * (1 + STEPS_PER_SCENE)) as steps,
        embedded_ray(),
    ):
        bench.add(**ray_queue(bench.quick, steps))
        rq = rayqueue.connect(data_dir=data_dir)
        try:
            for record_bytes, partitions in scenes:
                topic = f"t{record_bytes}-{partitions}"
                steps.next(f"make {topic}")
                rq.create_topic(topic, partitions=partitions, replication=3)
                records = (60_000 if bench.quick else 300_000) // (1 if record_bytes == SIZES_BYTES[0] else 3)
                scene = Scene(rq, topic, record_bytes, partitions, records, 2 if bench.quick else 5)
                for half in HALVES:
                    bench.add(**half(scene, steps))
                rq.delete_topic(topic)
        finally:
            rq.shutdown()
    report(bench, scenes)


def report(bench: Bench, scenes: list[tuple[int, int]]) -> None:
    figures = bench.figures
    rows: list[list[object]] = []
    for record_bytes, partitions in scenes:
        scene = Scene(None, "", record_bytes, partitions, 0, 0)  # type: ignore[arg-type]
        row: list[object] = [scene.title]
        for name in ("produce_send", "produce_send_many"):
            row += [figures[f"{name}{scene.suffix}_msgs_per_s"], figures[f"{name}{scene.suffix}_cpu_us"]]
        rows.append(row)
    bench.table(
        "Produced and acknowledged by three replicas, fsync (msg/s; µs of the producer's CPU per record)",
        ("", "send", "CPU µs", "send_many", "CPU µs"),
        rows,
    )
    rows = []
    for record_bytes, partitions in scenes:
        scene = Scene(None, "", record_bytes, partitions, 0, 0)  # type: ignore[arg-type]
        row = [scene.title]
        for name in ("consume_records", "consume_arrow"):
            row += [figures[f"{name}{scene.suffix}_msgs_per_s"], figures[f"{name}{scene.suffix}_cpu_us"]]
        rows.append(row)
    bench.table(
        "Consumed from the beginning by one consumer (msg/s; µs of its CPU per record)",
        ("", "records", "CPU µs", "arrow", "CPU µs"),
        rows,
    )
    names = ("put", "put_batch", "get_batch")
    bench.table(
        "ray.util.queue, in the memory of one actor (msg/s)",
        ("", *names),
        [["100 B", *(figures[f"ray_queue_{name}_msgs_per_s"] for name in names)]],
    )
    bench.add(
        send_to_ray_put_ratio=figures["produce_send_msgs_per_s"] / figures["ray_queue_put_msgs_per_s"],
        send_many_to_ray_put_batch_ratio=figures["produce_send_many_msgs_per_s"]
        / figures["ray_queue_put_batch_msgs_per_s"],
        records_to_ray_get_batch_ratio=figures["consume_records_msgs_per_s"]
        / figures["ray_queue_get_batch_msgs_per_s"],
    )
    if bench.plot:
        plot(figures)
    bench.finish()


def plot(figures: Figures) -> None:
    names = {
        "ray put": "ray_queue_put_msgs_per_s",
        "ray put_batch": "ray_queue_put_batch_msgs_per_s",
        "send": "produce_send_msgs_per_s",
        "send_many": "produce_send_many_msgs_per_s",
    }
    with figure("throughput_produce") as axes:
        bars = axes.barh(list(names), [figures[name] for name in names.values()])
        axes.bar_label(bars, fmt="{:,.0f}")
        axes.set_xscale("log")
        axes.set_xlabel("msg/s (100 B)")
        axes.set_title("Produce: three replicas with fsync, beside one queue actor in memory")


if __name__ == "__main__":
    main()
