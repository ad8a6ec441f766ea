"""A slice of the campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.campaign import replay_command, run_campaign
from tests.sim.invariants import BrokenError, BrokenRule, Invariant, first_broken
from tests.sim.mutations import LYING_DISK, MUTATIONS, Mutation, lying_disk
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
    code = "from tests.sim.world import World; print(*(World(seed).run() for seed in range(6)))"
    command = [sys.executable, "-c", code]
    outcomes = {
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_remedy_the_simulator_fails(mutation: Mutation) -> None:
    with mutation.active():
        seeds = range(mutation.first_seed, mutation.first_seed + MUTATION_SCHEDULES)
        seed = first_broken(mutation.world, seeds, mutation.rule)
    assert seed is not None, f"nobody noticed: {mutation.finding}"
    mutation.world(seed).run()  # it is the mutation that fails, not the schedule


def test_without_fsync_the_simulator_fails() -> None:
    with lying_disk():
        seed = first_broken(
            lambda seed: World(seed, frozenset({"kill", "power_loss"})), range(MUTATION_SCHEDULES), LYING_DISK
        )
    assert seed is not None


def test_a_mutation_that_fails_in_any_other_way_proves_nothing() -> None:
    rule = BrokenRule(frozenset({Invariant.ONE_LEADER}), also=frozenset({Invariant.PROGRESS}))

    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def run(self) -> None:
            raise self.error

    broken = [BrokenError(invariant, "") for invariant in (Invariant.PROGRESS, Invariant.ONE_LEADER)]
    assert first_broken(lambda seed: Failing(broken[seed]), range(2), rule) == 1
    assert first_broken(lambda seed: Failing(broken[0]), range(2), rule) is None
    for error in (TypeError("a mutation that does not fit any more"), BrokenError(Invariant.ONE_LOG, "")):
        with pytest.raises(type(error)):
            first_broken(lambda seed, error=error: Failing(error), range(2), rule)  # type: ignore[misc]
