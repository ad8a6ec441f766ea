"""A slice of the campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import pytest

from tests.sim.frame import check_campaign, check_same_in_every_process
from tests.sim.invariants import BrokenError, BrokenRule, Invariant, first_broken
from tests.sim.mutations import LYING_DISK, MUTATIONS, Mutation, lying_disk
from tests.sim.world import World

# Minutes of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(900)

SCHEDULES = 300
LOSSES = 60
GROWN = 100
MUTATION_SCHEDULES = 600


def test_campaign_loses_nothing_and_never_sticks() -> None:
    check_campaign("partition", SCHEDULES, acked_each=20, snapshots_each=0.05)


# Of which once a third never ended: an older copy went on waiting for a voter that had been lost, after that had been
# replaced (3); and a new replica, itself an older copy, for the one that it was to replace (2).
def test_two_losses_of_five_are_survived_and_mended() -> None:
    check_campaign("losses", LOSSES, acked_each=20, snapshots_each=0.0)


# Of which two of five once ended with two leaders: a copy of the first replica's disk, from when it was alone, led
# beside the leader of the others.
def test_older_copies_of_a_group_that_grew_from_one_are_noticed() -> None:
    check_campaign("grown", GROWN, acked_each=20, snapshots_each=0.05)


# Seeds that once failed. 7584: a claim was answered after the group had been deleted, and counted for its next life.
# 8023: a follower said yes to what is before a damaged entry and took nothing after it, at the network's pace.
# 6153: a move was undone when its old replica had left already: the partition was short of one for ever.
# 6551: a leader that was to be replaced tried for ever to hand over to its successor, which was lost.
@pytest.mark.parametrize("seed", [6153, 6551, 7584, 8023])
def test_what_was_found_stays_fixed(seed: int) -> None:
    World(seed).run()


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    check_same_in_every_process("partition")


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_remedy_the_simulator_fails(mutation: Mutation) -> None:
    mutation.check_noticed(MUTATION_SCHEDULES)


def test_without_fsync_the_simulator_fails() -> None:
    with lying_disk():
        seed = first_broken(
            lambda seed: World(seed, frozenset({"kill", "power_loss"})), range(MUTATION_SCHEDULES), LYING_DISK
        )
    assert seed is not None


def test_a_mutation_that_fails_in_any_other_way_proves_nothing() -> None:
    rule = BrokenRule(Invariant.ONE_LEADER, also=frozenset({Invariant.PROGRESS}))

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
