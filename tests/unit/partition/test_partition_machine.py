"""Applying entries: offsets, dedupe, trimming, groups, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rayqueue.errors import (
    ConfigError,
    InvalidInputError,
    InvalidOffsetError,
    InvariantBrokenError,
    OffsetOutOfRangeError,
    ProducerError,
    ProducerFencedError,
    SequenceExpiredError,
    SequenceGapError,
    StaleGenerationError,
    TooManyProducersError,
    UnknownFormatError,
)
from rayqueue.ids import Index, Offset
from rayqueue.log.store import Table
from rayqueue.partition import (
    Admission,
    Configured,
    Deleted,
    Fenced,
    PartitionSettings,
    TimePassed,
    Trimmed,
    commit_command,
    configure_command,
    delete_group_command,
    fence_command,
    forget_group_command,
    machine,
    pass_time_command,
    producers,
    trim_command,
)
from rayqueue.partition.tables import GROUPS, LANES, OFFSETS, PRODUCERS
from rayqueue.records.checksum import crc32c
from tests.unit.partition.partition_log import Log, appended, batch, committed, group

HOUR_MS = 3_600_000

# -- offsets ------------------------------------------------------------------------


def test_offsets_are_dense() -> None:
    log = Log()
    assert log.apply(batch(3)) == appended(0, 3)
    assert log.apply(batch(1)) == appended(3, 1)
    assert log.apply(batch(2)) == appended(4, 2)
    assert log.partition.high_watermark == 6
    assert [log.partition.locate(offset) for offset in range(7)] == [1, 1, 1, 2, 3, 3, None]


def test_lanes_are_indexed_only_where_there_are_some() -> None:
    one, three = Log(), Log(PartitionSettings(lanes=3))
    for log in (one, three):
        log.apply(batch(2))
    three.apply(batch(1, lane=2))
    assert list(one.store.scan(LANES)) == []
    assert [key[0] for key, _ in three.store.scan(LANES)] == [0, 2]


# -- producers ----------------------------------------------------------------------


def test_a_repeated_batch_gets_the_first_answer() -> None:
    log = Log()
    first = log.apply(batch(3, producer_id=7))
    log.apply(batch(5))
    second = log.apply(batch(2, producer_id=7, sequence=3))
    assert log.apply(batch(3, producer_id=7)) == first._replace(duplicate=True)
    assert log.apply(batch(2, producer_id=7, sequence=3)) == second._replace(duplicate=True)
    assert log.partition.next_offset == 10
    assert len(list(log.store.scan(OFFSETS))) == 3


def test_without_a_producer_id_nothing_is_remembered() -> None:
    log = Log()
    assert log.apply(batch()) != log.apply(batch())
    assert len(log.partition.producers) == 0


def test_a_gap_is_refused_and_may_be_retried() -> None:
    log = Log()
    log.apply(batch(2, producer_id=7))
    refused = log.apply(batch(1, producer_id=7, sequence=3))
    assert isinstance(refused, SequenceGapError)
    assert refused.retriable
    assert refused.details == {"sequence": 3, "expected": 2}
    assert log.apply(batch(1, producer_id=7, sequence=2)) == appended(2, 1)
    assert log.apply(batch(1, producer_id=7, sequence=3)) == appended(3, 1)


def test_an_unknown_producer_starts_at_zero() -> None:
    log = Log()
    assert isinstance(log.apply(batch(producer_id=7, sequence=1)), SequenceGapError)
    assert len(log.partition.producers) == 0


def test_a_newer_epoch_fences_the_older() -> None:
    log = Log()
    log.apply(batch(4, producer_id=7, epoch=1))
    assert isinstance(log.apply(batch(1, producer_id=7, epoch=2, sequence=4)), SequenceGapError)
    assert log.apply(batch(1, producer_id=7, epoch=2)) == appended(4, 1)
    refused = log.apply(batch(1, producer_id=7, epoch=1, sequence=4))
    assert isinstance(refused, ProducerFencedError)
    assert not refused.retriable
    assert refused.details == {"epoch": 1, "current": 2}
    # Not even a batch that was written once: its producer must stop.
    assert isinstance(log.apply(batch(4, producer_id=7, epoch=1)), ProducerFencedError)


def test_an_answer_is_forgotten_after_the_window() -> None:
    log = Log(PartitionSettings(dedupe_window=3))
    for sequence in range(5):
        log.apply(batch(producer_id=7, sequence=sequence))
    assert log.apply(batch(producer_id=7, sequence=2)) == appended(2, 1, duplicate=True)
    refused = log.apply(batch(producer_id=7, sequence=1))
    assert isinstance(refused, SequenceExpiredError)
    assert refused.details == {"sequence": 1, "oldest": 2}


@pytest.mark.parametrize(("sequence", "count"), [(0, 4), (2, 2), (1, 5)])
def test_other_batches_than_the_first_time_are_refused_for_good(sequence: int, count: int) -> None:
    log = Log()
    log.apply(batch(3, producer_id=7))
    log.apply(batch(3, producer_id=7, sequence=3))
    refused = log.apply(batch(count, producer_id=7, sequence=sequence))
    assert type(refused) is ProducerError
    assert not refused.retriable


@pytest.mark.parametrize(("sequence", "count"), [(0, 1), (1, 2), (2, 1), (3, 2), (5, 1)])
def test_a_part_of_a_batch_is_answered_where_it_is(sequence: int, count: int) -> None:
    log = Log()
    log.apply(batch(3, producer_id=7))
    log.apply(batch(1))
    log.apply(batch(3, producer_id=7, sequence=3))
    expected = sequence if sequence < 3 else sequence + 1
    assert log.apply(batch(count, producer_id=7, sequence=sequence)) == appended(expected, count, duplicate=True)


def test_the_producer_unused_for_longest_is_forgotten() -> None:
    log = Log(PartitionSettings(max_producers=2))
    log.apply(batch(producer_id=1))
    log.apply(batch(producer_id=2))
    log.apply(batch(producer_id=1, sequence=1))
    log.apply(batch(producer_id=2))  # a duplicate is no use
    log.apply(batch(producer_id=3))
    assert log.partition.producers.get(2) is None
    assert log.apply(batch(producer_id=1)).duplicate
    assert isinstance(log.apply(batch(producer_id=2, sequence=1)), SequenceGapError)
    assert len(list(log.store.scan(PRODUCERS))) == 2


def test_strangers_do_not_make_a_partition_forget_who_wrote_not_long_ago() -> None:
    log = Log()
    log.apply(pass_time_command(HOUR_MS))
    log.apply(batch(2, producer_id=1))
    for stranger in range(2, 1_100):
        log.apply(batch(producer_id=stranger))
    again = log.apply(batch(2, producer_id=1))
    assert again == appended(0, 2, duplicate=True)
    log.apply(pass_time_command(8 * HOUR_MS))
    assert log.apply(batch(2, producer_id=1)).duplicate  # it is idle, but nobody needs its place
    log.apply(batch(producer_id=2_000))
    assert len(log.partition.producers) == 1_024  # those that were idle have gone, the oldest first
    assert isinstance(log.apply(batch(producer_id=1, sequence=2)), SequenceGapError)


def test_a_partition_that_can_remember_no_more_refuses_new_producers_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "MAX_KNOWN", 3)
    log = Log(PartitionSettings(max_producers=1))
    log.apply(pass_time_command(HOUR_MS))
    for known in (1, 2, 3):
        log.apply(batch(producer_id=known))
    end = log.partition.high_watermark
    refused = log.apply(batch(producer_id=4))
    assert isinstance(refused, TooManyProducersError)
    assert refused.retriable
    assert isinstance(log.apply(fence_command(4, 1)), TooManyProducersError)
    admission = Admission(log.partition)
    with pytest.raises(TooManyProducersError):
        admission.admit(batch(producer_id=4))
    assert log.partition.high_watermark == end
    assert log.apply(batch(producer_id=1, sequence=1)) == appended(3, 1)
    assert log.apply(batch(producer_id=2, epoch=1)) == appended(4, 1)
    log.apply(pass_time_command(8 * HOUR_MS))
    assert log.apply(batch(producer_id=4)) == appended(5, 1)
    assert len(log.partition.producers) == 1


def test_the_log_is_told_the_time_before_what_is_stamped_with_it() -> None:
    """A partition that was idle for a week: who writes now is not idle because the clock was."""
    log = Log()
    admission = Admission(log.partition)
    first = admission.tick(HOUR_MS)
    assert first is not None
    assert admission.tick(HOUR_MS) == first  # until it was proposed
    admission.ticked(HOUR_MS)
    assert admission.tick(HOUR_MS + 59_999) is None
    log.apply(first)
    assert admission.tick(HOUR_MS + 59_999) is None
    admission.reset()
    assert admission.tick(HOUR_MS + 59_999) is None  # another leader sees it in the log
    week = admission.tick(169 * HOUR_MS)
    assert week is not None
    log.apply(week)
    log.apply(batch(producer_id=1))
    producer = log.partition.producers.get(1)
    assert producer is not None
    assert producer.used_ms == 169 * HOUR_MS
    assert log.apply(pass_time_command(5)) == TimePassed(169 * HOUR_MS)  # a leader whose clock is behind


def fixed_checkpoint(state: machine._State, version: int) -> bytes:
    """As releases before wrote it: fields at fixed places, without the clock's times or with them."""
    layout = {2: machine._UNTIMED, 3: machine._TIMED}[version]
    numbers = state.start_offset, state.next_offset, state.total_bytes, state.max_timestamp, state.held_at
    parts = state.settings, state.lanes, state.producers, state.groups
    times = (state.first_ms, state.now_ms) if version == 3 else ()
    body = b"".join((layout.pack(0, version, *numbers, *map(len, parts), *times)[4:], *parts))
    return crc32c(body).to_bytes(4, "little") + body


def test_rows_and_checkpoints_of_before_there_was_a_clock_are_read_and_count_from_its_first_time() -> None:
    old = Log()
    old.apply(batch(producer_id=1))
    row = old.store.get(PRODUCERS, (1).to_bytes(8, "big"))
    assert len(row) == 40  # as before: without a clock there is no stamp
    untimed = fixed_checkpoint(machine._decode_state(old.partition.checkpoint()), 2)
    log = Log(PartitionSettings(max_producers=1))
    log.partition.restore(untimed)
    log.partition.settings = PartitionSettings(max_producers=1)
    assert log.partition.clock.now_ms == 0
    log.apply(pass_time_command(100 * HOUR_MS))
    log.apply(batch(producer_id=2))
    assert log.partition.producers.get(1) is not None
    log.apply(pass_time_command(107 * HOUR_MS))
    log.apply(batch(producer_id=3))
    assert log.partition.producers.get(1) is None


def test_fencing_by_command() -> None:
    log = Log()
    log.apply(batch(2, producer_id=7, epoch=1))
    assert log.apply(fence_command(7, 2)) == Fenced(2)
    assert isinstance(log.apply(batch(1, producer_id=7, epoch=1, sequence=2)), ProducerFencedError)
    assert log.apply(batch(1, producer_id=7, epoch=2)) == appended(2, 1)
    assert log.apply(fence_command(7, 2)) == Fenced(2)  # again: nothing is reset
    assert log.apply(batch(1, producer_id=7, epoch=2)).duplicate
    assert isinstance(log.apply(fence_command(7, 1)), ProducerFencedError)
    assert log.apply(fence_command(8, 5)) == Fenced(5)
    assert isinstance(log.apply(batch(1, producer_id=8, epoch=4)), ProducerFencedError)


# -- trimming -----------------------------------------------------------------------


def test_trim_goes_forward_and_not_past_the_end() -> None:
    log = Log()
    for _ in range(4):
        log.apply(batch(2))
    assert log.apply(trim_command(4)) == Trimmed(Offset(4))
    assert log.apply(trim_command(2)) == Trimmed(Offset(4))
    assert log.apply(trim_command(5)) == Trimmed(Offset(5))  # inside a batch: its row stays
    assert [int.from_bytes(key, "big") for key, _ in log.store.scan(OFFSETS)] == [4, 6]
    assert log.partition.locate(4) is None
    assert log.partition.locate(5) == 3
    assert log.apply(trim_command(99)) == Trimmed(Offset(8))
    assert list(log.store.scan(OFFSETS)) == []
    assert log.apply(batch(1)) == appended(8, 1)


def test_first_needed_is_the_entry_of_the_first_readable_batch() -> None:
    log = Log()
    assert log.partition.first_needed() == 1
    log.apply(batch(2))
    log.apply(batch(2))
    assert log.partition.first_needed() == 1
    log.apply(trim_command(3))
    assert log.partition.first_needed() == 2
    log.apply(trim_command(4))
    assert log.partition.first_needed() == 5
    log.apply(commit_command("g", 1, {0: 4}))
    assert log.partition.first_needed() == 6
    log.apply(batch(1))
    log.apply(batch(1))
    assert log.partition.first_needed() == 6


def test_a_large_trim_is_swept_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SWEEP_ROWS", 4)
    log = Log(PartitionSettings(lanes=2))
    for _ in range(11):
        log.apply(batch(1))
    log.apply(trim_command(10))

    def rows(table: Table) -> int:
        return len(list(log.store.scan(table)))

    assert (rows(OFFSETS), rows(LANES)) == (7, 7)
    assert log.partition.locate(9) is None
    log.store.sync()
    log.crash()  # what is left is found again
    log.apply(batch(1))
    assert (rows(OFFSETS), rows(LANES)) == (4, 4)
    log.apply(batch(1))
    assert (rows(OFFSETS), rows(LANES)) == (3, 3)
    assert log.partition.locate(10) == 11


# -- groups ---------------------------------------------------------------------------


def test_commits_are_fenced_by_generation() -> None:
    log = Log(PartitionSettings(lanes=2))
    log.apply(batch(10))
    assert log.apply(commit_command("g", 3, {0: 5}, metadata=b"m")) == committed(3, {0: 5}, b"m")
    refused = log.apply(commit_command("g", 2, {0: 9}))
    assert isinstance(refused, StaleGenerationError)
    assert refused.details == {"generation": 2, "current": 3}
    assert log.partition.groups.get("g") == group(3, {0: 5}, b"m")
    assert log.apply(commit_command("g", 3, {1: 7})) == committed(3, {0: 5, 1: 7})
    assert log.apply(commit_command("g", 4, {})) == committed(4, {0: 5, 1: 7})  # fences, moves nothing
    assert isinstance(log.apply(commit_command("g", 3, {0: 9})), StaleGenerationError)


def test_a_commit_goes_back_only_on_purpose() -> None:
    log = Log()
    log.apply(batch(10))
    log.apply(commit_command("g", 1, {0: 8}))
    assert log.apply(commit_command("g", 1, {0: 3})) == committed(1, {0: 8})
    assert log.apply(commit_command("g", 1, {0: 3}, rewind=True)) == committed(1, {0: 3})


def test_a_wrong_commit_changes_nothing() -> None:
    log = Log()
    log.apply(batch(10))
    log.apply(commit_command("g", 1, {0: 8}))
    past_the_end = log.apply(commit_command("g", 2, {0: 11}))
    assert isinstance(past_the_end, OffsetOutOfRangeError)
    assert past_the_end.details == {"offset": 11, "start": 0, "end": 10}
    assert isinstance(log.apply(commit_command("g", 2, {0: 9, 1: 9})), InvalidInputError)
    assert log.partition.groups.get("g") == group(1, {0: 8})


def test_groups_are_bounded_and_can_be_deleted() -> None:
    log = Log(PartitionSettings(max_groups=2))
    log.apply(commit_command("a", 1, {}))
    log.apply(commit_command("b", 1, {}))
    assert isinstance(log.apply(commit_command("c", 1, {})), InvalidInputError)
    assert log.apply(delete_group_command("a")) == Deleted(True)
    assert log.apply(delete_group_command("a")) == Deleted(False)
    assert log.apply(commit_command("c", 1, {})) == committed(1, {})
    assert list(log.partition.groups) == ["b", "c"]
    assert len(log.partition.groups) == len(list(log.store.scan(GROUPS))) == 2


def test_members_of_a_deleted_group_stay_out() -> None:
    """What they commit afterwards is not where the group's next life begins."""
    log = Log()
    log.apply(batch(10))
    log.apply(commit_command("g", 5, {0: 4}))
    assert log.apply(forget_group_command("g", 5, (5, {0: 4}))) == Deleted(True)
    for again in range(3):
        for generation in (1, 4, 5):
            refused = log.apply(commit_command("g", generation, {0: 9}))
            assert isinstance(refused, StaleGenerationError)
            assert refused.details["current"] == 5
            assert isinstance(log.apply(commit_command("g", generation, {})), StaleGenerationError)
        assert log.partition.position("g") is None
        if again == 0:
            log.store.sync()
            log.crash()
        elif again == 1:
            log = log.twin_from_checkpoint(log.checkpoint())
    assert log.apply(commit_command("g", 0, {0: 1})) == committed(0, {0: 1}), "nobody gives a generation to these"
    for generation in (1, 5):  # known again, but not by its members
        assert isinstance(log.apply(commit_command("g", generation, {0: 9})), StaleGenerationError)
    assert log.apply(commit_command("h", 6, {})) == committed(6, {})
    log.apply(forget_group_command("h", 3))
    assert log.partition.position("h") is not None, "it is at a later generation"
    assert log.apply(forget_group_command("nobody", 9)) == Deleted(False)
    assert log.partition.groups.floor == 9
    assert log.apply(commit_command("h", 6, {0: 2})) == committed(6, {0: 2}), "a group that is known goes on"


def test_what_was_committed_since_is_not_forgotten() -> None:
    log = Log()
    log.apply(batch(10))
    log.apply(commit_command("g", 0, {0: 4}))
    forget = forget_group_command("g", 0, (0, {0: 4}))
    assert log.apply(forget) == Deleted(True)
    log.apply(commit_command("g", 0, {0: 7}))
    assert log.apply(forget) == Deleted(False), "its answer was lost, and it came again"
    assert log.apply(forget_group_command("g", 0, (1, {0: 7}))) == Deleted(False)
    assert log.apply(forget_group_command("g")) == Deleted(True)


# -- settings -------------------------------------------------------------------------


def test_settings_change_by_command_only() -> None:
    log = Log(PartitionSettings(lanes=2, max_producers=3))
    for producer_id in (1, 2, 3):
        log.apply(batch(producer_id=producer_id))
    log.store.sync()
    log.crash()
    assert log.partition.settings == PartitionSettings(lanes=2, max_producers=3)
    assert log.apply(configure_command(PartitionSettings(lanes=3, max_producers=1))) == Configured()
    assert len(log.partition.producers) == 1
    refused = log.apply(configure_command(PartitionSettings(lanes=1)))
    assert isinstance(refused, InvalidInputError)
    assert log.partition.settings == PartitionSettings(lanes=3, max_producers=1)
    log.store.sync()
    log.crash()
    assert log.partition.settings == PartitionSettings(lanes=3, max_producers=1)


@pytest.mark.parametrize("wrong", [{"lanes": 0}, {"lanes": 256}, {"max_producers": 0}, {"dedupe_window": 0}])
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        PartitionSettings(**wrong)
    assert caught.value.details["key"] in wrong


# -- what cannot be read ----------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"\x7f",
        b"\x10",
        trim_command(5) + b"\0",
        commit_command("g", 1, {0: 1})[:-1],
        commit_command("g", 1, {0: 1})[:10],
        commit_command("g", 1, {0: 1}).replace(b"g", b"\xff"),
        delete_group_command("g")[:1],
        delete_group_command("g") + b"\xff",
        forget_group_command("g", 3, (1, {0: 1}))[:-1],
        forget_group_command("g", 3, (1, {0: 1}))[:10],
        forget_group_command("g", 3) + b"x",
        forget_group_command("g", 3).replace(b"g", b"\xff"),
        fence_command(1, 1)[:-1],
        configure_command(PartitionSettings())[:-1],
        configure_command(PartitionSettings()).replace(b"lanes\x01", b"lanes\x00"),
        configure_command(PartitionSettings()).replace(b"lanes", b"roads"),
        b"R",
        b"RQ\x02" + batch()[3:],
    ],
)
def test_a_replica_stops_at_what_it_cannot_read(payload: bytes) -> None:
    """It may be from a newer release. Going on without it would be to diverge."""
    with pytest.raises(UnknownFormatError):
        Log().apply(payload)


@pytest.mark.parametrize("offset", [-1, 2**63, 1.5, "1"])
def test_commands_with_wrong_offsets_are_not_made(offset: int) -> None:
    with pytest.raises(InvalidOffsetError):
        trim_command(offset)
    with pytest.raises(InvalidOffsetError):
        commit_command("g", 1, {0: offset})


@pytest.mark.parametrize(
    "make",
    [
        lambda: commit_command("", 1, {}),
        lambda: commit_command("g" * 256, 1, {}),
        lambda: commit_command("\ud800", 1, {}),
        lambda: commit_command("g", -1, {}),
        lambda: commit_command("g", 1, {256: 1}),
        lambda: commit_command("g", 1, {}, metadata=bytes(4097)),
        lambda: delete_group_command(""),
        lambda: forget_group_command(""),
        lambda: forget_group_command("g", -1),
        lambda: forget_group_command("g", 2**64),
        lambda: forget_group_command("g", 1, (1, {0: -1})),
        lambda: fence_command(-1, 1),
        lambda: fence_command(1, 2**32),
    ],
)
def test_other_wrong_commands_are_not_made(make: Callable[[], bytes]) -> None:
    with pytest.raises(InvalidInputError):
        make()


# -- checkpoints ------------------------------------------------------------------------


def filled() -> Log:
    log = Log(PartitionSettings(lanes=2))
    for number in range(6):
        log.apply(batch(2, producer_id=1 + number % 2, sequence=number // 2 * 2, lane=number % 2, timestamps=number))
    log.apply(commit_command("größe", 4, {0: 3, 1: 5}, metadata=b"meta"))
    log.apply(trim_command(3))
    return log


def test_a_checkpoint_is_the_whole_state() -> None:
    log = filled()
    twin = log.twin_from_checkpoint(log.checkpoint())
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    assert twin.apply(batch(2, producer_id=2, sequence=4)) == appended(10, 2, duplicate=True)
    assert twin.apply(batch(1, producer_id=1, sequence=6)) == appended(12, 1)
    assert twin.partition.groups.get("größe") == group(4, {0: 3, 1: 5}, b"meta")
    assert isinstance(twin.apply(commit_command("größe", 3, {})), StaleGenerationError)


def test_a_replica_from_a_checkpoint_serves_only_what_it_has() -> None:
    log = filled()
    twin = log.twin_from_checkpoint(log.checkpoint())
    assert (twin.partition.start_offset, twin.partition.readable_from) == (3, 12)
    assert twin.partition.first_needed() == len(log.payloads) + 1
    assert twin.partition.locate(5) is None
    log.apply(batch(2))
    twin.catch_up()
    for replica in (twin, twin):
        assert replica.partition.locate(12) == len(log.payloads)
        assert replica.partition.first_needed() == len(log.payloads)
        replica.store.sync()
        replica.crash()  # and it still knows after a restart
    log.apply(trim_command(13))
    twin.catch_up()
    assert twin.partition.readable_from == log.partition.readable_from == 13
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    assert list(twin.store.scan(OFFSETS)) == list(log.store.scan(OFFSETS))


def test_a_damaged_or_unknown_checkpoint_stops_the_replica() -> None:
    state = bytearray(filled().partition.checkpoint())
    state[-1] ^= 1
    with pytest.raises(InvariantBrokenError, match="checksum"):
        Log().partition.restore(bytes(state))
    state = bytearray(filled().partition.checkpoint())
    state[4] = 9
    with pytest.raises(UnknownFormatError, match="version 9, this release reads 2 to 4"):
        Log().partition.restore(sealed(state))


def sealed(state: bytes | bytearray) -> bytes:
    """With the checksum that these bytes have now."""
    return crc32c(bytes(state[4:])).to_bytes(4, "little") + state[4:]


def test_a_checkpoint_may_get_fields() -> None:
    state = filled().partition.checkpoint()
    fields = msgspec.msgpack.decode(state[5:])
    twin = Log().partition
    twin.restore(sealed(state[:5] + msgspec.msgpack.encode(fields[:9])))  # of before the last two
    assert (twin.clock.now_ms, twin.next_offset) == (0, filled().partition.next_offset)
    with pytest.raises(UnknownFormatError, match="newer"):
        Log().partition.restore(sealed(state[:5] + msgspec.msgpack.encode([*fields, "what a newer release added"])))


@pytest.mark.parametrize("version", [2, 3])
def test_checkpoints_of_earlier_releases_are_restored(version: int) -> None:
    log = filled()
    state = log.partition.checkpoint()
    twin = Log().partition
    twin.restore(fixed_checkpoint(machine._decode_state(state), version))
    found, expected = machine._decode_state(twin.checkpoint()), machine._decode_state(state)
    if version == 2:
        expected = msgspec.structs.replace(expected, first_ms=0, now_ms=0)
    assert found == expected


def test_a_table_that_lacks_a_batch_stops_the_replica() -> None:
    log = Log()
    log.apply(batch(2))
    log.apply(batch(2))
    log.store.delete(OFFSETS, (0).to_bytes(8, "big"))
    log.store.sync()
    with pytest.raises(InvariantBrokenError, match="no batch holds offset 0"):
        log.crash()


def test_indexes_need_not_be_dense() -> None:
    """Raft's own entries take indexes and never come here."""
    log = Log()
    assert log.partition.apply(Index(5), batch()) == appended(0, 1)
    assert log.partition.locate(0) == 5
