"""Workers of ``rq.process`` on other nodes: a Ray actor around a loop. Ray starts it again wherever it dies."""

from __future__ import annotations

import threading
from typing import Any

import ray

from rayqueue.client.process.loop import ProcessLoop
from rayqueue.client.process.settings import Figures, ProcessSettings


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Processor:
    """The loop begins with the actor, and again with each restart. It lives as long as whoever has started it."""

    def __init__(self, rq: Any, settings: ProcessSettings, function: Any, number: int) -> None:
        self._loop = ProcessLoop(rq, settings, function, number)
        self._thread = threading.Thread(target=self._loop.run, name=f"rayqueue {settings.group}", daemon=True)
        self._thread.start()

    def report(self) -> tuple[Figures, bool, BaseException | None]:
        """Figures, whether it has ended, and why."""
        return self._loop.figures, self._loop.finished.is_set(), self._loop.error

    def stop(self) -> None:
        """After the batch that is under way."""
        self._loop.stop()
