"""A slice of the work queues' campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim WORLD=jobs SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.campaign import replay_command, run_campaign
from tests.sim.invariants import first_broken
from tests.sim.job_mutations import JOB_MUTATIONS, JobMutation
from tests.sim.job_world import JobWorld

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = 80
MUTATION_SCHEDULES = 60


def test_campaign_loses_no_job_and_never_sticks() -> None:
    results = list(run_campaign(1, SCHEDULES, os.cpu_count() or 1, "jobs"))
    failed = [
        f"{result.kind}: {result.text}\n  {replay_command(result.seed, 'jobs')}" for result in results if result.kind
    ]
    assert not failed, "\n".join(failed)
    assert len(results) == SCHEDULES
    # A campaign in which nothing happens would pass as well.
    assert sum(result.acked for result in results) > 40 * SCHEDULES


def test_workers_meet_what_they_must_live_with() -> None:
    """Jobs that come again, leases that are lost, dead letters, jobs that are moved: of all there is some."""
    outcomes = [JobWorld(seed).run() for seed in range(20)]
    assert sum(outcome.redelivered for outcome in outcomes) > 100
    assert sum(outcome.lost_leases for outcome in outcomes) > 50
    assert sum(outcome.dead for outcome in outcomes) > 5
    assert sum(outcome.moved for outcome in outcomes) > 5


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    code = "from tests.sim.job_world import JobWorld; print(*(JobWorld(seed).run() for seed in range(4)))"
    command = [sys.executable, "-c", code]
    outcomes = {
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True, timeout=240
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("mutation", JOB_MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: JobMutation) -> None:
    with mutation.active():
        seed = first_broken(mutation.world, range(MUTATION_SCHEDULES), mutation.rule)
    assert seed is not None, f"nobody noticed: {mutation.finding}"
    mutation.world(seed).run()  # it is the mutation that fails, not the schedule
