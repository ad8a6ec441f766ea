"""The reading half of ``throughput.py``: a topic from its beginning to its end, by ``poll`` and by ``poll_arrow``.

Each round is a new consumer, and its clock runs from before it is made until
it has the last record; so it contains what a consumer needs to find its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks._bench import Figures, Steps
from rayqueue.client.connection import RayQueue


class Scene(Protocol):
    """What is read, and how often."""

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
    for name, work in (("records", records), ("arrow", arrow)):
        steps.next(f"consume {name}, {scene.title}")
        work(scene, min(total, 10_000))  # the leaders are found, Arrow is loaded
        rate = measured(lambda work=work: work(scene, total), scene.rounds)  # type: ignore[misc]
        figures[f"consume_{name}{scene.suffix}_msgs_per_s"] = rate.msgs_per_s
        figures[f"consume_{name}{scene.suffix}_cpu_us"] = rate.cpu_us
    return figures


def records(scene: Scene, total: int) -> int:
    count = 0
    with scene.rq.consumer(scene.topic) as consumer:
        while count < total:
            count += len(consumer.poll())
    return count


def arrow(scene: Scene, total: int) -> int:
    count = 0
    with scene.rq.consumer(scene.topic) as consumer:
        while count < total:
            count += consumer.poll_arrow().num_rows
    return count
