"""Processing: what ``rq.process`` gives back, to wait for its workers, to stop them, and to see how they are."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from rayqueue.client.arguments import check_timeout_ms
from rayqueue.client.process.loop import ProcessLoop
from rayqueue.client.process.settings import Figures, Function, ProcessSettings
from rayqueue.client.twins import Twin, awaiting, beside, blocking
from rayqueue.errors import InvalidInputError

_LOOK_S = 0.1
_ANSWER_S = 5.0


Report = tuple[Figures, bool, BaseException | None]
"""How a worker is: what it has done, whether it has ended, and why."""


class Workers(Protocol):
    def reports(self) -> list[Report]:
        """Of each. One that does not answer at the moment has done nothing so far."""

    def stop(self) -> None: ...

    def end(self) -> None:
        """Whatever is left."""


class LocalWorker:
    """In a thread of this process."""

    def __init__(self, rq: Any, settings: ProcessSettings, function: Function) -> None:
        self._loop = ProcessLoop(rq, settings, function, 0)
        self._thread = threading.Thread(target=self._loop.run, name=f"rayqueue {settings.group}", daemon=True)
        self._thread.start()

    def reports(self) -> list[Report]:
        return [(self._loop.figures, self._loop.finished.is_set(), self._loop.error)]

    def stop(self) -> None:
        self._loop.stop()

    def end(self) -> None:
        self._thread.join(_ANSWER_S)


class RayWorkers:
    """Ray actors, which Ray starts again when they die."""

    def __init__(self, rq: Any, settings: ProcessSettings, function: Function, count: int, options: Any) -> None:
        from rayqueue.client.process.actor import Processor

        made: Any = Processor
        self._actors = [
            made.options(**{"num_cpus": 0.1, **options}).remote(rq, settings, function, number)
            for number in range(count)
        ]

    def reports(self) -> list[Report]:
        """One that is being restarted answers later."""
        asked = [actor.report.remote() for actor in self._actors]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        found = []
        for each in ready:
            with contextlib.suppress(RayActorError):
                found.append(ray.get(each))
        missing = len(self._actors) - len(found)
        return [*found, *((Figures(), False, None) for _ in range(missing))]

    def stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def end(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayActorError, GetTimeoutError):
                ray.kill(actor)


class Processing(Twin):
    """Made by ``RayQueue.process``. As a context manager it is stopped at the end of the block."""

    def __init__(self, workers: Workers, settings: ProcessSettings) -> None:
        self._workers = workers
        self._settings = settings
        self._ended = False
        self._last: list[Report] = []

    @blocking
    async def figures(self) -> Figures:
        """Of all workers together, each since it was started."""
        return await beside(self._figures)

    figures_async = awaiting(figures)

    @blocking
    async def wait(self, *, timeout_ms: int | None = None) -> bool:
        """Until all workers have ended: by ``stop``, or after ``idle_ms`` without records. False if they have not yet.

        Raises what a worker could not go on from: an error of the function, or of what it returned, if there is no
        topic for dead letters; that a topic is gone, or that there is no transactional id for it. What is tried again
        is in ``figures().trouble``.
        """
        timeout_s = None if timeout_ms is None else check_timeout_ms(timeout_ms) / 1000
        return await beside(self._wait, timeout_s)

    wait_async = awaiting(wait)

    @blocking
    async def stop(self, *, timeout_ms: int = 30_000) -> None:
        """Let each worker finish the batch that it is at, and end. Raises what a worker could not go on from."""
        await beside(self._stop, check_timeout_ms(timeout_ms) / 1000)

    stop_async = awaiting(stop)

    def _figures(self) -> Figures:
        total = Figures()
        for figures, _, _ in self._look():
            total += figures
        return total

    def _look(self) -> list[Report]:
        if not self._ended:
            self._last = self._workers.reports()
        return self._last

    def _wait(self, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            reports = self._look()
            errors = [error for _, _, error in reports if error is not None]
            if errors:
                self._stop_all(0.0)
                raise errors[0]
            if all(finished for _, finished, _ in reports):
                self._end()
                return True
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOOK_S)

    def _stop(self, timeout_s: float) -> None:
        if self._ended:
            return
        self._stop_all(timeout_s)
        for _, _, error in self._last:
            if error is not None:
                raise error

    def _stop_all(self, timeout_s: float) -> None:
        self._workers.stop()
        deadline_s = time.monotonic() + timeout_s
        while not all(finished for _, finished, _ in self._look()) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._look()
            self._ended = True
            self._workers.end()

    async def _leave(self, kind: type[BaseException] | None) -> None:
        try:
            await beside(self._stop, 30.0)
        except Exception:
            if kind is None:  # what the block has raised is not hidden by it
                raise

    def __repr__(self) -> str:
        sources = ", ".join(self._settings.sources)
        return f"<Processing of {sources} by group {self._settings.group}{', ended' if self._ended else ''}>"


def check(settings: ProcessSettings, function: Any, workers: int) -> None:
    """``InvalidInputError`` unless these can be carried out."""
    if not callable(function):
        raise InvalidInputError(f"what processes a record is a function, not {function!r}")
    for name in ("batch", "transaction_timeout_ms"):
        _whole(name, getattr(settings, name), 1)
    for name in ("retries", "retry_backoff_ms"):
        _whole(name, getattr(settings, name), 0)
    _whole("workers", workers, 0)
    named = settings.named
    if set(named) & set(settings.sources):
        raise InvalidInputError("a topic that is read cannot be sink, dead letters or state of the same loop")
    if settings.state is not None and (len(settings.sources) > 1 or named.count(settings.state) > 1):
        raise InvalidInputError("a state is kept for one source, in a topic of its own")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{name} is a whole number from {least}, not {value!r}", option=name)
