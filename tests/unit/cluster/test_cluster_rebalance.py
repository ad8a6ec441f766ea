"""Rebalance plans: even, never worse, no more moves than needed, and none for what a plan has made."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from rayqueue.cluster.placement import AliveBroker, crowding
from rayqueue.cluster.rebalance import PlannedMove, plan
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicSettings


def topic(*placement: tuple[str, ...], name: str = "orders") -> TopicInfo:
    partitions = tuple(
        PartitionInfo(
            number,
            f"{name}-{number}.1",
            tuple(ReplicaInfo(f"r{each + 1}", broker) for each, broker in enumerate(brokers)),
        )
        for number, brokers in enumerate(placement)
    )
    return TopicInfo(name, 1, TopicSettings(partitions=len(placement), replication=len(placement[0])), partitions)


def after(info: TopicInfo, moves: list[PlannedMove]) -> TopicInfo:
    to = {(each.group_id, each.remove): each.target for each in moves}
    return topic(
        *(
            tuple(to.get((part.group_id, each.replica_id), each.broker) for each in part.replicas)
            for part in info.partitions
        )
    )


def counts(info: TopicInfo, alive: list[AliveBroker]) -> dict[str, int]:
    found = Counter({each.broker: 0 for each in alive})
    found.update(replica.broker for part in info.partitions for replica in part.replicas)
    return dict(found)


def brokers(count: int, racks: int = 1) -> list[AliveBroker]:
    return [AliveBroker(f"b{each}", f"h{each}", rack=f"rack{each % racks}") for each in range(count)]


def test_a_new_broker_gets_its_share_by_as_few_moves_as_that_takes() -> None:
    info = topic(*[("b0", "b1", "b2")] * 8)
    moves = plan([info], brokers(4))
    assert len(moves) == 6
    assert {each.target for each in moves} == {"b3"}
    assert counts(after(info, moves), brokers(4)) == {"b0": 6, "b1": 6, "b2": 6, "b3": 6}
    assert plan([after(info, moves)], brokers(4)) == []


def test_the_smallest_are_moved_and_nothing_goes_where_no_room_is() -> None:
    info = topic(*[("b0",)] * 4)
    sizes = {part.group_id: (part.number + 1) * 100 for part in info.partitions}
    moves = plan([info], brokers(2), sizes=sizes)
    assert [(each.partition, each.size_bytes) for each in moves] == [(0, 100), (1, 200)]
    assert plan([info], brokers(2), sizes=sizes, room={"b1": 1}) == moves[:1]
    assert plan([info], brokers(2), sizes=sizes, spare_bytes={"b1": 250}) == moves[:1]
    assert plan([info], brokers(2), sizes=sizes, spare_bytes={"b1": 0}) == []
    assert plan([info], [brokers(1)[0], AliveBroker("b1", "h1", draining=True)]) == []
    assert plan([info], brokers(2), skip={part.group_id for part in info.partitions}) == []
    assert len(plan([info], brokers(2), most=1)) == 1


def test_racks_count_more_than_shares() -> None:
    alive = [AliveBroker(f"b{each}", f"h{each}", rack="left" if each < 3 else "right") for each in range(4)]
    info = topic(("b0", "b1"), ("b1", "b2"), ("b0", "b2"))
    moves = plan([info], alive)
    made = after(info, moves)
    assert len(moves) == 3, "each has a copy on the right, though that broker has more than others then"
    assert all(crowding((each.broker for each in part.replicas), alive_by(alive))[0] == 2 for part in made.partitions)
    assert plan([made], alive) == []


def alive_by(alive: list[AliveBroker]) -> dict[str, AliveBroker]:
    return {each.broker: each for each in alive}


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_makes_nothing_worse_ends_and_has_nothing_to_add(seed: int) -> None:
    rng = Random(seed)
    alive = brokers(rng.randint(2, 8), rng.randint(1, 3))
    draining = {each.broker for each in alive[1:] if rng.random() < 0.15}
    alive = [each._replace(draining=each.broker in draining) for each in alive]
    names = [each.broker for each in alive]
    copies = rng.randint(1, min(3, len(names)))
    gone = ["gone"] if rng.random() < 0.2 else []
    info = topic(*(tuple(rng.sample(names + gone, copies)) for _ in range(rng.randint(1, 15))))
    room = {name: rng.randint(0, 6) for name in names if rng.random() < 0.3}
    moves = plan([info], alive, room=room)
    made, known = after(info, moves), alive_by(alive)
    before_counts, after_counts = counts(info, alive), counts(made, alive)
    for old, new in zip(info.partitions, made.partitions, strict=True):
        held = [each.broker for each in new.replicas]
        assert len(set(held)) == len(held), "two copies on one broker"
        assert crowding(held, known) <= crowding((each.broker for each in old.replicas), known)
    shared_before, shared_after = (
        sum(crowding((each.broker for each in part.replicas), known)[0] for part in each.partitions)
        for each in (info, made)
    )
    if shared_before == shared_after and moves:
        assert sum(n * n for n in after_counts.values()) < sum(n * n for n in before_counts.values())
    for each in moves:
        assert each.source != each.target
        assert each.source in known
        assert each.target not in draining
    for name, left in room.items():
        assert after_counts[name] - before_counts[name] <= left
    still = {name: left - after_counts[name] + before_counts[name] for name, left in room.items()}
    assert plan([made], alive, room=still) == []
