"""Groups that nobody uses expire: by the time that leaders write down, as safe against zombies as deleted ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayqueue.cluster.commands import ChangeGroup, ExpireGroups, GroupsForgotten, Leave, encode_command
from rayqueue.cluster.coordinator import EXPIRE_EVERY_S
from rayqueue.cluster.tables import META
from rayqueue.errors import InvalidInputError, StaleGenerationError, UnknownFormatError
from rayqueue.partition import (
    Expired,
    PartitionSettings,
    commit_command,
    expire_groups_command,
    pass_time_command,
    pin_command,
)
from rayqueue.partition.commands import decode
from rayqueue.partition.groups import Group as Position
from rayqueue.partition.tables import GROUPS
from rayqueue.protocol.calls import Assignment, DescribeGroup, LeaveGroup, ListGroups
from tests.unit.cluster.cluster_state import ClusterLog, Service
from tests.unit.partition.partition_log import Log, batch

DAY_MS = 24 * 3_600_000
WEEK_MS = 7 * DAY_MS


class Timed(Service):
    """A leading coordinator that is told the time of day."""

    def __init__(self, log: ClusterLog | None = None, *, now_ms: int = 1_000 * DAY_MS, **settings: Any) -> None:
        super().__init__(log, wall_ms=now_ms, **settings)

    def leave(self, member: str, group: str = "g") -> None:
        self.ask(LeaveGroup(group=group, member=member))
        self.pass_time(0)

    def look(self) -> None:
        """Let the leader look for what expired."""
        self.pass_time(EXPIRE_EVERY_S + 1)

    @property
    def groups(self) -> set[str]:
        return set(self.log.machine.groups)


# -- the coordinator ----------------------------------------------------------------------------------------


def test_a_group_expires_a_week_after_its_last_member_left() -> None:
    service = Timed()
    service.join("a", session_timeout_ms=3_600_000)
    service.wall_ms += 30 * DAY_MS
    service.look()
    assert service.groups == {"g"}  # it has a member
    service.leave("a")
    left_ms = service.wall_ms
    info = service.ask(DescribeGroup(group="g")).answer
    assert (info.state, info.empty_since_ms, info.expires_at_ms) == ("empty", left_ms, left_ms + WEEK_MS)
    service.wall_ms += WEEK_MS - 1
    service.look()
    assert service.groups == {"g"}
    service.wall_ms += 1_002
    service.look()
    assert service.groups == set()
    assert service.ask(ListGroups()).answer == ()


def test_who_joins_in_time_keeps_the_group() -> None:
    service = Timed()
    service.join("a")
    service.leave("a")
    service.wall_ms += WEEK_MS - 1
    service.join("b", session_timeout_ms=3_600_000)
    info = service.ask(DescribeGroup(group="g")).answer
    assert (info.empty_since_ms, info.expires_at_ms) == (None, None)
    service.wall_ms += WEEK_MS
    service.look()
    assert service.groups == {"g"}
    service.leave("b")
    service.wall_ms += WEEK_MS - 1
    service.look()
    assert service.groups == {"g"}  # a whole time since the last one left, not since the first


def test_a_new_leader_goes_on_from_the_time_that_was_written() -> None:
    first = Timed()
    first.join("a")
    first.leave("a")
    first.log.restart()
    behind = Timed(first.log, now_ms=5 * DAY_MS)  # its clock is years behind
    behind.join("z", group="other")
    behind.leave("z", group="other")
    assert behind.log.machine.groups["other"].empty_ms == 1_000 * DAY_MS
    behind.look()
    assert behind.groups == {"g", "other"}
    right = Timed(first.log, now_ms=1_000 * DAY_MS + WEEK_MS + 2_000)
    right.look()
    assert right.groups == set()


def test_groups_of_before_leaders_told_the_time_count_from_the_first_that_did() -> None:
    service = Timed()
    service.coordinator.unlead()
    log = service.log
    old = Service(log)
    old.join("a")
    log.apply(ChangeGroup("g", (Leave("a"),)))
    row = log.store.get(META, b"gg")
    assert row is not None
    head = msgspec.msgpack.decode(row)
    log.store.put(META, b"gg", msgspec.msgpack.encode(head[:4]))  # as it was written before
    log.restart()
    later = Timed(log, now_ms=2_000 * DAY_MS)
    later.look()
    assert later.groups == {"g"}
    later.wall_ms += WEEK_MS - DAY_MS
    later.look()
    assert later.groups == {"g"}
    later.wall_ms += DAY_MS + 2_000
    later.look()
    assert later.groups == set()


def test_nobody_expires_where_that_is_not_wanted() -> None:
    service = Timed(group_retention_ms=None)
    service.join("a")
    service.leave("a")
    service.wall_ms += 1_000 * DAY_MS
    service.look()
    assert service.groups == {"g"}
    assert service.ask(DescribeGroup(group="g")).answer.expires_at_ms is None


def test_at_the_limit_expired_groups_make_room_and_the_refusal_says_what_to_do() -> None:
    service = Timed(max_groups=2)
    for group in ("one", "two"):
        service.join("a", group=group)
        service.leave("a", group=group)
    refused = service.join("b", group="innocent")
    assert isinstance(refused, InvalidInputError)
    for word in ("cluster.max_groups", "cluster.group_retention_ms", "rayqueue groups delete", "2 of them without"):
        assert word in str(refused)
    service.wall_ms += WEEK_MS + 2_000
    assert isinstance(service.join("b", group="innocent"), Assignment)  # without waiting for the next look
    assert service.groups == {"innocent"}


def test_a_new_life_of_an_expired_group_begins_above_all_generations_of_the_old_one() -> None:
    service = Timed()
    for _ in range(5):
        service.join("a")
        service.leave("a")
    before = service.log.machine.groups["g"].generation
    service.wall_ms += WEEK_MS + 2_000
    service.look()
    assert service.log.machine.expired == {"g": before}
    assert service.join("a").generation > before
    service.log.restart()
    assert service.log.machine.expired == {"g": before}  # until the partitions have forgotten it
    service.log.apply(GroupsForgotten(("g",), before - 1))
    assert service.log.machine.expired == {"g": before}
    service.log.apply(GroupsForgotten(("g", "unheard-of"), before))
    assert service.log.machine.expired == {}


def test_many_expire_some_at_a_time() -> None:
    log = ClusterLog()
    service = Timed(log)
    for number in range(250):
        service.join("a", group=f"g{number}")
        service.leave("a", group=f"g{number}")
    late = ExpireGroups(service.wall_ms + WEEK_MS + 2_000, WEEK_MS)
    assert [len(log.apply(late)) for _ in range(3)] == [200, 50, 0]
    twin = ClusterLog()
    twin.machine.restore(log.machine.checkpoint())
    assert twin.machine.checkpoint() == log.machine.checkpoint()
    assert len(encode_command(late)) < 100


# -- the partition --------------------------------------------------------------------------------------------


def timed_log(**settings: Any) -> Log:
    log = Log(PartitionSettings(**settings))
    log.apply(pass_time_command(DAY_MS))
    log.apply(batch(10))
    return log


def test_a_position_without_membership_expires_after_its_last_commit() -> None:
    log = timed_log()
    log.apply(commit_command("by-hand", 0, {0: 3}))
    log.apply(pass_time_command(5 * DAY_MS))
    log.apply(commit_command("by-hand", 0, {0: 5}))
    assert log.partition.expiry_command(12 * DAY_MS, WEEK_MS) is None
    command = log.partition.expiry_command(12 * DAY_MS + 1, WEEK_MS)
    assert command is not None
    log.apply(command)
    assert log.partition.position("by-hand") is None
    assert log.partition.lags() == {}
    assert log.partition.expiry_command(20 * DAY_MS, WEEK_MS) is None
    log.crash()
    assert log.partition.position("by-hand") is None


def test_members_positions_and_pinned_ones_do_not_expire_by_the_partitions_clock() -> None:
    log = timed_log()
    log.apply(commit_command("members", 4, {0: 3}))
    log.apply(commit_command("pinned", 0, {0: 2}))
    log.apply(pin_command("pinned"))
    assert log.partition.expiry_command(100 * DAY_MS, WEEK_MS) is None
    log.apply(pass_time_command(100 * DAY_MS, WEEK_MS))
    assert set(log.partition.positions()) == {"members", "pinned"}
    log.apply(pin_command("pinned", False))
    log.apply(pass_time_command(107 * DAY_MS, WEEK_MS))
    assert "pinned" in log.partition.positions()  # a whole time after it was let go of
    log.apply(pass_time_command(107 * DAY_MS + 1, WEEK_MS))
    assert set(log.partition.positions()) == {"members"}


def test_a_zombie_of_an_expired_group_cannot_commit() -> None:
    log = timed_log()
    log.apply(commit_command("g", 7, {0: 3}))
    log.apply(commit_command("pinned", 6, {0: 1}))
    log.apply(pin_command("pinned"))
    log.apply(commit_command("by-hand", 0, {0: 1}))
    log.apply(commit_command("new-life", 9, {0: 2}))
    expire = expire_groups_command(["g", "pinned", "by-hand", "new-life", "unheard-of"], 8)
    assert log.apply(expire) == Expired(("g",))
    assert set(log.partition.positions()) == {"pinned", "by-hand", "new-life"}
    for generation in (1, 7, 8):
        assert isinstance(log.apply(commit_command("g", generation, {0: 9})), StaleGenerationError)
    twin = log.twin_from_checkpoint(log.checkpoint())
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    log.crash()
    assert isinstance(log.apply(commit_command("g", 7, {0: 9})), StaleGenerationError)
    assert log.apply(commit_command("g", 9, {})).offsets == {}  # a new life begins anew
    assert log.apply(expire) == Expired(())  # told again: what is of the new life stays
    assert "g" in log.partition.positions()


def test_a_full_partition_says_which_setting_and_what_to_do() -> None:
    log = timed_log(max_groups=1)
    log.apply(commit_command("one", 0, {0: 1}))
    refused = log.apply(commit_command("two", 0, {0: 1}))
    assert isinstance(refused, InvalidInputError)
    for word in ("max_groups", "rayqueue groups delete", "cluster.group_retention_ms"):
        assert word in str(refused)
    log.apply(pass_time_command(9 * DAY_MS, WEEK_MS))
    assert not isinstance(log.apply(commit_command("two", 0, {0: 1})), InvalidInputError)


def test_positions_of_before_there_was_a_clock_count_from_its_first_time() -> None:
    log = Log()
    log.apply(batch(3))
    log.apply(commit_command("old", 0, {0: 1}, metadata=b"m"))
    row = log.store.get(GROUPS, b"old")
    assert row is not None
    assert len(row) == 10 + 9 + 1  # as before: generation, lanes, one lane, metadata
    assert Position.decode(row).used_ms == 0
    command = log.partition.expiry_command(500 * DAY_MS, WEEK_MS)
    assert command is not None  # the first time has still to be told
    log.apply(command)
    assert "old" in log.partition.positions()
    log.apply(pass_time_command(507 * DAY_MS, WEEK_MS))
    assert "old" in log.partition.positions()
    log.apply(pass_time_command(507 * DAY_MS + 1, WEEK_MS))
    assert "old" not in log.partition.positions()


def test_a_command_that_is_cut_off_or_too_long_cannot_be_read() -> None:
    whole = expire_groups_command(["one", "three"], 5)
    for wrong in (*(whole[:cut] for cut in range(1, len(whole))), whole + b"x"):
        with pytest.raises(UnknownFormatError):
            decode(wrong)
