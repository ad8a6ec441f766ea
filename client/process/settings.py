"""Settings of a read-process-write loop, and the figures that it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a worker does. It is sent to where the worker runs."""

    sources: tuple[str, ...]
    sink: str | None
    group: str
    batch: int
    retries: int
    retry_backoff_ms: int
    dead_letters: str | None
    state: str | None
    transaction_timeout_ms: int
    idle_ms: int | None
    run: str
    """Drawn for each ``rq.process``: its workers' transactional ids are of it, so that a worker that was restarted
    fences the one that it replaces, and two runs do not fence each other."""

    @property
    def named(self) -> tuple[str, ...]:
        """The topics that it writes to, apart from those that results name themselves."""
        return tuple(each for each in (self.sink, self.dead_letters, self.state) if each is not None)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one worker since it was started, or of all together."""

    records: int = 0
    results: int = 0
    dead_letters: int = 0
    transactions: int = 0
    """Committed."""
    aborted: int = 0
    """Batches that were begun and done again."""
    retries: int = 0
    """Calls of the function after it had failed."""
    trouble: str = ""
    """Why a worker does not get on at the moment: it tries again, and says nothing here once it has done so."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.records + other.records,
            self.results + other.results,
            self.dead_letters + other.dead_letters,
            self.transactions + other.transactions,
            self.aborted + other.aborted,
            self.retries + other.retries,
            self.trouble or other.trouble,
        )
