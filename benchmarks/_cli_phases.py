"""One `rayqueue` command with a stopwatch: run by ``benchmarks/cli.py`` in a process of its own.

    python benchmarks/_cli_phases.py REPORT BEGAN_S COMMAND...

``BEGAN_S`` is the monotonic clock when the process was asked for. Writes to
REPORT, as JSON, how long each phase took: an import or a call that is one of
those below, less the ones inside it. Whatever is none of them is the command's.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FIRST_S = time.monotonic()

IMPORTS = {
    "ray": "import ray",
    "pyarrow": "import pyarrow",
    "rayqueue.actors.starter": "imports",
    "rayqueue.client.connect": "imports",
    "rayqueue.client.consumer.consumer": "imports",
    "rayqueue.client.producer.producer": "imports",
    "rayqueue.config": "imports",
}
CALLS = {
    "ray": {"init": "ray.init"},
    "rayqueue.cli.ray_head": {"start": "ray start", "stop": "ray stop"},
    "rayqueue.client.connect": {"connect": "connect"},
    "rayqueue.client.shared": {"leave_ray": "leave"},
}


class Stopwatch:
    """Time by phase. Phases nest; their threads wait for each other, so one stack is enough."""

    def __init__(self) -> None:
        self.taken_s: defaultdict[str, float] = defaultdict(float)
        self._inner_s: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            took_s = time.monotonic() - began_s
            self.taken_s[name] += took_s - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += took_s


class Watched(Loader):
    """A module's own loader, timed; afterwards the module's functions in ``CALLS`` are timed too."""

    def __init__(self, loader: Loader, watch: Stopwatch) -> None:
        self._loader = loader
        self._watch = watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._watch.phase(IMPORTS.get(module.__name__, "imports")):
            self._loader.exec_module(module)
        for name, phase in CALLS.get(module.__name__, {}).items():
            setattr(module, name, self._timed(getattr(module, name), phase))

    def _timed(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            with self._watch.phase(phase):
                return call(*args, **options)

        return timed


class Finder(MetaPathFinder):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in IMPORTS and name not in CALLS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Watched(spec.loader, self._watch)
        return spec


def main() -> None:
    report, began_s = Path(sys.argv[1]), float(sys.argv[2])
    del sys.argv[1:3]
    watch = Stopwatch()
    sys.meta_path.insert(0, Finder(watch))
    ended_s = FIRST_S

    def write() -> None:
        phases = {**watch.taken_s, "python": FIRST_S - began_s, "ended": ended_s - began_s}
        report.write_text(json.dumps(phases))

    atexit.register(write)  # the first registered runs last
    with watch.phase("imports"):
        from rayqueue.cli import main as command
    try:
        with watch.phase("command"):
            command()
    finally:
        ended_s = time.monotonic()


if __name__ == "__main__":
    main()
