"""A slice of the campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.sim.campaign import replay_command, run_campaign
from tests.sim.mutations import MUTATIONS, Mutation, lying_disk
from tests.sim.world import World

# Minutes of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(900)

SCHEDULES = 300
MUTATION_SCHEDULES = 600


def test_campaign_loses_nothing_and_never_sticks() -> None:
    results = list(run_campaign(1, SCHEDULES, os.cpu_count() or 1))
    failed = [f"{result.kind}: {result.text}\n  {replay_command(result.seed)}" for result in results if result.kind]
    assert not failed, "\n".join(failed)
    assert len(results) == SCHEDULES
    # A campaign in which nothing happens would pass as well.
    assert sum(result.acked for result in results) > 20 * SCHEDULES
    assert sum(result.snapshots for result in results) > SCHEDULES / 20


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    command = [sys.executable, "-m", "tests.sim.campaign", "--replay", "7"]
    outcomes = {
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True, timeout=60
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_remedy_the_simulator_fails(mutation: Mutation) -> None:
    with mutation.active():
        seed = _first_failure(mutation.world)
    assert seed is not None, f"nobody noticed: {mutation.finding}"
    mutation.world(seed).run()  # it is the mutation that fails, not the schedule


def test_without_fsync_the_simulator_fails() -> None:
    with lying_disk():
        assert _first_failure(lambda seed: World(seed, frozenset({"kill", "power_loss"}))) is not None


def _first_failure(world: Callable[[int], World]) -> int | None:
    for seed in range(MUTATION_SCHEDULES):
        try:
            world(seed).run()
        except Exception:  # noqa: BLE001  # the engine may stop itself in any way
            return seed
    return None
