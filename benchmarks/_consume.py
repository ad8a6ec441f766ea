"""The reading half of ``throughput.py``: a topic from its beginning to its end, by ``poll`` and by ``poll_arrow``.

One consumer reads the topic once to be warm; each round it seeks to the
beginning, which drops all that was prefetched, and the clock runs from before
the seek until it has the last record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks._bench import Figures, Steps
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.handle import RayQueue


class Scene(Protocol):
    """The records that are read, and how often."""

    @property
    def rq(self) -> RayQueue: ...
    @property
    def topic(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def suffix(self) -> str: ...
    @property
    def title(self) -> str: ...


Measure = Callable[[Callable[[], int], int], Any]
"""Of some work and a number of rounds: ``msgs_per_s`` and ``cpu_us``."""


def consume(scene: Scene, steps: Steps, measured: Measure) -> Figures:
    figures: Figures = {}
    with scene.rq.consumer(scene.topic) as consumer:
        total = sum(consumer.lag().values())
        for name, poll in (("records", _records), ("arrow", _arrow)):
            steps.next(f"consume {name}, {scene.title}")

            def work(poll: Callable[[Consumer], int] = poll) -> int:
                consumer.seek_to_beginning()
                count = 0
                while count < total:
                    count += poll(consumer)
                return count

            work()
            rate = measured(work, scene.rounds)
            figures[f"consume_{name}{scene.suffix}_msgs_per_s"] = rate.msgs_per_s
            figures[f"consume_{name}{scene.suffix}_cpu_us"] = rate.cpu_us
    return figures


def _records(consumer: Consumer) -> int:
    return len(consumer.poll())


def _arrow(consumer: Consumer) -> int:
    return int(consumer.poll_arrow().num_rows)
