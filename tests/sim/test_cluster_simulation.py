"""A slice of the cluster's campaign, and the proof that it would notice. CI runs a longer one (``.ci/run``).

The whole campaign is ``make sim WORLD=cluster SCHEDULES=20000 SEED=1``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.campaign import replay_command, run_campaign
from tests.sim.cluster_mutations import CLUSTER_MUTATIONS, ClusterMutation, releases_unchecked
from tests.sim.cluster_world import ClusterWorld
from tests.sim.invariants import BrokenRule, Invariant, first_broken

# Seconds of CPU, not of waiting: how long they take depends on what else the machine does.
pytestmark = pytest.mark.timeout(600)

SCHEDULES = 100
MUTATION_SCHEDULES = 100


def test_campaign_loses_nothing_and_never_sticks() -> None:
    results = list(run_campaign(1, SCHEDULES, os.cpu_count() or 1, "cluster"))
    failed = [
        f"{result.kind}: {result.text}\n  {replay_command(result.seed, 'cluster')}" for result in results if result.kind
    ]
    assert not failed, "\n".join(failed)
    assert len(results) == SCHEDULES
    # A campaign in which nothing happens would pass as well.
    assert sum(result.acked for result in results) > 20 * SCHEDULES
    assert sum(result.snapshots for result in results) > SCHEDULES / 20


# Seeds that once failed. 6693: a member was thrown out and taken in again under its id in one step.
@pytest.mark.parametrize("seed", [6693])
def test_what_was_found_stays_fixed(seed: int) -> None:
    ClusterWorld(seed).run()


def test_zombies_are_refused_and_partitions_move() -> None:
    outcomes = [
        ClusterWorld(seed, frozenset({"member_pause", "member_cut", "member_kill"})).run() for seed in range(12)
    ]
    assert sum(outcome.refusals for outcome in outcomes) > 0
    assert sum(outcome.commits for outcome in outcomes) > 100
    assert sum(outcome.moves for outcome in outcomes) > 100


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    code = "from tests.sim.cluster_world import ClusterWorld; print(*(ClusterWorld(seed).run() for seed in range(6)))"
    command = [sys.executable, "-c", code]
    outcomes = {
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("mutation", CLUSTER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_without_this_rule_the_simulator_fails(mutation: ClusterMutation) -> None:
    with mutation.active():
        seeds = range(mutation.first_seed, mutation.first_seed + MUTATION_SCHEDULES)
        seed = first_broken(mutation.world, seeds, mutation.rule)
    assert seed is not None, f"nobody noticed: {mutation.finding}"
    mutation.world(seed).run()  # it is the mutation that fails, not the schedule


def test_a_release_by_who_was_not_told_is_noticed() -> None:
    def world(seed: int) -> ClusterWorld:
        made = ClusterWorld(seed, frozenset({"client_slow", "slow_release", "wishes"}), 1)
        made.assignor = "roundrobin"  # of all strategies the one that moves most
        return made

    with releases_unchecked():
        rule = BrokenRule(frozenset({Invariant.ONE_OWNER}))
        seed = first_broken(world, range(MUTATION_SCHEDULES), rule)
    assert seed is not None
    world(seed).run()
