"""Time without acknowledged writes when a partition loses its leader: kill -9 under 1,000 msg/s.

    python benchmarks/failover.py [--quick] [--json] [--plot] [--kills N] [--rate MSGS_PER_S]

One producer (the public API, acks="all", default settings) sends a numbered
record every millisecond to a topic of one partition on three replicas, fsync
on. Again and again, once all three replicas are whole, the process of the one
that leads is killed by SIGKILL. The gap is the time from the kill to the first
acknowledgement of a record that was sent after it. At the end everything is
read back: an acknowledged record that is missing is lost, one that is there
twice is duplicated.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, Steps, figure, median, parser
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.delivery import Delivery
from rayqueue.testing import wait_for
from rayqueue.testing.faults import kill_leader

TOPIC = "failover"
VALUE_BYTES = 100
PATIENCE_S = 60.0


def value_of(number: int) -> bytes:
    return (b"%012d" % number).ljust(VALUE_BYTES, b".")


@dataclass
class Traffic:
    """Sends in a thread, and remembers when each record was sent and acknowledged."""

    rq: RayQueue
    rate: float
    sent_s: list[float] = field(default_factory=list)
    acked_s: dict[int, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with self.rq.producer() as producer:
            started_s = time.monotonic()
            while not self._stopped.is_set():
                due = int((time.monotonic() - started_s) * self.rate)
                while len(self.sent_s) < due:
                    number = len(self.sent_s)
                    self.sent_s.append(time.monotonic())
                    producer.send(TOPIC, value_of(number), on_delivery=self._noted(number))
                time.sleep(0.0005)

    def _noted(self, number: int) -> Callable[[Delivery], None]:
        def note(delivery: Delivery) -> None:
            error = delivery.exception()
            if error is None:
                self.acked_s[number] = time.monotonic()
            else:
                self.failed.append(str(error))

        return note

    def first_ack_after(self, moment_s: float) -> float | None:
        """When the first record that was sent after this moment was acknowledged."""
        first = bisect_right(self.sent_s, moment_s)
        return self.acked_s.get(first)  # a partition acknowledges in the order in which it was sent to

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)


def whole(rq: RayQueue) -> bool:
    """All three replicas run, and have what the leader has, give or take what is under way."""
    (partition,) = rq.topic(TOPIC).partitions
    marks = [each.high_watermark for each in partition.replicas if each.high_watermark is not None]
    return partition.leader is not None and len(marks) == 3 and partition.end_offset - min(marks) < 1000


def kill_and_wait(rq: RayQueue, traffic: Traffic) -> float:
    wait_for(lambda: whole(rq), "three whole replicas", PATIENCE_S)
    time.sleep(0.5)  # so that the kill meets steady traffic
    kill_leader(rq, TOPIC)
    killed_s = time.monotonic()
    wait_for(lambda: traffic.first_ack_after(killed_s) is not None, "an acknowledgement after the kill", PATIENCE_S)
    acked_s = traffic.first_ack_after(killed_s)
    assert acked_s is not None
    return acked_s - killed_s


def read_back(rq: RayQueue) -> list[int]:
    numbers: list[int] = []
    (partition,) = rq.topic(TOPIC).partitions
    deadline_s = time.monotonic() + PATIENCE_S
    with rq.consumer(TOPIC) as consumer:
        while len(numbers) < partition.end_offset and time.monotonic() < deadline_s:
            numbers += [int(record.value[:12]) for record in consumer.poll(timeout_ms=1000) if record.value]
    return numbers


def measure(bench: Bench, folder: Path, steps: Steps, kills: int, rate: float) -> list[float]:
    steps.next("starting")
    with embedded_ray():
        rq = rayqueue.connect(data_dir=folder)
        try:
            rq.create_topic(TOPIC, partitions=1, replication=3)
            traffic = Traffic(rq, rate)
            gaps: list[float] = []
            for number in range(kills):
                steps.next(f"kill {number + 1}")
                gaps.append(kill_and_wait(rq, traffic))
            traffic.stop()
            steps.next("reading back")
            numbers = read_back(rq)
        finally:
            rq.shutdown()
    there = set(numbers)
    bench.add(
        kills=kills,
        gap_p50_s=median(gaps),
        gap_max_s=max(gaps),
        acked=len(traffic.acked_s),
        failed=len(traffic.failed),
        lost=len(traffic.acked_s.keys() - there),
        duplicated=len(numbers) - len(there),
        out_of_order=sum(later <= earlier for earlier, later in pairwise(numbers)),
        send_rate_per_s=rate,
    )
    return gaps


def draw(gaps: list[float]) -> None:
    with figure("failover", width_in=6.0) as axes:
        axes.bar(range(1, len(gaps) + 1), [gap * 1000 for gap in gaps])
        axes.set(xlabel="kill -9 of the leader", ylabel="ms to the next acknowledged write", title="Failover")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help="default 10, with --quick 3")
    options.add_argument("--rate", type=float, default=1000.0, help="records per second")
    chosen = options.parse_args()
    kills = chosen.kills or (3 if chosen.quick else 10)
    bench = Bench("failover", chosen)
    with bench.data_dir() as folder, bench.progress(kills + 2) as steps:
        gaps = measure(bench, folder, steps, kills, chosen.rate)
    figures = bench.figures
    bench.table(
        "Leader killed while records are written",
        ("", "value"),
        [
            ["kills", kills],
            ["gap p50 s", figures["gap_p50_s"]],
            ["gap max s", figures["gap_max_s"]],
            ["acknowledged", int(figures["acked"])],
            ["lost", int(figures["lost"])],
            ["duplicated", int(figures["duplicated"])],
        ],
    )
    if bench.plot:
        draw(gaps)
    bench.finish()


if __name__ == "__main__":
    main()
