"""Who reads what: balanced always, and among the balanced assignments one that moves least."""

from __future__ import annotations

import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.cluster.assignors import STRATEGIES, assign
from rayqueue.protocol.topics import TopicPartition

Members = dict[str, list[str]]
Had = dict[str, list[TopicPartition]]


def all_partitions(partitions: dict[str, int], members: Members) -> list[TopicPartition]:
    wanted = {topic for topics in members.values() for topic in topics}
    return [
        TopicPartition(topic, n) for topic in sorted(partitions) if topic in wanted for n in range(partitions[topic])
    ]


def owner_of(previous: Had) -> dict[TopicPartition, str]:
    owner: dict[TopicPartition, str] = {}
    for member in sorted(previous):
        for each in previous[member]:
            owner.setdefault(each, member)
    return owner


def moved(assigned: dict[str, tuple[TopicPartition, ...]], previous: Had) -> int:
    """Partitions that somebody had and another has now."""
    owner = owner_of(previous)
    return sum(1 for name, each in assigned.items() for one in each if owner.get(one, name) != name)


def squares(assigned: dict[str, tuple[TopicPartition, ...]]) -> int:
    return sum(len(each) ** 2 for each in assigned.values())


def best(members: Members, partitions: dict[str, int], previous: Had) -> tuple[int, int]:
    """By trying everything: the most even loads, and the fewest moves among the assignments that have them."""
    owner = owner_of(previous)
    each = all_partitions(partitions, members)
    takers = [[name for name in sorted(members) if one.topic in members[name]] for one in each]
    costs = []
    for choice in product(*takers):
        loads = dict.fromkeys(members, 0)
        for name in choice:
            loads[name] += 1
        moves = sum(1 for one, name in zip(each, choice, strict=True) if owner.get(one, name) != name)
        costs.append((sum(load**2 for load in loads.values()), moves))
    return min(costs)


@st.composite
def situations(draw: st.DrawFn, *, most: int, equal: bool = False) -> tuple[Members, dict[str, int], Had]:
    topics = [f"t{n}" for n in range(draw(st.integers(1, 3)))]
    partitions = {topic: draw(st.integers(0, max(1, most // len(topics)))) for topic in topics}
    names = [f"m{n}" for n in range(draw(st.integers(1, 4)))]
    wishes = st.lists(st.sampled_from(topics), unique=True)
    members = {name: topics if equal else draw(wishes) for name in names}
    previous: Had = {}
    for topic in topics:
        for number in range(partitions[topic]):
            # Some had it and are gone or want it no more, some partitions are new.
            had = draw(st.sampled_from([*names, "gone", None]))
            if had is not None:
                previous.setdefault(had, []).append(TopicPartition(topic, number))
    return members, partitions, previous


def valid_previous(members: Members, previous: Had) -> Had:
    return {
        name: [one for one in each if one.topic in members[name]] for name, each in previous.items() if name in members
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=40, deadline=None)
@given(situation=situations(most=9))
def test_every_partition_that_somebody_wants_is_one_members_who_wants_it(
    strategy: str, situation: tuple[Members, dict[str, int], Had]
) -> None:
    members, partitions, previous = situation
    assigned = assign(strategy, members, partitions, previous)
    assert list(assigned) == sorted(members)
    assert sorted(one for each in assigned.values() for one in each) == all_partitions(partitions, members)
    assert all(one.topic in members[name] for name, each in assigned.items() for one in each)
    assert all(list(each) == sorted(each) for each in assigned.values())


@settings(max_examples=40, deadline=None)
@given(situation=situations(most=30, equal=True))
def test_who_wants_the_same_has_the_same_within_one(situation: tuple[Members, dict[str, int], Had]) -> None:
    members, partitions, previous = situation
    for strategy in ("sticky", "roundrobin"):
        sizes = [len(each) for each in assign(strategy, members, partitions, previous).values()]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=80, deadline=None)
@given(situation=situations(most=6))
def test_sticky_is_the_optimum_that_trying_everything_finds(situation: tuple[Members, dict[str, int], Had]) -> None:
    members, partitions, previous = situation
    assigned = assign("sticky", members, partitions, previous)
    had = valid_previous(members, previous)
    assert (squares(assigned), moved(assigned, had)) == best(members, partitions, had)


@settings(max_examples=40, deadline=None)
@given(situation=situations(most=6, equal=True))
def test_sticky_is_the_optimum_where_all_want_the_same(situation: tuple[Members, dict[str, int], Had]) -> None:
    members, partitions, previous = situation
    assigned = assign("sticky", members, partitions, previous)
    had = valid_previous(members, previous)
    assert (squares(assigned), moved(assigned, had)) == best(members, partitions, had)


@settings(max_examples=40, deadline=None)
@given(situation=situations(most=24))
def test_no_single_move_makes_it_more_even(situation: tuple[Members, dict[str, int], Had]) -> None:
    members, partitions, previous = situation
    assigned = assign("sticky", members, partitions, previous)
    for giver, each in assigned.items():
        for one in each:
            for taker, topics in members.items():
                if one.topic in topics:
                    assert len(assigned[giver]) - len(assigned[taker]) <= 1, (giver, taker)
    again = assign("sticky", members, partitions, {name: list(each) for name, each in assigned.items()})
    assert again == assigned  # what is balanced stays


@settings(max_examples=40, deadline=None)
@given(situation=situations(most=24), data=st.data())
def test_the_order_of_the_arguments_does_not_matter(
    situation: tuple[Members, dict[str, int], Had], data: st.DataObject
) -> None:
    members, partitions, previous = situation
    shuffled = {name: members[name] for name in data.draw(st.permutations(sorted(members)))}
    other = {name: list(reversed(previous[name])) for name in data.draw(st.permutations(sorted(previous)))}
    for strategy in STRATEGIES:
        assert assign(strategy, shuffled, partitions, other) == assign(strategy, members, partitions, previous)


def test_a_late_joiner_gets_its_share_and_nothing_else_moves() -> None:
    members: Members = {f"m{n}": ["t"] for n in range(4)}
    before = assign("sticky", members, {"t": 20}, {})
    members["late"] = ["t"]
    after = assign("sticky", members, {"t": 20}, before)
    assert [len(each) for each in after.values()] == [4] * 5
    assert moved(after, {name: list(each) for name, each in before.items()}) == 4


def test_a_partition_that_two_claim_is_one_members() -> None:
    each = [TopicPartition("t", 0), TopicPartition("t", 1)]
    assigned = assign("sticky", {"a": ["t"], "b": ["t"]}, {"t": 2}, {"a": each, "b": each})
    assert sorted(one for mine in assigned.values() for one in mine) == each


def test_new_partitions_of_several_topics_are_spread() -> None:
    assigned = assign("sticky", {"a": ["t", "u"], "b": ["t", "u"]}, {"t": 4, "u": 4}, {})
    for each in assigned.values():
        assert {one.topic for one in each} == {"t", "u"}


def test_range_and_roundrobin() -> None:
    members: Members = {"a": ["t", "u"], "b": ["t"], "c": ["t", "u"]}
    ranged = assign("range", members, {"t": 4, "u": 3}, {})
    assert [str(one) for one in ranged["a"]] == ["t-0", "t-1", "u-0", "u-1"]
    assert [str(one) for one in ranged["b"]] == ["t-2"]
    assert [str(one) for one in ranged["c"]] == ["t-3", "u-2"]
    dealt = assign("roundrobin", members, {"t": 4, "u": 3}, {})
    assert [str(one) for one in dealt["a"]] == ["t-0", "t-3", "u-1"]
    assert [str(one) for one in dealt["b"]] == ["t-1"]
    assert [str(one) for one in dealt["c"]] == ["t-2", "u-0", "u-2"]


@pytest.mark.parametrize("topics", [1, 10, 100])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_thousand_partitions_and_a_hundred_members_take_no_time(topics: int, every: int) -> None:
    """``every``: each member wants only each second, or seventh, topic."""
    names = [f"t{n}" for n in range(topics)]
    partitions = dict.fromkeys(names, 1000 // topics)
    members = {f"m{n}": [name for at, name in enumerate(names) if (at + n) % every == 0] for n in range(100)}
    started = time.process_time()
    before = assign("sticky", members, partitions, {})
    smaller = {name: topics for name, topics in members.items() if not name.endswith("3")}
    assign("sticky", smaller, partitions, before)
    heap = {"m0": [TopicPartition(name, n) for name in members["m0"] for n in range(partitions[name])]}
    assign("sticky", members, partitions, heap)
    assert time.process_time() - started < 1.5  # three assignments
