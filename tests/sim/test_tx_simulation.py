"""Some schedules of transactions, and the proof that the simulator would notice.

The campaign is ``make sim WORLD=transactions SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import pytest

from tests.sim.tx_mutations import TX_MUTATIONS, TxMutation
from tests.sim.tx_world import TxWorld

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

MUTATION_SCHEDULES = 100


def test_producers_meet_what_they_must_live_with() -> None:
    """Commits, aborts, timeouts, markers that the producer has left to others: of all there is some."""
    outcomes = [TxWorld(seed).run() for seed in range(8)]
    assert sum(outcome.committed for outcome in outcomes) > 100
    assert sum(outcome.aborted for outcome in outcomes) > 20
    assert sum(outcome.late for outcome in outcomes) > 1
    assert sum(outcome.carried for outcome in outcomes) > 5
    assert sum(outcome.written for outcome in outcomes) > 10


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", TX_MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: TxMutation) -> None:
    mutation.check_noticed(MUTATION_SCHEDULES)
