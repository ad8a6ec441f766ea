"""A slice of the work queues' campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim WORLD=jobs SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import pytest

from tests.sim.frame import check_campaign, check_same_in_every_process
from tests.sim.job_mutations import JOB_MUTATIONS, JobMutation
from tests.sim.job_world import JobWorld

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = 80
MUTATION_SCHEDULES = 60


def test_campaign_loses_no_job_and_never_sticks() -> None:
    check_campaign("jobs", SCHEDULES, acked_each=40)


def test_workers_meet_what_they_must_live_with() -> None:
    """Jobs that come again, leases that are lost, dead letters, jobs that are moved, requests that are withdrawn, nodes
    that are reported dead, jobs that outlive their time, are not put twice, are cancelled, redriven and purged, are put
    for a time, are leased all or none, and wait after they failed: of all there is some."""
    outcomes = [JobWorld(seed).run() for seed in range(20)]
    assert sum(outcome.redelivered for outcome in outcomes) > 100
    assert sum(outcome.lost_leases for outcome in outcomes) > 50
    assert sum(outcome.dead for outcome in outcomes) > 5
    assert sum(outcome.moved for outcome in outcomes) > 5
    assert sum(outcome.withdrawn for outcome in outcomes) > 20
    assert sum(outcome.reported for outcome in outcomes) > 5
    assert sum(outcome.expired for outcome in outcomes) > 5
    assert sum(outcome.deduplicated for outcome in outcomes) > 20
    assert sum(outcome.changed for outcome in outcomes) > 20
    assert sum(outcome.scheduled for outcome in outcomes) > 100
    assert sum(outcome.whole for outcome in outcomes) > 20
    assert sum(outcome.backed_off for outcome in outcomes) > 0


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    check_same_in_every_process("jobs")


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", JOB_MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: JobMutation) -> None:
    mutation.check_noticed(MUTATION_SCHEDULES)
