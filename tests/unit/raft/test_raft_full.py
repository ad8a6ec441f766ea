"""Groups whose disks are full: who leads, what is refused and what goes on, in virtual time."""

from __future__ import annotations

import pytest

from rayqueue.errors import LeadershipLostError, NotLeaderError
from rayqueue.ids import Index, ReplicaId
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.room import Picture, heir
from tests.unit.raft.engines import Engines

BIG = b"\x20" + b"b" * 600
SMALL = b"\x20s"
SMALL_BYTES = 64


def group_of(*nodes: str) -> Engines:
    group = Engines(*nodes)
    for store in group.stores.values():
        store.small_bytes = SMALL_BYTES
    leader = group.leader
    for number in range(3):
        leader.propose(BIG, ("before", number))
        group.answer(("before", number))
    group.run(1)
    return group


def fill(group: Engines, *nodes: ReplicaId, room: int = 0) -> None:
    """From now on these disks have room for so much, and for small things."""
    for node in nodes:
        disk = group.stores[node].disk
        disk.limit_bytes = disk.payload_bytes + room


def empty(group: Engines) -> None:
    for store in group.stores.values():
        store.disk.limit_bytes = None
        store.look_for_room()


def followers(group: Engines) -> list[ReplicaId]:
    leader = group.leader.replica_id
    return [node for node in group.engines if node != leader]


def is_taken(group: Engines, payload: bytes, name: str, seconds: float = 20) -> bool:
    """Whether somebody applies it, asked again as a client would; False if records are refused."""
    for attempt in range(200):
        leader = group.leader
        if payload is BIG and leader.refuses_records:
            return False
        try:
            leader.propose(payload, (name, attempt))
        except NotLeaderError:
            group.run(0.1)
            continue
        group.run(2, lambda attempt=attempt: (name, attempt) in group.answers)  # type: ignore[misc]
        if isinstance(group.answers.get((name, attempt)), int):
            return True
    raise AssertionError("neither taken nor refused")


def agree(group: Engines) -> None:
    group.run(10)
    assert len({machine.total for machine in group.machines.values()}) == 1
    assert len({store.last_index for store in group.stores.values()}) == 1


@pytest.mark.parametrize("nodes", [("a",), ("a", "b", "c"), ("a", "b", "c", "d", "e")])
def test_where_all_disks_are_full_records_are_refused_and_small_entries_go_on(nodes: tuple[str, ...]) -> None:
    group = group_of(*nodes)
    fill(group, *group.engines)
    assert not is_taken(group, BIG, "too much")
    for number in range(10):
        assert is_taken(group, SMALL, f"position {number}")
    group.leader.confirm_leadership("read")
    assert group.answer("read") is None
    assert not is_taken(group, BIG, "still too much")
    empty(group)
    group.run(2)
    assert is_taken(group, BIG, "there is space")
    agree(group)


def test_a_majority_of_full_disks_has_a_leader_even_if_the_one_with_space_led() -> None:
    """The leader's log goes on after what the others can store: it must make way, or nothing would be committed."""
    group = group_of("a", "b", "c")
    roomy = group.leader
    fill(group, *followers(group))
    for number in range(3):
        roomy.propose(BIG, ("tail", number))
    group.run(5)
    assert all(isinstance(group.answers[("tail", number)], LeadershipLostError) for number in range(3))
    assert group.leader is not roomy
    for number in range(10):
        assert is_taken(group, SMALL, f"position {number}")
    assert not is_taken(group, BIG, "too much")
    empty(group)
    group.run(2)
    assert is_taken(group, BIG, "there is space")
    agree(group)


def test_one_full_follower_holds_up_nobody_and_catches_up_later() -> None:
    group = group_of("a", "b", "c")
    leader, full = group.leader, followers(group)[0]
    fill(group, full)
    for number in range(5):
        assert is_taken(group, BIG, f"more {number}")
    assert group.leader is leader, "it has a majority with room"
    assert group.stores[full].last_index < leader.store.last_index
    empty(group)
    agree(group)


def test_a_full_leader_makes_way_for_one_with_space() -> None:
    group = group_of("a", "b", "c")
    old = group.leader
    fill(group, old.replica_id)
    old.propose(BIG, "too much")
    group.run(5)
    assert group.leader is not old
    for number in range(3):
        assert is_taken(group, BIG, f"more {number}")
    old_engine = group.engines[old.replica_id]
    group.run(30)
    assert not old_engine.is_leader or not old_engine.refuses_records
    empty(group)
    agree(group)


def test_a_leader_that_learns_early_that_it_is_full_hands_over_without_losing_anything() -> None:
    group = group_of("a", "b", "c")
    old = group.leader
    fill(group, old.replica_id)
    group.stores[old.replica_id]._full = True
    group.stores[old.replica_id]._wanted_bytes = 1
    assert old.refuses_records
    old.propose(SMALL, "position")
    assert isinstance(group.answer("position"), int)
    group.run(3, lambda: not old.is_leader)
    assert not old.is_leader
    assert is_taken(group, BIG, "more")


def test_a_replica_that_can_write_nothing_at_all_is_silent_until_it_can() -> None:
    group = group_of("a", "b", "c")
    for store in group.stores.values():
        store.disk.limit_bytes = store.disk.payload_bytes
        store.disk.reserve_bytes = 0
    group.leader.propose(SMALL, "no")
    group.run(5)
    assert not any(engine.is_leader for engine in group.engines.values())
    empty(group)
    group.run(3)
    assert is_taken(group, SMALL, "yes")
    agree(group)


def test_a_full_replica_restarts_and_goes_on() -> None:
    group = group_of("a", "b", "c")
    fill(group, *group.engines)
    assert not is_taken(group, BIG, "too much")
    for node in list(group.engines):
        group.restart(node)
        group.stores[node].small_bytes = SMALL_BYTES
    assert is_taken(group, SMALL, "position")


# -- who should lead ------------------------------------------------------------------------


def picture(full: str, match: dict[str, int], *, commit: int, last: int, stuck: bool = True) -> Picture:
    matches = {ReplicaId(node): Index(index) for node, index in match.items()}
    members = ReplicaSet.of(["a", *match])
    return Picture(ReplicaId("a"), members, set(map(ReplicaId, full)), matches, Index(commit), Index(last), stuck)


@pytest.mark.parametrize(
    ("full", "match", "commit", "last", "stuck", "expected"),
    [
        ("", {"b": 9, "c": 9}, 9, 9, True, None),
        ("a", {"b": 9, "c": 9}, 9, 9, True, "b"),
        ("a", {"b": 8, "c": 9}, 9, 9, True, "c"),
        ("a", {"b": 8, "c": 8}, 8, 9, True, None),  # they are catching up
        ("ab", {"b": 9, "c": 9}, 9, 9, True, None),  # no majority has room, and nothing is in the way
        ("bc", {"b": 5, "c": 4}, 5, 9, True, "b"),
        ("bc", {"b": 5, "c": 4}, 5, 9, False, None),
        ("bc", {"b": 4}, 5, 9, True, None),  # the other is not there: nobody could win
        ("bcd", {"b": 7, "c": 5, "d": 4, "e": 9}, 7, 9, True, "b"),
    ],
)
def test_who_should_lead_where_disks_are_full(
    full: str, match: dict[str, int], commit: int, last: int, stuck: bool, expected: str | None
) -> None:
    assert heir(picture(full, match, commit=commit, last=last, stuck=stuck)) == expected


def test_nothing_is_applied_that_a_full_disk_could_still_refuse() -> None:
    group = group_of("a", "b", "c")
    leader = group.leader
    follower: RaftEngine = group.engines[followers(group)[0]]
    fill(group, follower.replica_id)
    applied = follower.applied
    for number in range(3):
        leader.propose(BIG, number)
        group.answer(number)
    group.run(2)
    assert follower.applied == applied
    assert follower.commit <= group.stores[follower.replica_id].last_index
