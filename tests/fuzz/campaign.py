"""Give every decoder many wrong inputs, then the same to a live replica, and say what came of it.

    python -m tests.fuzz.campaign --inputs 100000 --seed 1
    python -m tests.fuzz.campaign --target batches --replay 1:4711
    python -m tests.fuzz.campaign --live-s 0              no live replica
    python -m tests.fuzz.campaign --inputs 0              only that

Each input must end in a typed error or in none, in bounded time and memory.
Ends with one JSON line. Exit code 1 if any input did something else; each
prints the command that replays it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.live import LiveReport, attack
from tests.fuzz.targets import TARGETS, typed

CHUNK = 500
WARM_UP = 20
"""Inputs that are run before any is measured: the first ones load modules, such as Arrow, which is no input's cost."""
MAX_CPU_S = 0.25
"""For one input."""
MAX_GROWTH_MB = 128
"""Of the process, by one input: a batch may unpack to 16 MiB, and is looked at in several forms."""


@dataclass(frozen=True, slots=True)
class Fault:
    target: str
    seed: int
    number: int
    text: str

    @property
    def replay(self) -> str:
        return f"python -m tests.fuzz.campaign --target {self.target!r} --replay {self.seed}:{self.number}"


@dataclass(frozen=True, slots=True)
class Chunk:
    target: str
    inputs: int
    longest_ms: float
    grown_mb: float
    faults: tuple[Fault, ...]


def input_of(target: str, seed: int, number: int) -> bytes:
    chosen = TARGETS[target]
    return chosen.draw(Random(f"{target} {seed} {number}"), chosen.seeds)


def run_chunk(chunk: tuple[str, int, int], seed: int) -> Chunk:
    """Inputs ``first`` to ``last`` of a target, from a fresh state."""
    target, first, last = chunk
    logging.disable(logging.CRITICAL)
    _warm_up(target, first, min(first + WARM_UP, last), seed)
    run = TARGETS[target].make()
    longest_s, grown_mb = 0.0, 0.0
    faults: list[Fault] = []
    gc.disable()  # its pauses are nobody's input
    try:
        for number in range(first, last):
            data = input_of(target, seed, number)
            memory_kb, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
            try:
                typed(run, data)
            except BaseException:  # noqa: BLE001  # this is what is looked for
                faults.append(Fault(target, seed, number, traceback.format_exc(limit=-4)))
                run = TARGETS[target].make()
            took_s = time.thread_time() - began_s
            more_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kb) / 1024
            if took_s > MAX_CPU_S:
                faults.append(Fault(target, seed, number, f"{took_s:.2f} s of CPU; {MAX_CPU_S} are allowed"))
            if more_mb > MAX_GROWTH_MB:
                faults.append(Fault(target, seed, number, f"{more_mb:.0f} MB more; {MAX_GROWTH_MB} are allowed"))
            longest_s, grown_mb = max(longest_s, took_s), max(grown_mb, more_mb)
    finally:
        gc.enable()
        gc.collect()
    return Chunk(target, last - first, longest_s * 1000, grown_mb, tuple(faults))


def _warm_up(target: str, first: int, last: int, seed: int) -> None:
    run = TARGETS[target].make()
    for number in range(first, last):
        with suppress(Exception):  # it is told when it is measured
            typed(run, input_of(target, seed, number))


def run_campaign(targets: list[str], inputs: int, seed: int, workers: int) -> Iterator[Chunk]:
    chunks = [(target, at, min(at + CHUNK, inputs)) for target in targets for at in range(0, inputs, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(partial(run_chunk, seed=seed), chunks)


def replay(target: str, where: str) -> int:
    seed, number = map(int, where.split(":"))
    run = TARGETS[target].make()
    for each in range(number - number % CHUNK, number):
        try:
            typed(run, input_of(target, seed, each))
        except Exception:  # noqa: BLE001  # an earlier one: as in the campaign
            run = TARGETS[target].make()
    data = input_of(target, seed, number)
    print(f"{len(data)} bytes: {data[:200].hex()}")
    typed(run, data)
    return 0


def _fuzz(console: Console, targets: list[str], inputs: int, seed: int, workers: int) -> tuple[dict[str, object], int]:
    figures: dict[str, dict[str, float]] = {}
    faults = 0
    columns = (TextColumn("inputs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=inputs * len(targets), state="")
        for chunk in run_campaign(targets, inputs, seed, workers):
            known = figures.setdefault(chunk.target, {"inputs": 0, "longest_ms": 0.0, "grown_mb": 0.0})
            known["inputs"] += chunk.inputs
            known["longest_ms"] = round(max(known["longest_ms"], chunk.longest_ms), 1)
            known["grown_mb"] = round(max(known["grown_mb"], chunk.grown_mb), 1)
            faults += len(chunk.faults)
            for fault in chunk.faults[:3]:
                console.print(f"[red]{fault.target} {fault.number}:[/] {fault.text}", markup=True, highlight=False)
                console.print(f"  replay: [bold]{fault.replay}[/]", highlight=False)
            progress.update(task, advance=chunk.inputs, state=f"faults {faults}  {chunk.target}")
    return {name: figures[name] for name in targets if name in figures}, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--target", choices=sorted(TARGETS), help="this one only")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run this one input of --target, with its traceback")
    parser.add_argument("--live-s", type=float, default=8.0, help="how long a live replica is attacked")
    arguments = parser.parse_args()
    targets = list(TARGETS) if arguments.target is None else [arguments.target]
    if arguments.replay is not None:
        return replay(targets[0], arguments.replay)
    console = Console(stderr=True)
    started_s = time.monotonic()
    figures, faults = _fuzz(console, targets, arguments.inputs, arguments.seed, arguments.workers)
    report: LiveReport | None = None
    if arguments.live_s > 0:
        with console.status("a live replica under the same frames"):
            report = attack(arguments.live_s, arguments.seed)
        for complaint in report.complaints:
            console.print(f"[red]live:[/] {complaint}", highlight=False)
        faults += len(report.complaints)
    seconds = round(time.monotonic() - started_s, 1)
    print(json.dumps({"targets": figures, "live": report and report.figures(), "faults": faults, "seconds": seconds}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
