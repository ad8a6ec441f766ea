"""Retention: what it may take, and what groups keep it from."""

from __future__ import annotations

import pytest

from rayqueue.errors import InvalidInputError, UnknownFormatError
from rayqueue.partition import (
    PartitionSettings,
    Pinned,
    commit_command,
    delete_group_command,
    pin_command,
    retention_point,
    trim_command,
)
from rayqueue.partition.commands import PinGroup, Trim, decode
from tests.unit.partition.partition_log import Log, batch

CONSUMED = PartitionSettings(retention_consumed=True)
LANES = PartitionSettings(retention_consumed=True, lanes=3)


def retained(log: Log, now_ms: int = 0) -> int:
    """Where the log starts after retention has had its turn."""
    command = log.partition.retention_command(now_ms)
    if command is not None:
        log.apply(command)
    return log.partition.start_offset


def test_consumed_by_all() -> None:
    log = Log(CONSUMED)
    for _ in range(3):
        log.apply(batch(4))
    assert retained(log) == 0  # nobody has read anything
    log.apply(commit_command("a", 1, {0: 10}))
    assert retained(log) == 10
    log.apply(commit_command("b", 1, {}))  # a new group: nothing is committed by all any more
    log.apply(commit_command("a", 1, {0: 12}))
    assert retained(log) == 10
    log.apply(commit_command("b", 1, {0: 11}))
    assert retained(log) == 11
    log.apply(delete_group_command("b"))
    assert retained(log) == 12


def test_a_pinned_group_holds_the_log_whatever_the_reason_to_trim() -> None:
    settings = PartitionSettings(retention_ms=100, retention_bytes=1, retention_consumed=True)
    log = Log(settings)
    for _ in range(3):
        log.apply(batch(4, timestamps=0))
    assert log.apply(pin_command("spark")) == Pinned(True)
    log.apply(commit_command("other", 1, {0: 12}))
    assert retained(log, 10**6) == 0
    log.apply(commit_command("spark", 1, {0: 5}))
    assert retained(log, 10**6) == 5
    log.apply(log.partition.guarded_trim(12))
    assert log.partition.start_offset == 5
    assert log.apply(pin_command("spark", False)) == Pinned(False)
    assert retained(log, 10**6) == 12


def test_pins_survive_restarts_and_checkpoints() -> None:
    log = Log(PartitionSettings(retention_ms=100))
    log.apply(batch(4, timestamps=0))
    log.apply(commit_command("g", 3, {0: 1}, metadata=b"m"))
    log.apply(pin_command("g"))
    decided = log.partition.guarded_trim(4)
    log.apply(pin_command("late"))
    twin = log.twin_from_checkpoint(log.checkpoint())
    twin.payloads = list(log.payloads)
    log.store.sync()
    log.crash()
    for replica in (log, twin):
        position = replica.partition.position("g")
        assert position is not None
        assert (position.generation, position.offsets, position.metadata, position.pinned) == (3, {0: 1}, b"m", True)
        assert replica.apply(decided).start_offset == 0  # it was decided before "late" was pinned
    assert retained(log, 10**6) == 0


def test_lanes_hold_back_only_with_records_that_are_not_committed() -> None:
    log = Log(LANES)
    for lane in (0, 1, 0, 2, 0):
        log.apply(batch(2, lane=lane))  # 0: 0-1, 4-5, 8-9; 1: 2-3; 2: 6-7
    log.apply(commit_command("g", 1, {0: 10}))
    assert retained(log) == 2  # lane 1 was never committed
    log.apply(commit_command("g", 1, {1: 3}))
    assert retained(log) == 3
    log.apply(commit_command("g", 1, {1: 4}))  # right behind its last record: lane 1 holds nothing any more
    assert retained(log) == 6
    log.apply(commit_command("g", 1, {2: 8}))
    assert retained(log) == 10
    log.apply(batch(1, lane=1))
    log.apply(commit_command("g", 1, {0: 11}))
    assert retained(log) == 10


@pytest.mark.parametrize(
    "meanwhile",
    [
        pin_command("new"),
        pin_command("a"),
        commit_command("new", 1, {0: 4}),
        commit_command("a", 1, {0: 1}, rewind=True),
    ],
)
def test_a_trim_that_was_overtaken_by_a_group_does_nothing(meanwhile: bytes) -> None:
    log = Log(CONSUMED)
    log.apply(batch(4))
    log.apply(commit_command("a", 1, {0: 4}))
    decided = [log.partition.retention_command(0), log.partition.guarded_trim(3)]
    log.apply(meanwhile)
    for command in decided:
        assert command is not None
        assert log.apply(command).start_offset == 0


@pytest.mark.parametrize(
    "meanwhile",
    [
        batch(3),
        commit_command("a", 1, {0: 4}),
        commit_command("a", 2, {}),
        commit_command("a", 1, {0: 2}),
        commit_command("a", 0, {0: 1}, rewind=True),  # a stale generation
        pin_command("a", False),
        delete_group_command("a"),
    ],
)
def test_nothing_else_stops_a_trim(meanwhile: bytes) -> None:
    log = Log(CONSUMED)
    log.apply(batch(4))
    log.apply(commit_command("a", 1, {0: 3}))
    command = log.partition.retention_command(0)
    log.apply(meanwhile)
    assert command is not None
    assert log.apply(command).start_offset == 3


def test_the_topic_says_or_else_the_replica() -> None:
    log = Log(PartitionSettings(retention_ms=1000))
    log.apply(batch(1, timestamps=0))
    log.apply(batch(1, timestamps=500))
    assert log.partition.retention_command(900, retention_ms=1) is None
    command = log.partition.retention_command(1200, retention_ms=1)
    assert command is not None
    assert decode(command) == Trim(1, as_of=2)
    log = Log()
    log.apply(batch(1, timestamps=0))
    assert log.partition.retention_command(10**6) is None
    assert log.partition.retention_command(10**6, retention_ms=1) is not None


def test_a_snapshot_can_be_asked_too() -> None:
    log = Log(LANES)
    for lane in (0, 1, 2):
        log.apply(batch(2, lane=lane))
    log.apply(commit_command("a", 1, {0: 6, 1: 6, 2: 5}))
    with log.snapshot() as snapshot:
        groups = log.partition.groups.values()
        assert retention_point(snapshot, 0, None, None, consumed=True, groups=groups) == 5
        assert retention_point(snapshot, 0, None, None, consumed=True) == 0
        assert retention_point(snapshot, 0, None, None, groups=groups) == 0


def test_commands() -> None:
    assert decode(pin_command("g")) == PinGroup("g", True)
    assert decode(pin_command("g", False)) == PinGroup("g", False)
    assert decode(trim_command(7, as_of=9)) == Trim(7, 9)
    assert decode(trim_command(7)) == Trim(7, None)
    assert pin_command("g").hex() == "150167"
    assert trim_command(7, as_of=9).hex() == "1607000000000000000900000000000000"
    for wrong in (
        b"\x15",
        b"\x15\x01",
        b"\x15\x02g",
        b"\x15\x01\xff",
        pin_command("g" * 255) + b"x",
        b"\x16" + 9 * b"0",
    ):
        with pytest.raises(UnknownFormatError):
            decode(wrong)
    log = Log(PartitionSettings(max_groups=1))
    assert log.apply(pin_command("g", False)) == Pinned(False)
    assert len(log.partition.groups) == 0
    log.apply(pin_command("g"))
    assert isinstance(log.apply(pin_command("h")), InvalidInputError)


def test_a_claim_keeps_the_metadata_of_the_position() -> None:
    log = Log()
    log.apply(batch(4))
    log.apply(commit_command("g", 1, {0: 2}, metadata=b"m"))
    assert log.apply(commit_command("g", 2, {})).position().metadata == b"m"
    assert log.apply(commit_command("g", 2, {0: 3})).position().metadata == b""
