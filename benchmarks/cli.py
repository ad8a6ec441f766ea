"""The time that commands take, and where it goes.

    python benchmarks/cli.py [--quick] [--json] [--rounds N] [--against CHECKOUT]

Each command is a process of its own on a Ray that `rayqueue up` has started.
Ray's share is what it costs to import Ray, to join it, to leave it and to start
and stop its processes; ours is our imports, finding the queue, and what the
command does. `topics create` waits for processes too: an actor that does
nothing, started on the same Ray, says how long Ray takes for one.

``--against`` measures another checkout in turns with this one: compare the two,
not the figures of different days.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._bench import Bench, Steps, median, parser

ROOT = Path(__file__).resolve().parents[1]

COMMANDS: dict[str, list[str]] = {
    "up": ["up", "--no-dashboard"],
    "topics_create": ["topics", "create", "one", "--replication", "1"],
    "topics_create_three": ["topics", "create", "three", "--replication", "3"],
    "topics_list": ["topics", "list"],
    "topics_describe": ["topics", "describe", "three"],
    "produce": ["produce", "one", "hello"],
    "consume": ["consume", "one", "--max-records", "1", "--group", "g"],
    "groups_list": ["groups", "list"],
    "status": ["status"],
    "down": ["down"],
}
RAYS = {
    "Ray: import": ("import ray", "import pyarrow"),
    "join": ("ray.init",),
    "processes": ("ray start", "ray stop"),
    "leave": ("leave",),
}
OURS = {"ours: import": ("imports",), "find": ("connect",), "do": ("command",)}
PYTHON = {"Python": ("python", "end")}
_TIMEOUT_S = 120.0

_ACTORS = """
import sys, time, ray
from rayqueue.client import local_ray
from rayqueue.client.joining import join_ray
from pathlib import Path
join_ray(local_ray.find(Path(sys.argv[1])).address)

@ray.remote(num_cpus=0)
class Nothing:
    async def answer(self): pass

for count in (1, 3):
    began_s = time.monotonic()
    ray.get([each.answer.remote() for each in [Nothing.remote() for _ in range(count)]])
    print(time.monotonic() - began_s)
"""

Phases = dict[str, float]


class Checkout:
    """A tree of this repository, whose commands are run."""

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = home
        home.mkdir()
        self._environment = os.environ | {"PYTHONPATH": str(root), "RAY_USAGE_STATS_ENABLED": "0"}
        self.took: defaultdict[str, list[Phases]] = defaultdict(list)
        self.actors_s: list[list[float]] = []

    def round(self, number: int, steps: Steps) -> None:
        data_dir = self._home / str(number)
        for name, command in COMMANDS.items():
            steps.next(f"{self._root.name}: rayqueue {' '.join(command)}")
            self.took[name].append(self._run([*command, "--data-dir", str(data_dir)]))
            if name == "up":
                self.actors_s.append(self._actors(data_dir))

    def _run(self, command: list[str]) -> Phases:
        report = self._home / "phases.json"
        script = ROOT / "benchmarks" / "_cli_phases.py"
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, script, report, repr(began_s), *command],
            env=self._environment,
            cwd=self._home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        total_s = time.monotonic() - began_s
        if done.returncode:
            raise SystemExit(f"rayqueue {' '.join(command)} failed: {done.stdout}{done.stderr}")
        phases: Phases = json.loads(report.read_text())
        return phases | {"end": total_s - phases.pop("ended"), "total": total_s}

    def _actors(self, data_dir: Path) -> list[float]:
        done = subprocess.run(
            [sys.executable, "-c", _ACTORS, data_dir],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return [float(line) for line in done.stdout.split()]

    def median(self, command: str, *phases: str) -> float:
        return median([sum(took.get(phase, 0.0) for phase in phases) for took in self.took[command]])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="of all commands; 1 with --quick, else 5")
    options.add_argument("--against", type=Path, help="another checkout, whose commands are run in turns with these")
    chosen = options.parse_args()
    bench = Bench("cli", chosen)
    rounds = chosen.rounds or (1 if bench.quick else 5)
    with bench.data_dir() as folder:
        here = Checkout(ROOT, folder / "here")
        checkouts = [here]
        if chosen.against is not None:
            checkouts.append(Checkout(chosen.against.resolve(), folder / "other"))
        with bench.progress(rounds * len(checkouts) * len(COMMANDS)) as steps:
            for number in range(rounds):
                for each in checkouts if number % 2 == 0 else checkouts[::-1]:
                    each.round(number, steps)
    rows: list[list[object]] = []
    for name in COMMANDS:
        figures = {
            "total": here.median(name, "total"),
            "rays": here.median(name, *(phase for phases in RAYS.values() for phase in phases)),
            "ours": here.median(name, *(phase for phases in OURS.values() for phase in phases)),
        }
        parts = [here.median(name, *phases) for phases in (RAYS | OURS | PYTHON).values()]
        rows.append([name.replace("_", " "), *(f"{value:.2f}" for value in (figures["total"], *parts))])
        bench.add(**{f"{name}_{what}_s": value for what, value in figures.items()})
        for other in checkouts[1:]:
            bench.add(**{f"{name}_other_s": other.median(name, "total")})
            bench.add(**{f"{name}_ratio": figures["total"] / other.median(name, "total")})
    bench.table("Seconds (medians)", ("command", "total", *RAYS, *OURS, *PYTHON), rows)
    one_s, three_s = (median(times) for times in zip(*here.actors_s, strict=True))
    bench.add(ray_actor_s=one_s, ray_three_actors_s=three_s)
    bench.say(f"An actor that does nothing answers {one_s:.2f} s after it was asked for, three {three_s:.2f} s.")
    if len(checkouts) > 1:
        compared = [[name.replace("_", " "), bench.figures[f"{name}_ratio"]] for name in COMMANDS]
        bench.table("Beside the other checkout", ("command", "ratio"), compared)
    bench.finish()


if __name__ == "__main__":
    main()
