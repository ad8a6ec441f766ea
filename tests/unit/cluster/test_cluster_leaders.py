"""Leaders: shared out as evenly as can be, then quiet; and next to those who read."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest

from rayqueue.cluster.leaders import Picture, Spreader, Transfer, nearest, spread
from rayqueue.config import ClusterSettings


def shares(held: dict[str, list[str]], leaders: dict[str, str]) -> list[int]:
    counts = Counter({broker: 0 for each in held.values() for broker in each})
    counts.update(leaders[group] for group in held)
    return sorted(counts.values())


def carried_out(leaders: dict[str, str], transfers: list[Transfer]) -> dict[str, str]:
    after = dict(leaders)
    for each in transfers:
        assert after[each.group_id] == each.source
        after[each.group_id] = each.target
    return after


@pytest.mark.parametrize("seed", range(150))
def test_leaders_are_as_even_as_they_can_be_then_nothing_moves(seed: int) -> None:
    rng = Random(seed)
    brokers = [f"b{each}" for each in range(rng.randint(1, 6))]
    held = {f"g{each}": rng.sample(brokers, rng.randint(1, min(3, len(brokers)))) for each in range(rng.randint(1, 12))}
    leaders = {group: rng.choice(each) for group, each in held.items()}
    transfers = spread(held, leaders)
    assert all(each.target in held[each.group_id] for each in transfers)
    assert len({each.group_id for each in transfers}) == len(transfers)
    after = carried_out(leaders, transfers)
    before_sum, after_sum = (sum(n * n for n in shares(held, each)) for each in (leaders, after))
    assert after_sum <= before_sum
    assert (after_sum < before_sum) == bool(transfers), "nothing is moved for nothing"
    assert spread(held, after) == []


@pytest.mark.parametrize("seed", range(25))
def test_no_other_assignment_is_more_even(seed: int) -> None:
    rng = Random(seed)
    brokers = [f"b{each}" for each in range(4)]
    held = {f"g{each}": rng.sample(brokers, rng.randint(1, 3)) for each in range(6)}
    leaders = {group: rng.choice(each) for group, each in held.items()}
    best = min(
        sum(n * n for n in shares(held, dict(zip(held, choice, strict=True)))) for choice in product(*held.values())
    )
    after = carried_out(leaders, spread(held, leaders))
    assert sum(n * n for n in shares(held, after)) == best


def test_a_chain_of_transfers_is_found() -> None:
    held = {"a": ["b1", "b2"], "b": ["b1", "b2"], "c": ["b2", "b3"], "d": ["b2"]}
    leaders = {"a": "b1", "b": "b1", "c": "b2", "d": "b2"}
    # b3 has none, b1 and b2 two each; only c can go there.
    assert spread(held, leaders) == [Transfer("c", "b2", "b3")]
    assert shares(held, carried_out({**leaders, "d": "b2"}, spread(held, leaders))) == [1, 1, 2]


def spreader(**settings: object) -> Spreader:
    return Spreader(ClusterSettings(leader_rest_ms=60_000, leader_moves_per_look=2, **settings))  # type: ignore[arg-type]


HELD = {f"g{each}": ("b1", "b2", "b3") for each in range(9)}
ALL_ON_ONE = dict.fromkeys(HELD, "b1")


def test_only_what_two_looks_have_seen_is_acted_on_and_a_few_at_a_time() -> None:
    spreads = spreader()
    assert spreads.look(0, Picture(HELD, ALL_ON_ONE)) == []
    first = spreads.look(10, Picture(HELD, ALL_ON_ONE))
    assert len(first) == 2
    leaders = carried_out(ALL_ON_ONE, first)
    assert spreads.look(20, Picture(HELD, leaders)) == [], "the leaders are others than at the last look"
    second = spreads.look(30, Picture(HELD, leaders))
    assert len(second) == 2
    assert not {each.group_id for each in first} & {each.group_id for each in second}
    assert spreader(spread_leaders=False).look(0, Picture(HELD, ALL_ON_ONE)) == []
    assert len(spreader().look(0, Picture(HELD, ALL_ON_ONE), eager=True)) == 2, "an operator waits"


def test_a_transfer_that_failed_is_not_tried_again_at_once() -> None:
    spreads = spreader()
    spreads.look(0, Picture(HELD, ALL_ON_ONE))
    tried = {each.group_id for each in spreads.look(10, Picture(HELD, ALL_ON_ONE))}
    assert not tried & {each.group_id for each in spreads.look(20, Picture(HELD, ALL_ON_ONE))}
    later = spreads.look(100, Picture(HELD, ALL_ON_ONE))
    assert {each.group_id for each in later} == tried


def test_a_broker_that_comes_and_goes_moves_nothing() -> None:
    spreads = spreader()
    without = dict.fromkeys(HELD, ("b1", "b2"))
    for look in range(20):
        assert spreads.look(look * 10, Picture(HELD if look % 2 else without, ALL_ON_ONE)) == []


@pytest.mark.parametrize("seed", range(40))
def test_it_converges_and_is_quiet_whatever_fails_on_the_way(seed: int) -> None:
    rng = Random(seed)
    brokers = [f"b{each}" for each in range(5)]
    held = {f"g{each}": tuple(rng.sample(brokers, 3)) for each in range(20)}
    leaders = {group: rng.choice(each) for group, each in held.items()}
    spreads, quiet, now_s = spreader(), 0, 0.0
    for _ in range(300):
        now_s += 10
        transfers = spreads.look(now_s, Picture(held, leaders))
        for each in transfers:
            if rng.random() < 0.7:
                leaders[each.group_id] = each.target
        quiet = 0 if transfers else quiet + 1
    assert quiet > 100
    assert spread(held, leaders) == []


def test_a_partition_is_led_next_to_its_readers_and_counts_there() -> None:
    assert nearest({"b2": 3, "b9": 9}, ("b1", "b2", "b3"), "b1") == "b2", "b9 has no replica"
    assert nearest({"b1": 2, "b2": 2}, ("b1", "b2"), "b2") == "b2", "no move where nothing is gained"
    assert nearest({"b9": 2}, ("b1", "b2"), "b1") is None
    assert nearest({}, ("b1", "b2"), "b1") is None
    spreads = spreader()
    near = Picture(HELD, ALL_ON_ONE, {"g0": "b3"})
    assert spreads.look(0, near) == []
    assert spreads.look(10, near)[0] == Transfer("g0", "b1", "b3")
    elsewhere = Picture(HELD, ALL_ON_ONE, {"g1": "b2"})
    assert all(each.group_id != "g1" for each in spreads.look(80, elsewhere)), "readers who have just come"
    led = {**dict.fromkeys(HELD, "b1"), "g0": "b1"}
    stays = Picture(HELD, led, dict.fromkeys(HELD, "b1"))
    spreads.look(300, stays)
    assert spreads.look(310, stays) == [], "next to the readers counts more than evenness"


def test_who_does_not_stay_leads_nothing_that_another_could() -> None:
    """Also the last one: it would be gone without handing over."""
    held = {"a": ("b1", "b2"), "b": ("b2",), "c": ()}
    assert spread(held, {"a": "b3", "b": "b2", "c": "b3"}) == [Transfer("a", "b3", "b1")]
