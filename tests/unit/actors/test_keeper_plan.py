"""The keeper's decisions: one picture of the cluster in, steps out."""

from __future__ import annotations

from typing import Any

from rayqueue.actors.keeper.plan import (
    Behind,
    Configure,
    Confirm,
    Doomed,
    Picture,
    Remove,
    ReplicaKey,
    Restart,
    Start,
    Wanted,
    plan,
)
from rayqueue.ids import GroupId, ReplicaId


def key(node: str = "r1", group: str = "orders-0.1") -> ReplicaKey:
    return ReplicaKey(GroupId(group), ReplicaId(node))


def wanted(node: str = "r1", broker: str = "b1", *, unmade: bool = False) -> Wanted:
    return Wanted(key(node), broker, unmade)


def picture(*, brokers: dict[str, str] | None = None, actors: Any = None, **rest: Any) -> Picture:
    return Picture(brokers={"b1": "ray1"} if brokers is None else brokers, actors=actors or {}, **rest)


def test_a_missing_replica_is_started_and_makes_data_only_if_it_never_had_any() -> None:
    assert plan(picture(wanted=[wanted(unmade=True)])) == [Start(key(), "b1", create=True)]
    assert plan(picture(wanted=[wanted(unmade=False)])) == [Start(key(), "b1", create=False)]


def test_a_replica_that_runs_where_it_belongs_is_left_alone() -> None:
    assert plan(picture(wanted=[wanted()], actors={key(): "ray1"})) == []


def test_nothing_is_started_for_a_broker_that_is_away() -> None:
    assert plan(picture(brokers={}, wanted=[wanted()])) == []
    assert plan(picture(brokers={}, wanted=[wanted()], actors={key(): "ray1"})) == []


def test_a_replica_pinned_to_the_node_that_its_broker_was_on_is_restarted() -> None:
    moved = picture(brokers={"b1": "ray2"}, wanted=[wanted()], actors={key(): "ray1"})
    assert plan(moved) == [Restart(key(), "b1", create=False)]
    never_made = picture(brokers={"b1": "ray2"}, wanted=[wanted(unmade=True)], actors={key(): "ray1"})
    assert plan(never_made) == [Restart(key(), "b1", create=True)]


def test_an_actor_that_ray_has_not_placed_yet_is_waited_for() -> None:
    assert plan(picture(wanted=[wanted()], actors={key(): None})) == []


def test_a_new_replica_that_runs_is_confirmed() -> None:
    assert plan(picture(wanted=[wanted(unmade=True)], actors={key(): "ray1"})) == [Confirm(key(), "b1")]


def test_a_doomed_replica_is_removed_once_its_broker_is_there() -> None:
    doomed = [Doomed(key(), "b1")]
    assert plan(picture(wanted=[], doomed=doomed)) == [Remove(key(), "b1")]
    assert plan(picture(wanted=[], doomed=doomed, actors={key(): "ray1"})) == [Remove(key(), "b1")]
    assert plan(picture(brokers={}, wanted=[], doomed=doomed)) == []


def test_a_partition_is_configured_once_it_has_an_actor() -> None:
    behind = [Behind(GroupId("orders-0.1"), 2)]
    assert plan(picture(wanted=[], behind=behind)) == []
    assert plan(picture(wanted=[], behind=behind, actors={key(): "ray1"})) == [Configure(GroupId("orders-0.1"), 2)]


def test_what_is_under_way_is_not_begun_again() -> None:
    busy = picture(
        wanted=[wanted(unmade=True), wanted("r2")],
        doomed=[Doomed(key("r3"), "b1")],
        behind=[Behind(GroupId("orders-0.1"), 2)],
        actors={key("r9"): "ray1"},
        busy={key(), key("r2"), key("r3"), "orders-0.1"},
    )
    assert plan(busy) == []


def test_actors_that_nobody_asked_for_are_left_alone() -> None:
    """Somebody else may run groups in the same namespace."""
    assert plan(picture(wanted=[], actors={key("n1", "demo-0"): "ray1"})) == []


def test_one_slow_broker_holds_up_no_other() -> None:
    steps = plan(
        picture(
            brokers={"b1": "ray1", "b3": "ray3"},
            wanted=[wanted("r1", "b1"), wanted("r2", "b2"), wanted("r3", "b3")],
            busy={key("r1")},
        )
    )
    assert steps == [Start(key("r3"), "b3", create=False)]
