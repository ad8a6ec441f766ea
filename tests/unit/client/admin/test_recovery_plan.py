"""The plan of a recovery: who goes on, or where a partition begins anew of which nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.client.admin.recovery import SKIPPED, PartitionRecovery, plan_recovery
from rayqueue.errors import (
    DamagedLogError,
    InvalidInputError,
    RayQueueError,
    RecoveryRefusedError,
    StoreMissingError,
)
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicSettings
from tests.unit.client.admin.test_client_admin import GROUP, PARTITION, status

ALONE = PartitionInfo(0, GROUP, (ReplicaInfo("r1", "b1"),))


def planned(partition: PartitionInfo, *answers: Any, **asked: Any) -> PartitionRecovery:
    info = TopicInfo("orders", 1, TopicSettings(), (partition,))
    told = {(GROUP, each.replica_id): answer for each, answer in zip(partition.replicas, answers, strict=True)}
    return plan_recovery(info, partition, told, asked.pop("survivor", None), **asked)


def missing(acknowledged: int | None = None) -> StoreMissingError:
    return StoreMissingError("there is no store", **({} if acknowledged is None else {"acknowledged": acknowledged}))


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        (missing(1234), 1234),
        (DamagedLogError("a checksum", acknowledged=1234), 1234),
        (status("r1", "follower", end=1234, damaged="a checksum", voters=("r1",)), 1234),
        (status("r1", "follower", end=1000, damaged="a checksum", voters=("r1",), acknowledged=1234), 1234),
        (status("r1", "follower", end=1234, damaged="a checksum", voters=("r1",), start_offset=1200), 34),
    ],
)
def test_an_only_replica_that_is_lost_begins_anew_behind_what_it_had_acknowledged(answer: Any, lost: int) -> None:
    plan = planned(ALONE, answer)
    assert (plan.survivor, plan.broker, plan.kept_records, plan.known_lost_records) == ("", "", 0, lost)
    assert plan.begins_at == 2 * SKIPPED
    assert "before offset 1234 are known to have been acknowledged" in plan.said
    assert (
        f"begins anew on the broker that had it, or on another one if that is away, empty, at offset {plan.begins_at}"
        in (plan.said)
    )
    assert planned(ALONE, answer, begin_at=1234, broker="b7").begins_at == 1234
    with pytest.raises(RecoveryRefusedError, match="would give offsets a second time"):
        planned(ALONE, answer, begin_at=1233)


@pytest.mark.parametrize("known", [0, 1, SKIPPED - 1, SKIPPED, 7 * SKIPPED + 5])
def test_what_was_acknowledged_after_the_mark_is_skipped_too(known: int) -> None:
    begins_at = planned(ALONE, missing(known)).begins_at
    assert begins_at is not None
    assert known + SKIPPED < begins_at <= known + 2 * SKIPPED
    assert begins_at % SKIPPED == 0


@pytest.mark.parametrize(
    ("partition", "answers"),
    [
        (ALONE, (missing(),)),
        (ALONE, (RayQueueError("has no actor now"),)),
        (ALONE, (None,)),
        (PARTITION, (missing(), missing(), missing())),
        (PARTITION, (missing(10), missing(10), missing(10))),  # marks of a time when each was alone
        (PARTITION, (missing(), missing(), status("r3", "follower", end=5, damaged="a bit", voters=("r3",)))),
    ],
)
def test_where_nobody_knows_how_far_it_was_the_operator_says_it(
    partition: PartitionInfo, answers: tuple[Any, ...]
) -> None:
    with pytest.raises(RecoveryRefusedError, match="nobody knows up to which offset"):
        planned(partition, *answers)
    plan = planned(partition, *answers, begin_at=70, broker="b4")
    assert (plan.begins_at, plan.broker, plan.survivor) == (70, "b4", "")
    assert plan.abandoned.keys() == {each.replica_id for each in partition.replicas}


def test_who_can_go_on_does() -> None:
    answers = (missing(), missing(), status("r3", "follower", end=5, voters=("r1", "r2", "r3")))
    assert (planned(PARTITION, *answers).survivor, planned(PARTITION, *answers).begins_at) == ("r3", None)
    for asked in ({"begin_at": 70}, {"broker": "b4"}):
        with pytest.raises(InvalidInputError, match="r3 can go on"):
            planned(PARTITION, *answers, **asked)
    with pytest.raises(RecoveryRefusedError, match="needs no recovery"):
        planned(ALONE, status("r1", "leader", end=5, voters=("r1",)), begin_at=70)
