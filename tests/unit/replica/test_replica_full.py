"""Replicas whose disks are full: reading and committing go on, records are refused, and nobody's thread spins."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayqueue.errors import DiskFullError, LeadershipLostError, NotLeaderError, OutcomeUnknownError
from rayqueue.partition import PartitionSettings
from rayqueue.protocol import calls
from rayqueue.protocol.data import Appended
from rayqueue.replica.retry import MAX_PAUSE_S, SyncRetry
from rayqueue.testing import wait_for
from tests.unit.net.client_net import GROUP, SEALS, TIMEOUT_S, Cluster, at, batch


def test_a_full_disk_is_tried_ever_more_rarely_and_at_once_again_after_a_success() -> None:
    retry = SyncRetry()
    assert not retry.failing
    now_s, attempts = 100.0, 0
    while now_s < 160:
        retry.failed(now_s)
        attempts += 1
        assert 0 < retry.at_s - now_s < MAX_PAUSE_S + 1e-6
        now_s = retry.at_s
    assert attempts < 70
    retry.succeeded()
    assert not retry.failing
    retry.failed(200.0)
    assert retry.at_s < 200.1


@pytest.mark.slow
def test_the_engines_thread_does_not_spin_on_a_full_disk(tmp_path: Path) -> None:
    """It attempted 59,000 writes per second: its election was due, and nothing could be done about it."""
    cluster = Cluster(tmp_path, 1, raft=QUICK)
    replica = cluster.replica
    cluster.run(append(cluster))  # it leads, and has written so
    attempts, turns, full = [0], [0], [True]
    store: Any = replica._store
    keep, commit, turn = store._keep, store._commit, replica._turn

    def refuse(work: Any) -> Any:
        def attempt(*arguments: Any) -> Any:
            attempts[0] += 1
            if full[0]:
                raise DiskFullError("no space")
            return work(*arguments)

        return attempt

    def counted() -> None:
        turns[0] += 1
        turn()

    store._keep, store._commit, replica._turn = refuse(keep), refuse(commit), counted  # type: ignore[method-assign]
    with pytest.raises((LeadershipLostError, NotLeaderError)):  # the latter if an idle sync has met the full disk first
        cluster.run(append(cluster))
    attempts[0] = turns[0] = 0
    time.sleep(1)
    assert attempts[0] < 25
    assert turns[0] < 100
    full[0] = False
    wait_for(lambda: replica.status.role == "leader", "the disk to be tried again", TIMEOUT_S)
    assert cluster.run(append(cluster)).count == 1
    cluster.close()


async def append(cluster: Cluster) -> Appended:
    channel = await cluster.open()
    try:
        return await channel.append(batch())
    finally:
        channel.close()


QUICK = {"election_timeout_min_ms": 700, "election_timeout_max_ms": 1200}
TIGHT = {
    "map_initial_bytes": 2 << 20,
    "map_growth_bytes": 2 << 20,
    "reserve_bytes": 512 << 10,
    "segment_bytes": 1 << 20,
    "cache_bytes": 0,
}


class Disks:
    """What ``posix_fallocate`` says: how a disk that is full is met first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        allocate = os.posix_fallocate

        def maybe(handle: int, offset: int, length: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(handle, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", maybe)


async def append_until_refused(cluster: Cluster, count: int, values: bytes) -> tuple[int, Exception | None]:
    """How many were acknowledged, and what ended it. Looks for the leader as a client would."""
    acked, deadline_s = 0, time.monotonic() + TIMEOUT_S
    while acked < count and time.monotonic() < deadline_s:
        try:
            channel = await cluster.open(cluster._find_leader() or cluster.leader)
            while acked < count:
                await channel.append(batch(values))
                acked += 1
        except DiskFullError as error:
            return acked, error
        except (NotLeaderError, OutcomeUnknownError):
            continue
        finally:
            channel.close()
    return acked, None


@pytest.mark.slow
def test_full_disks_serve_reads_and_take_positions_and_trims_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three are full, as they are where a topic has filled its nodes evenly."""
    disks = Disks(monkeypatch)
    settings = PartitionSettings(retention_consumed=True)
    cluster = Cluster(tmp_path, 3, raft=QUICK, log=TIGHT, partition=settings)
    value = b"x" * 90_000
    disks.full = True
    acked, refused = cluster.run(append_until_refused(cluster, 1000, value))
    assert isinstance(refused, DiskFullError)
    assert acked > 5

    async def drain() -> None:
        read, deadline_s = 0, time.monotonic() + TIMEOUT_S / 2
        while read < acked:
            assert time.monotonic() < deadline_s, f"{read} of {acked} could be read and committed"
            channel = await cluster.open(cluster._find_leader() or cluster.leader)
            with suppress(NotLeaderError, OutcomeUnknownError):  # it may just have made way for another
                while read < acked:
                    found = await channel.fetch(at(read))
                    read += sum(each.count for each in found.batches)
                    await channel.call(
                        calls.Commit(
                            group="billing", generation=1, offsets={0: read}, seal=SEALS.grant("billing", GROUP, 1)
                        )
                    )
                assert (await channel.call(calls.GetPosition(group="billing"))).offsets == {0: acked}
            channel.close()

    cluster.run(drain())
    assert any(replica.status.read_only for replica in cluster.replicas.values())
    # What every group has read may go; its pages are used again though the disk itself is as full as before.
    more, refused = 0, None
    deadline_s = time.monotonic() + TIMEOUT_S
    while more < 5 and time.monotonic() < deadline_s:
        taken, refused = cluster.run(append_until_refused(cluster, 5 - more, value))
        more += taken
    assert more == 5, refused
    disks.full = False
    acked, refused = cluster.run(append_until_refused(cluster, 60, value))
    assert (acked, refused) == (60, None)
    wait_for(lambda: not any(replica.status.read_only for replica in cluster.replicas.values()), "space", TIMEOUT_S)
    cluster.close()
