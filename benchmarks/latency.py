"""Latency through the public API: of an acknowledgement, and from one process to another.

    python benchmarks/latency.py [--quick] [--json] [--plot]

A topic of one partition on three replicas, fsync before every acknowledgement,
100 B, default settings. A producer in one process, a consumer of a group in
another.

``ack``  one record in flight: from ``send`` to the return of ``result``
``e2e``  a record every millisecond: from before ``send`` in the producer's process until ``poll`` has returned
         it in the consumer's
``ray_call``  an empty call of an actor in the same run: what a client that used Ray calls would pay before anything
         else
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

import rayqueue
from benchmarks._bench import Bench, figure, parser, percentile
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue

TOPIC = "latency"
VALUE_BYTES = 100
RATE_PER_S = 1000
PATIENCE_S = 60.0


class Sender:
    """The producer's process."""

    def __init__(self, rq: RayQueue) -> None:
        self._producer = rq.producer()

    def nothing(self) -> None:
        return None

    def acks(self, count: int) -> list[float]:
        """Milliseconds from ``send`` to its acknowledgement, one at a time."""
        took_ms: list[float] = []
        for _ in range(count):
            began_s = time.perf_counter()
            self._producer.send(TOPIC, b"a" * VALUE_BYTES).result()
            took_ms.append((time.perf_counter() - began_s) * 1000)
        return took_ms

    def stream(self, count: int) -> int:
        """A record every millisecond, with the time in it. One clock for all processes of a machine."""
        began_s = time.monotonic()
        for number in range(count):
            wait_s = began_s + number / RATE_PER_S - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            self._producer.send(TOPIC, (b"e%020d" % time.monotonic_ns()).ljust(VALUE_BYTES, b"."))
        self._producer.flush()
        return count


def end_to_end(rq: RayQueue, sender: Any, count: int) -> list[float]:
    took_ms: list[float] = []
    with rq.consumer(TOPIC, group="latency", start="latest") as consumer:
        while not consumer.assignment():
            consumer.poll(timeout_ms=50)
        done = sender.stream.remote(count)
        deadline_s = time.monotonic() + count / RATE_PER_S + PATIENCE_S
        while len(took_ms) < count and time.monotonic() < deadline_s:
            found = consumer.poll(timeout_ms=1000)
            now_ns = time.monotonic_ns()
            took_ms += [(now_ns - int((record.value or b"")[1:21])) / 1e6 for record in found]
    if ray.get(done) != len(took_ms):
        raise SystemExit(f"{count} records were sent, and {len(took_ms)} arrived")
    return took_ms


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    bench = Bench("latency", options)
    acks, streamed = (500, 3000) if bench.quick else (5000, 20_000)
    with bench.data_dir() as data_dir, bench.progress(4) as steps, embedded_ray():
        steps.next("start")
        rq = rayqueue.connect(data_dir=data_dir)
        try:
            rq.create_topic(TOPIC, partitions=1, replication=3)
            made: Any = ray.remote(Sender)
            sender = made.options(num_cpus=0).remote(rq)
            ray.get(sender.acks.remote(100))  # everything is connected and warm
            steps.next("Ray calls")
            calls_ms = ray_calls(sender, acks // 5)
            steps.next("acknowledgements")
            acks_ms: list[float] = ray.get(sender.acks.remote(acks))
            steps.next("end to end")
            end_to_end(rq, sender, RATE_PER_S)
            ends_ms = end_to_end(rq, sender, streamed)
        finally:
            rq.shutdown()
    rows = (("ack", acks_ms), ("e2e", ends_ms), ("ray_call", calls_ms))
    for name, values_ms in rows:
        bench.add(**{f"{name}_p{each}_ms": percentile(values_ms, each) for each in (50, 99)})
    bench.table(
        "Latency, three replicas, fsync (ms)",
        ("", "p50", "p90", "p99", "largest"),
        [[name, *(percentile(each, part) for part in (50, 90, 99)), max(each)] for name, each in rows],
    )
    if bench.plot:
        plot(dict(rows))
    bench.finish()


def ray_calls(sender: Any, count: int) -> list[float]:
    took_ms: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        ray.get(sender.nothing.remote())
        took_ms.append((time.perf_counter() - began_s) * 1000)
    return took_ms


def plot(measured_ms: dict[str, list[float]]) -> None:
    with figure("latency") as axes:
        for name, values_ms in measured_ms.items():
            ordered = sorted(values_ms)
            axes.plot(ordered, [number / len(ordered) * 100 for number in range(len(ordered))], label=name)
        axes.set_xscale("log")
        axes.set_xlabel("ms")
        axes.set_ylabel("% of records that took no longer")
        axes.legend()
        axes.set_title("Latency: three replicas with fsync")


if __name__ == "__main__":
    main()
