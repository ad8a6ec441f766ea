"""A slice of the transactions' campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim WORLD=transactions SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import pytest

from tests.sim.frame import check_campaign, check_same_in_every_process
from tests.sim.tx_client_mutations import TX_CLIENT_MUTATIONS
from tests.sim.tx_job_mutations import TX_JOB_MUTATIONS
from tests.sim.tx_mutations import TX_MUTATIONS, TxMutation
from tests.sim.tx_world import TxWorld

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = 40
MUTATION_SCHEDULES = 100
MUTATIONS = (*TX_MUTATIONS, *TX_JOB_MUTATIONS, *TX_CLIENT_MUTATIONS)


def test_campaign_tears_nothing_and_never_sticks() -> None:
    check_campaign("transactions", SCHEDULES, acked_each=25)


def test_producers_meet_what_they_must_live_with() -> None:
    """Commits, aborts, timeouts, markers that the producer has left to others, jobs that are done in transactions and
    that come again: of all there is some."""
    outcomes = [TxWorld(seed).run() for seed in range(8)]
    assert sum(outcome.committed for outcome in outcomes) > 100
    assert sum(outcome.aborted for outcome in outcomes) > 20
    assert sum(outcome.late for outcome in outcomes) > 1
    assert sum(outcome.carried for outcome in outcomes) > 5
    assert sum(outcome.written for outcome in outcomes) > 10
    assert sum(outcome.jobs for outcome in outcomes) > 20
    assert sum(outcome.jobs_again for outcome in outcomes) > 2


def test_whole_clients_come_to_the_end() -> None:
    assert TxWorld(0, frozenset({"kill", "app_kill", "app_reset"}), real=True).run().made > 50


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    check_same_in_every_process("transactions")


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: TxMutation) -> None:
    mutation.check_noticed(MUTATION_SCHEDULES)
