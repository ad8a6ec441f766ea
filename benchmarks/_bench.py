"""The frame of every benchmark script: its options, its data directory, its report.

A script measures; this module does the rest. It promises that

- ``--quick`` (under 60 s), ``--json`` (nothing but the last line), ``--plot``
  and ``--data-dir`` mean the same everywhere,
- the last line of the output is one JSON object of named figures, whose names
  end in their units,
- data is written next to RayQueue's default data directory, never to a tmpfs
  (where an fsync costs nothing and proves nothing), and is gone afterwards.

It measures nothing itself. Figures depend on the machine and on what else it
does, so both are part of the report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rayqueue.config import Settings

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"

Figures = dict[str, float]


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every script takes; a script adds its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="less than a minute; the figures are rougher")
    made.add_argument("--json", action="store_true", help="print the JSON line and nothing else")
    made.add_argument("--plot", action="store_true", help=f"draw the plots of the documentation into {IMAGES.name}/")
    made.add_argument("--data-dir", type=Path, help="where to write; default: beside RayQueue's data directory")
    return made


class Bench:
    """One run of one script: progress while it lasts, tables and the JSON line at its end."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.quick: bool = options.quick
        self.plot: bool = options.plot
        self.figures: Figures = {}
        self._words: dict[str, str] = {}
        self._json: bool = options.json
        self._data_dir: Path | None = options.data_dir
        self._out = sys.stdout
        self._console = Console(
            file=self._out, quiet=self._json, highlight=False, width=None if self._out.isatty() else 120
        )
        # Ray's threads print whatever they think of killed workers, also after everything else. The JSON line is last.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # for the rest of the process
        self._machine = describe_machine()
        self._load_before = os.getloadavg()[0]
        self._disk = ""

    def add(self, **figures: float) -> None:
        self.figures |= figures

    def note(self, **words: str) -> None:
        """Words that belong to the figures, such as versions."""
        self._words |= words

    @contextmanager
    def data_dir(self) -> Iterator[Path]:
        """An empty directory on a real disk, removed afterwards."""
        parent = _existing(self._data_dir or Settings().data_dir)
        kind = _filesystem(parent)
        if kind in ("tmpfs", "ramfs"):
            raise SystemExit(f"{parent} is a {kind}: an fsync costs nothing there. Name another one by --data-dir.")
        self._disk = kind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the directory goes then too
        folder = Path(tempfile.mkdtemp(prefix=".rayqueue-bench-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def progress(self, steps: int) -> Iterator[Steps]:
        columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            yield Steps(bar, steps)

    def say(self, text: str) -> None:
        self._console.print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(_shown, row))
        self._console.print(table)

    def finish(self) -> None:
        """Everything is measured: say where, and print the JSON line."""
        load_after = os.getloadavg()[0]
        machine = f"{self._machine}, {self._disk}" if self._disk else self._machine
        self._console.print(f"{machine}; load average {self._load_before:.1f} before, {load_after:.1f} after")
        line: dict[str, Any] = {"benchmark": self.name, "quick": self.quick, "machine": machine}
        line |= {"load_average_before": round(self._load_before, 2), "load_average_after": round(load_after, 2)}
        line |= self._words
        line |= {name: float(f"{value:.4g}") for name, value in self.figures.items()}
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


class Steps:
    """A progress bar that is told what comes next."""

    def __init__(self, bar: Progress, steps: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=steps)
        self._begun = False

    def next(self, what: str) -> None:
        self._bar.update(self._task, description=what, advance=1 if self._begun else 0)
        self._begun = True


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


median = statistics.median


def describe_machine() -> str:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return (
        f"{os.cpu_count()} x {_cpu_model()}, {memory_gb:.0f} GB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _existing(path: Path) -> Path:
    """The directory itself, or the closest one above it that exists: the same file system."""
    while not path.is_dir():
        path = path.parent
    return path


def _filesystem(path: Path) -> str:
    best, kind = "", "unknown file system"
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    for mount in mounts:
        _, point, found, *_ = mount.split()
        if len(point) >= len(best) and path.resolve().is_relative_to(point):
            best, kind = point, found
    return kind


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def figure(name: str, *, columns: int = 1, width_in: float = 8.0, height_in: float = 4.0) -> Iterator[Any]:
    """Matplotlib axes to draw on, saved to ``docs/img/<name>.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(1, columns, figsize=(width_in, height_in), layout="constrained")
    yield axes
    IMAGES.mkdir(parents=True, exist_ok=True)
    made.savefig(IMAGES / f"{name}.png", dpi=144)
    plt.close(made)
