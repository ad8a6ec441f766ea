"""The use of a machine by a replica's process since it started: CPU, memory, disk."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from rayqueue.replica.status import Status


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_s: float
    engine_cpu_s: float
    """Of it, by the thread that drives the engine."""
    memory_bytes: int
    """Its own memory now, without the pages of files that are mapped into it."""
    written_bytes: int
    """What it made the kernel write to a disk."""
    syncs: int
    sync_s: float
    """Time spent in syncs."""


def usage(status: Status) -> Usage:
    """Call it on the engine's thread, as an answer of ``Replica.inspect``: it asks for that thread's own time."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        cpu_s=time.process_time(),
        engine_cpu_s=time.thread_time(),
        memory_bytes=_memory_bytes(),
        written_bytes=spent.ru_oublock * 512,
        syncs=status.syncs,
        sync_s=status.sync_ms / 1000,
    )


def _memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
