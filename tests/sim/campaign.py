"""Run many schedules and say what came of them.

    python -m tests.sim.campaign --schedules 20000 --seed 1
    python -m tests.sim.campaign --replay 4711
    python -m tests.sim.campaign --world cluster --schedules 3000
    python -m tests.sim.campaign --world losses --schedules 1000
    python -m tests.sim.campaign --world grown --schedules 1000
    python -m tests.sim.campaign --world applications --schedules 1000
    python -m tests.sim.campaign --world jobs --schedules 1000
    python -m tests.sim.campaign --world transactions --schedules 1000

Ends with one JSON line: schedules, acked, lost, stuck, error, snapshots,
seconds. Exit code 1 if any schedule failed; each failing seed prints the command
that replays it. ``error`` counts schedules that ended in an exception: they say
nothing about the invariants, and its traceback shows whether the simulator or
the code under it has the bug.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.app_world import AppOutcome, AppWorld
from tests.sim.cluster_world import ClusterOutcome, ClusterWorld
from tests.sim.grown import GrownWorld
from tests.sim.invariants import BrokenError
from tests.sim.job_world import JobOutcome, JobWorld
from tests.sim.losses import LossWorld
from tests.sim.tx_world import TxOutcome, TxWorld
from tests.sim.world import Outcome, World

CHUNK = 25

WORLDS: dict[str, Callable[[int], World | ClusterWorld | AppWorld | JobWorld | TxWorld]] = {
    "partition": World,
    "losses": LossWorld,
    "grown": GrownWorld,
    "cluster": ClusterWorld,
    "applications": AppWorld,
    "jobs": JobWorld,
    "transactions": TxWorld,
}


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    acked: int
    snapshots: int
    kind: str | None
    """None, ``lost`` (safety), ``stuck`` (liveness), ``error`` (no invariant: an exception that nothing foresees)."""
    text: str


def run_seed(seed: int, world: str = "partition") -> Result:
    outcome: Outcome | ClusterOutcome | AppOutcome | JobOutcome | TxOutcome
    try:
        outcome = WORLDS[world](seed).run()
    except BrokenError as broken:
        return Result(seed, 0, 0, broken.invariant.kind, str(broken))
    except Exception:  # noqa: BLE001
        return Result(seed, 0, 0, "error", traceback.format_exc())
    return Result(seed, outcome.acked, outcome.snapshots, None, "")


def run_seeds(seeds: list[int], world: str = "partition") -> list[Result]:
    return [run_seed(seed, world) for seed in seeds]


def run_campaign(first_seed: int, schedules: int, workers: int, world: str = "partition") -> Iterator[Result]:
    seeds = range(first_seed, first_seed + schedules)
    chunks = [list(seeds[at : at + CHUNK]) for at in range(0, schedules, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for results in pool.imap_unordered(partial(run_seeds, world=world), chunks):
            yield from results


def replay_command(seed: int, world: str = "partition") -> str:
    which = "" if world == "partition" else f" --world {world}"
    return f"python -m tests.sim.campaign{which} --replay {seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the others follow")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this one seed, with its traceback")
    parser.add_argument("--world", choices=sorted(WORLDS), default="partition", help="what is simulated")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        print(WORLDS[arguments.world](arguments.replay).run())
        return 0

    console = Console(stderr=True)
    started = time.monotonic()
    counts = {"lost": 0, "stuck": 0, "error": 0}
    acked = snapshots = 0
    columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=arguments.schedules, state="")
        for result in run_campaign(arguments.seed, arguments.schedules, arguments.workers, arguments.world):
            acked += result.acked
            snapshots += result.snapshots
            if result.kind is not None:
                counts[result.kind] += 1
                console.print(f"[red]seed {result.seed} {result.kind}:[/] {result.text}")
                console.print(f"  replay: [bold]{replay_command(result.seed, arguments.world)}[/]")
            state = "  ".join(f"{kind} {count}" for kind, count in {"acked": acked, **counts}.items())
            progress.update(task, advance=1, state=state)
    seconds = round(time.monotonic() - started, 1)
    figures = {"schedules": arguments.schedules, "acked": acked, **counts, "snapshots": snapshots, "seconds": seconds}
    print(json.dumps(figures))
    return 1 if any(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
