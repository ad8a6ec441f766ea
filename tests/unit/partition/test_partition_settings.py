"""A partition's settings as bytes: in the log, in the store and in checkpoints, for ever."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.errors import ConfigError, UnknownFormatError
from rayqueue.partition import Configured, PartitionSettings, configure_command
from rayqueue.partition.commands import CONFIGURE, Configure, decode
from rayqueue.protocol.topics import TopicSettings
from tests.unit.partition.partition_log import Log, batch

FIXED = {
    PartitionSettings(): "0101000004000020000000e8030000" + 8 * "00" + 16 * "00" + "00" + 24 * "00",
    PartitionSettings(
        lanes=3,
        max_producers=7,
        dedupe_window=9,
        max_groups=11,
        version=13,
        retention_ms=15,
        retention_bytes=17,
        retention_consumed=True,
        max_record_bytes=19,
        max_backlog_bytes=21,
        max_backlog_records=23,
    ): "01030007000000090000000b000000"
    "0d00000000000000"
    "0f000000000000001100000000000000"
    "01"
    "130000000000000015000000000000001700000000000000",
}


@pytest.mark.parametrize(("settings", "encoded"), FIXED.items())
def test_what_was_written_before_they_had_names(settings: PartitionSettings, encoded: str) -> None:
    assert PartitionSettings.decode(bytes.fromhex(encoded)) == settings


def named(**fields: object) -> bytes:
    return b"\x02" + msgspec.msgpack.encode(fields)


def test_golden_bytes() -> None:
    assert PartitionSettings(retention_ms=15).encode() == named(
        lanes=1,
        max_producers=1024,
        dedupe_window=32,
        max_groups=1000,
        version=0,
        retention_ms=15,
        retention_bytes=None,
        retention_consumed=False,
        max_record_bytes=None,
        max_backlog_bytes=None,
        max_backlog_records=None,
    )


def test_a_setting_that_is_missing_has_its_default() -> None:
    assert PartitionSettings.decode(named(lanes=3, version=7)) == PartitionSettings(lanes=3, version=7)


def test_a_setting_of_a_newer_release_is_not_passed_over() -> None:
    """Replicas that apply the log with it and without it would diverge."""
    newer = named(lanes=3, delay_ms=5)
    with pytest.raises(UnknownFormatError, match=r"newer release.*delay_ms.*upgrade"):
        PartitionSettings.decode(newer)
    with pytest.raises(UnknownFormatError, match="delay_ms"):
        decode(bytes((CONFIGURE,)) + newer)


limits = st.none() | st.integers(1, 2**62)


@given(
    st.builds(
        PartitionSettings,
        lanes=st.integers(1, 255),
        version=st.integers(0, 2**62),
        retention_ms=limits,
        retention_bytes=limits,
        retention_consumed=st.booleans(),
        max_record_bytes=limits,
        max_backlog_bytes=limits,
        max_backlog_records=limits,
    )
)
def test_back_and_forth(settings: PartitionSettings) -> None:
    assert PartitionSettings.decode(settings.encode()) == settings
    assert decode(configure_command(settings)) == Configure(settings)


def test_of_a_topic() -> None:
    topic = TopicSettings(lanes=4, retention_ms=5, retention_consumed=True, max_backlog_records=6)
    assert PartitionSettings.of(topic, 9) == PartitionSettings(
        lanes=4,
        version=9,
        retention_ms=5,
        retention_consumed=True,
        max_record_bytes=topic.max_record_bytes,
        max_backlog_records=6,
    )


def test_what_cannot_be_read_or_cannot_be() -> None:
    good = PartitionSettings().encode()
    for wrong in (
        b"",
        b"\x03" + good[1:],
        good[:-1],
        good + b"\0",
        b"\x01" + good[1:],
        named(lanes=0),
        named(lanes="1"),
    ):
        with pytest.raises(UnknownFormatError):
            PartitionSettings.decode(wrong)
    for limit in ({"retention_ms": 0}, {"max_backlog_bytes": -1}, {"max_record_bytes": 2**63}, {"version": -1}):
        with pytest.raises(ConfigError) as caught:
            PartitionSettings(**limit)  # type: ignore[arg-type]
        assert caught.value.details["key"] in limit


def test_they_survive_restarts_and_checkpoints() -> None:
    log = Log()
    settings = PartitionSettings.of(TopicSettings(max_backlog_records=6, retention_consumed=True), 3)
    assert log.apply(configure_command(settings)) == Configured()
    log.apply(batch())
    twin = log.twin_from_checkpoint(log.checkpoint())
    log.store.sync()
    twin.store.sync()
    for replica in (log, twin):
        replica.crash()
        assert replica.partition.settings == settings
