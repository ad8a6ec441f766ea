"""Traffic for tests that break things: numbered records to every partition, and what became of each.

``Traffic`` sends all the time, and remembers when each record was acknowledged.
``check`` reads everything back and demands what was promised: of each partition
the records in the order in which they were sent, every one that was
acknowledged, and none twice. ``pauses`` says for how long each partition
acknowledged nothing: what a step of the test cost. ``step`` measures that, for the
table at the end of the report (``tests/conftest.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import rayqueue
from rayqueue.client.producer.delivery import Delivery

_EVERY_S = 0.01

Record = Callable[[str, object], None]
"""pytest's ``record_property``."""


class Acknowledged(Protocol):
    """Traffic that remembers when it was acknowledged."""

    def pauses(self, since_s: float) -> list[float]:
        """The longest time without an acknowledgement, of each partition, from then on."""
        ...


@contextmanager
def step(record: Record, sending: Acknowledged, name: str) -> Iterator[None]:
    """What this part of the test costs its producers."""
    began_s = time.monotonic()
    yield
    seconds = time.monotonic() - began_s
    pauses = [round(pause * 1000) for pause in sending.pauses(began_s)]
    told = f"{max(pauses)} ms" if len(pauses) == 1 else f"{max(pauses)} ms ({', '.join(map(str, pauses))})"
    record(name, f"{told} without an acknowledgement, in {seconds:.1f} s")


def longest_pause(moments: Iterable[float], since_s: float) -> float:
    told = [since_s, *(when_s for when_s in moments if when_s >= since_s), time.monotonic()]
    return max(later - earlier for earlier, later in pairwise(told))


class Traffic:
    def __init__(self, rq: rayqueue.RayQueue, topic: str, partitions: int) -> None:
        self.acked: list[list[tuple[int, float]]] = [[] for _ in range(partitions)]
        """Of each partition: the record's number, and when it was acknowledged."""
        self.failed: list[str] = []
        self._rq = rq
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with self._rq.producer() as producer:
            number = 0
            while not self._stop.wait(_EVERY_S):
                for partition in range(len(self.acked)):
                    noted = self._noted(partition, number)
                    producer.send(self._topic, b"%d" % number, partition=partition, on_delivery=noted)
                number += 1

    def _noted(self, partition: int, number: int) -> Callable[[Delivery], None]:
        def note(delivery: Delivery) -> None:
            error = delivery.exception()
            if error is None:
                self.acked[partition].append((number, time.monotonic()))
            else:
                self.failed.append(f"{partition}: {number}: {error}")

        return note

    @property
    def least(self) -> int:
        """Acknowledged in the partition that has the fewest."""
        return min(map(len, self.acked))

    def pauses(self, since_s: float) -> list[float]:
        """The longest time without an acknowledgement, of each partition, from then on."""
        return [longest_pause((when_s for _, when_s in list(acked)), since_s) for acked in self.acked]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(150)
        assert not self._thread.is_alive()
        assert not self.failed, self.failed[:3]


@contextmanager
def traffic(rq: rayqueue.RayQueue, topic: str, partitions: int) -> Iterator[Traffic]:
    sending = Traffic(rq, topic, partitions)
    try:
        yield sending
    finally:
        sending.stop()


def check(rq: rayqueue.RayQueue, topic: str, sent: Traffic, patience_s: float = 60.0) -> None:
    """Everything that was acknowledged is there, in order and once."""
    numbers: list[list[int]] = [[] for _ in sent.acked]
    ends = [partition.end_offset for partition in rq.topic(topic).partitions]
    deadline_s = time.monotonic() + patience_s
    with rq.consumer(topic, start="earliest") as consumer:
        while sum(map(len, numbers)) < sum(ends) and time.monotonic() < deadline_s:
            for record in consumer.poll(timeout_ms=1000):
                numbers[record.partition].append(int(record.value or b""))
    for partition, (found, acked) in enumerate(zip(numbers, sent.acked, strict=True)):
        assert found == sorted(found), f"partition {partition} is out of order"
        assert len(set(found)) == len(found), f"partition {partition} has records twice"
        missing = {number for number, _ in acked} - set(found)
        assert not missing, f"partition {partition} has lost {len(missing)} acknowledged records: {sorted(missing)[:5]}"
