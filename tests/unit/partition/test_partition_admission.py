"""Admission: batches that the leader refuses before anything is written."""

from __future__ import annotations

import pytest

from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    OversizedBatchError,
    ProducerError,
    ProducerFencedError,
    SequenceExpiredError,
    SequenceGapError,
    UnknownFormatError,
)
from rayqueue.partition import Admission, AdmissionLimits, Appended, PartitionSettings, fence_command
from tests.unit.partition.partition_log import Log, appended, batch


class Leader(Log):
    def __init__(self, settings: PartitionSettings | None = None, limits: AdmissionLimits | None = None) -> None:
        super().__init__(settings)
        self.admission = Admission(self.partition, limits)

    def propose(self, payload: bytes) -> Appended | None:
        return self.admission.admit(payload)


def test_bad_bytes() -> None:
    leader = Leader(limits=AdmissionLimits(max_batch_bytes=1000))
    good = batch()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for wrong, error in [
        (b"", UnknownFormatError),
        (b"\x10" + good, UnknownFormatError),
        (b"RQ\x09" + good[3:], UnknownFormatError),
        (bytes(flipped), CorruptBatchError),
        (good[:-1], CorruptBatchError),
        (batch(200), OversizedBatchError),
        (batch(lane=1), InvalidInputError),
        (batch(control=True), InvalidInputError),
    ]:
        with pytest.raises(error):
            leader.propose(wrong)
    assert leader.propose(good) is None


def test_timestamps_far_in_the_future() -> None:
    leader = Leader(limits=AdmissionLimits(max_ahead_ms=500))
    assert leader.admission.admit(batch(timestamps=1500), now_ms=1000) is None
    assert leader.admission.admit(batch(timestamps=9999)) is None
    with pytest.raises(InvalidInputError, match="501 ms ahead"):
        leader.admission.admit(batch(timestamps=1501), now_ms=1000)


def test_batches_in_flight_follow_each_other() -> None:
    leader = Leader()
    assert leader.propose(batch(2, producer_id=7)) is None
    assert leader.propose(batch(3, producer_id=7, sequence=2)) is None
    with pytest.raises(SequenceGapError):
        leader.propose(batch(1, producer_id=7, sequence=6))
    with pytest.raises(SequenceGapError):
        leader.propose(batch(1, producer_id=8, sequence=1))
    assert leader.propose(batch(1, producer_id=7, sequence=5)) is None


def test_a_repeated_batch_is_proposed_while_pending_and_answered_once_applied() -> None:
    leader = Leader()
    first, second = batch(2, producer_id=7), batch(1, producer_id=7, sequence=2)
    for payload in (first, second, first, second):
        assert leader.propose(payload) is None
    answers = [leader.apply(payload) for payload in (first, second, first, second)]
    assert answers == [appended(0, 2), appended(2, 1), appended(0, 2, duplicate=True), appended(2, 1, duplicate=True)]
    assert leader.propose(second) == appended(2, 1, duplicate=True)


def test_a_newer_epoch_fences_as_soon_as_it_is_proposed() -> None:
    leader = Leader()
    leader.apply(batch(2, producer_id=7, epoch=1))
    assert leader.propose(batch(1, producer_id=7, epoch=2)) is None
    assert leader.propose(batch(1, producer_id=7, epoch=2, sequence=1)) is None
    with pytest.raises(ProducerFencedError):
        leader.propose(batch(1, producer_id=7, epoch=1, sequence=2))
    with pytest.raises(SequenceGapError):
        leader.propose(batch(1, producer_id=7, epoch=3, sequence=2))


def test_what_is_applied_counts_too() -> None:
    leader = Leader(PartitionSettings(dedupe_window=1))
    leader.apply(batch(2, producer_id=7))
    leader.apply(batch(2, producer_id=7, sequence=2))
    with pytest.raises(SequenceExpiredError):
        leader.propose(batch(2, producer_id=7))
    with pytest.raises(ProducerError):
        leader.propose(batch(3, producer_id=7, sequence=2))
    leader.apply(fence_command(7, 5))
    with pytest.raises(ProducerFencedError):
        leader.propose(batch(1, producer_id=7, sequence=4))
    assert leader.propose(batch(1, producer_id=7, epoch=5)) is None


def test_another_leadership_starts_from_what_is_applied() -> None:
    leader = Leader()
    leader.propose(batch(2, producer_id=7))
    leader.admission.reset()
    with pytest.raises(SequenceGapError):
        leader.propose(batch(1, producer_id=7, sequence=2))
    assert leader.propose(batch(2, producer_id=7)) is None


def test_what_it_remembers_is_bounded() -> None:
    leader = Leader(PartitionSettings(max_producers=10))
    for producer_id in range(1, 100):
        leader.propose(batch(producer_id=producer_id))
    assert len(leader.admission._proposed) == 10


def test_a_batch_that_was_admitted_but_not_proposed_does_no_harm() -> None:
    leader = Leader()
    leader.propose(batch(2, producer_id=7))  # and then the queue was full
    follower = batch(1, producer_id=7, sequence=2)
    assert leader.propose(follower) is None
    assert isinstance(leader.apply(follower), SequenceGapError)
    assert leader.propose(batch(2, producer_id=7)) is None
    assert leader.apply(batch(2, producer_id=7)) == appended(0, 2)
