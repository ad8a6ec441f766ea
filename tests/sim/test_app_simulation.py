"""A slice of the applications' campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim WORLD=applications SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import pytest

from tests.sim.app_mutations import APP_MUTATIONS, AppMutation
from tests.sim.app_world import AppWorld
from tests.sim.apps import Manners
from tests.sim.frame import check_campaign, check_same_in_every_process

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = 100
MUTATION_SCHEDULES = 60


def test_campaign_loses_nothing_and_never_sticks() -> None:
    check_campaign("applications", SCHEDULES, acked_each=40)


def test_applications_meet_what_they_must_live_with() -> None:
    """Records whose outcome stays unknown, records that are handed out, commits: of all there is some."""
    outcomes = [AppWorld(seed).run() for seed in range(20)]
    assert sum(outcome.unknown for outcome in outcomes) > 20
    assert sum(outcome.handed for outcome in outcomes) > 500
    assert sum(outcome.commits for outcome in outcomes) > 200


def test_every_kind_of_consumer_comes_to_the_end() -> None:
    for seed, manners in enumerate(
        (
            Manners(),
            Manners(auto_commit=False),
            Manners(by_record=True),
            Manners(seeks=True),
            Manners(listened=False),
            Manners("at_most_once"),
        )
    ):
        assert AppWorld(seed, frozenset({"app_leave", "kill"}), manners=manners).run().handed > 0


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    check_same_in_every_process("applications")


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", APP_MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: AppMutation) -> None:
    mutation.check_noticed(MUTATION_SCHEDULES)
