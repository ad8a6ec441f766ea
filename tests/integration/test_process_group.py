"""A partition as real processes, with real disks and sockets: what is acknowledged survives.

Each test starts its own group. Times are bounded generously, for a busy
machine; the printed ones (``pytest -s``) are what to look at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rayqueue.config import Settings
from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    InvalidOffsetError,
    MembershipError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OversizedBatchError,
    ReplicaClosedError,
    SequenceGapError,
    UnknownFormatError,
)
from rayqueue.ids import ReplicaId
from rayqueue.partition import Fetched
from rayqueue.protocol.calls import GetStatus
from rayqueue.testing import ProcessGroup, wait_for
from tests.integration.history import RECORDS_PER_BATCH, Writer, check_logs, end_of, numbered

KILLS = 5


@contextmanager
def running_group(path: Path, replicas: int = 3, **settings: Any) -> Iterator[ProcessGroup]:
    with ProcessGroup(path, replicas, settings=Settings(**settings)) as group:
        group.leader()
        yield group
        assert group.crashes == []


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with running_group(tmp_path) as group:
        yield group


def followers(group: ProcessGroup) -> list[ReplicaId]:
    leader = group.leader()
    return [node for node in group.running if node != leader]


def read_what_is_left(group: ProcessGroup) -> list[list[Fetched]] | None:
    """Every replica's log from the first offset that all of them still have; None if one was trimmed meanwhile."""
    start = max(group.status(node).start_offset for node in group.replica_ids)
    try:
        return [group.client.read_log(start, via=node) for node in group.replica_ids]
    except OffsetOutOfRangeError:
        return None


def wait_for_records(writer: Writer, more: int, timeout_s: float = 15.0) -> None:
    enough = writer.written + more
    wait_for(lambda: writer.written >= enough, f"{more} more records of writer {writer.producer_id}", timeout_s)


# -- kill -9 ----------------------------------------------------------------------


def test_leader_killed_again_and_again(group: ProcessGroup) -> None:
    outages_s = []
    sequence = count(0, RECORDS_PER_BATCH)
    with Writer(group.client, 1) as writer:
        for _ in range(KILLS):
            wait_for_records(writer, 100)
            leader = group.leader()
            began_s = time.perf_counter()
            group.kill(leader)
            # A second producer, so that no acknowledgement of the old leader can be taken for one of the new.
            group.client.append(numbered(2, next(sequence)))
            outages_s.append(time.perf_counter() - began_s)
            group.restart(leader)
            group.wait_for_offset(end_of(writer.acked[-1]), leader)
    told = ", ".join(f"{outage_s:.3f}" for outage_s in outages_s)
    print(f"\nleader killed to next acknowledged write: {told} s, median {statistics.median(outages_s):.3f} s")
    check_logs(group, writer)
    assert max(outages_s) < 3.0
    assert statistics.median(outages_s) < 1.0


def test_all_killed_at_once(group: ProcessGroup) -> None:
    with Writer(group.client, 1, in_flight=8) as writer:
        wait_for_records(writer, 500)
        group.kill()
        group.restart()
        wait_for_records(writer, 500)
        group.kill()
        group.restart()
        wait_for_records(writer, 500)
    check_logs(group, writer)


def test_restart_resumes_from_disk(group: ProcessGroup) -> None:
    with Writer(group.client, 1) as writer:
        wait_for_records(writer, 500)
    before = check_logs(group, writer)
    batch = numbered(1, writer.written)
    appended = group.client.append(batch)
    group.wait_for_offset(end_of(appended))
    group.restart()
    group.wait_for_offset(end_of(appended))
    after = check_logs(group, writer)
    assert after[:-1] == before
    assert after[-1] == (appended.base_offset, appended.count, batch)
    # The producers' table is on disk as well: the same batch is known, the next one is expected, a later one is not.
    again = group.client.append(batch)
    assert again == (appended.base_offset, appended.count, True)
    with pytest.raises(SequenceGapError):
        group.client.append(numbered(1, writer.written + 10 * RECORDS_PER_BATCH), via=group.leader())
    following = group.client.append(numbered(1, writer.written + RECORDS_PER_BATCH))
    assert following == (appended.base_offset + appended.count, RECORDS_PER_BATCH, False)


def test_follower_killed_disturbs_nobody(group: ProcessGroup) -> None:
    leader, term = group.leader(), group.status(group.leader()).term
    with Writer(group.client, 1) as writer:
        for follower in followers(group):
            group.kill(follower)
            wait_for_records(writer, 200)
            group.restart(follower)
            group.wait_for_offset(end_of(writer.acked[-1]), follower)
    check_logs(group, writer)
    assert (group.leader(), group.status(leader).term) == (leader, term)


# -- SIGSTOP ------------------------------------------------------------------------


def test_paused_leader_is_replaced_and_follows(group: ProcessGroup) -> None:
    with Writer(group.client, 1) as writer:
        wait_for_records(writer, 100)
        paused = group.leader()
        group.client.call(GetStatus(), via=paused)  # so that a connection is there
        group.pause(paused)
        with ThreadPoolExecutor(1) as pool:
            # It reaches the old leader before it can know that it is none any more.
            late = pool.submit(group.client.append, numbered(2, 0), via=paused)
            successor = group.leader()
            assert successor != paused
            wait_for_records(writer, 500)
            group.resume(paused)
            with pytest.raises((NotLeaderError, OutcomeUnknownError)):
                late.result(30)
        with pytest.raises((NotLeaderError, OutcomeUnknownError)):
            group.confirm_leadership(paused)
        group.confirm_leadership(group.leader())
        group.wait_for_offset(end_of(writer.acked[-1]), paused)
    check_logs(group, writer)
    assert group.status(paused).role == "follower"


# -- members ------------------------------------------------------------------------


def test_members_change_under_writes(group: ProcessGroup) -> None:
    with Writer(group.client, 1) as writer:
        wait_for_records(writer, 200)
        old_leader = group.leader()
        leaving = followers(group)[0]
        added = group.add_learner()
        assert group.status(group.leader()).learners == (added,)
        group.promote(added)
        assert group.status(group.leader()).voters == tuple(sorted([*group.replica_ids]))
        group.remove(leaving)
        with pytest.raises(MembershipError):
            group.remove(group.leader())
        group.transfer(added)
        group.remove(old_leader)
        wait_for_records(writer, 200)
        group.restart(added)
        wait_for_records(writer, 200)
    check_logs(group, writer)
    assert len(group.replica_ids) == 2
    for status in group.statuses().values():
        assert (status.voters, status.learners) == (tuple(group.replica_ids), ())


def test_snapshot_for_a_replica_behind_the_log(tmp_path: Path) -> None:
    small = {"max_batch_bytes": 1 << 16, "segment_bytes": 1 << 16, "retention_bytes": 1 << 18, "cache_bytes": 0}
    with running_group(tmp_path, log=small) as group:
        absent = followers(group)[0]
        with Writer(group.client, 1, padding_bytes=2000) as writer:
            wait_for_records(writer, 100)
            group.kill(absent)
            behind = writer.acked[-1].base_offset

            def trimmed() -> bool:
                status = group.status(group.leader())
                return status.start_offset > behind + 500 and status.base_index > behind

            wait_for(trimmed, "the log to be trimmed past what the absent replica has", 30.0)
            group.restart(absent)
            group.wait_for_offset(end_of(writer.acked[-1]), absent)
            wait_for_records(writer, 100)
        end = writer.acked[-1].base_offset + writer.acked[-1].count
        group.wait_for_offset(end)
        status = group.status(absent)
        assert 0 < status.base_index < status.last_index
        with pytest.raises(OffsetOutOfRangeError) as caught:
            group.client.fetch(0, via=absent)
        assert caught.value.details["start"] >= behind
        first, second, third = wait_for(
            lambda: read_what_is_left(group), "logs that are not trimmed while they are read"
        )
        assert first == second == third
        assert first[-1].base_offset + first[-1].count == end
        # It also took over what it never applied: who wrote, and up to which sequence.
        group.transfer(absent)
        repeated = numbered(1, writer.written - RECORDS_PER_BATCH, padding_bytes=2000)
        assert group.client.append(repeated, via=absent) == writer.acked[-1]._replace(duplicate=True)


# -- reading ------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
def test_nobody_reads_past_the_high_watermark(tmp_path: Path, cache_bytes: int) -> None:
    with running_group(tmp_path, 5, log={"cache_bytes": cache_bytes}) as group:
        group.client.append(numbered(1, 0))
        group.wait_for_offset(RECORDS_PER_BATCH)
        leader, (follower, *others) = group.leader(), followers(group)
        with pytest.raises(OffsetOutOfRangeError):
            group.client.fetch(RECORDS_PER_BATCH + 1, via=leader)
        group.client.call(GetStatus(), via=leader)
        for node in others:
            group.pause(node)
        with ThreadPoolExecutor(2) as pool:
            pending = pool.submit(group.client.append, numbered(1, RECORDS_PER_BATCH), via=leader)

            def written_but_not_committed() -> bool:
                status = group.status(follower)
                return status.last_index > status.commit and status.last_index == group.status(leader).last_index

            wait_for(written_but_not_committed, "the batch to be on two disks of five")
            for node in (leader, follower):
                found = group.client.fetch(0, via=node)
                assert [batch.base_offset for batch in found.batches] == [0]
                assert found.high_watermark == RECORDS_PER_BATCH
                assert group.client.fetch(RECORDS_PER_BATCH, via=node).batches == []
            # A follower cannot know that there is nothing: it may be behind.
            assert group.client.fetch(RECORDS_PER_BATCH + 1, via=follower).batches == []
            long_poll = pool.submit(group.client.fetch, RECORDS_PER_BATCH, via=follower, max_wait_ms=10_000)
            for node in others:
                group.resume(node)
            assert not isinstance(pending.exception(15), NotLeaderError)  # it may have lost the leadership meanwhile
            answer = group.client.append(numbered(1, RECORDS_PER_BATCH))
            assert answer.base_offset == RECORDS_PER_BATCH
            assert [batch.base_offset for batch in long_poll.result(15).batches] == [RECORDS_PER_BATCH]


# -- bad input ------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_is_written(group: ProcessGroup) -> None:
    leader, follower = group.leader(), followers(group)[0]
    good = numbered(1, 0)
    group.client.append(good)
    group.wait_for_offset(RECORDS_PER_BATCH)
    before = {node: group.status(node).last_index for node in group.replica_ids}

    flipped = bytearray(good)
    flipped[-1] ^= 1
    oversized = numbered(1, RECORDS_PER_BATCH, count=500, padding_bytes=2120)  # and less than a frame
    refused: list[tuple[bytes, type[Exception]]] = [
        (oversized, OversizedBatchError),
        (bytes(flipped), CorruptBatchError),
        (good[:-1], CorruptBatchError),
        (good + b"\0", CorruptBatchError),
        (b"XQ" + good[2:], UnknownFormatError),
        (good[:2] + b"\xff" + good[3:], UnknownFormatError),
        (b"", UnknownFormatError),
        (numbered(1, 2 * RECORDS_PER_BATCH), SequenceGapError),
    ]
    for batch, error in refused:
        with pytest.raises(error):
            group.client.append(batch, via=leader)
    with pytest.raises(NotLeaderError) as caught:
        group.client.append(numbered(1, RECORDS_PER_BATCH), via=follower)
    assert caught.value.details["leader"] == leader
    for node in group.replica_ids:
        with pytest.raises(InvalidOffsetError):
            group.client.fetch(2**63, via=node)
        with pytest.raises(InvalidInputError):
            group.client.fetch(-1, via=node)
        with pytest.raises(InvalidInputError):
            group.client.fetch(0, via=node, lane=254)
        assert group.client.fetch(RECORDS_PER_BATCH, via=node).batches == []
    with pytest.raises(OffsetOutOfRangeError):
        group.client.fetch(RECORDS_PER_BATCH + 1)
    assert {node: group.status(node).last_index for node in group.replica_ids} == before
    assert group.client.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH


def test_closed_replica_says_so(group: ProcessGroup) -> None:
    closed = group.leader()
    group.client.append(numbered(1, 0))
    group.close_replica(closed)
    for _ in range(2):
        with pytest.raises((ReplicaClosedError, OutcomeUnknownError)):
            group.client.append(numbered(1, RECORDS_PER_BATCH), via=closed)
        with pytest.raises((ReplicaClosedError, OutcomeUnknownError)):
            group.client.fetch(0, via=closed)
        with pytest.raises(ReplicaClosedError):
            group.confirm_leadership(closed)
    assert group.client.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH
    group.restart(closed)
    group.wait_for_offset(2 * RECORDS_PER_BATCH)
    assert [batch.base_offset for batch in group.client.read_log(via=closed)] == [0, RECORDS_PER_BATCH]
