"""A channel with a replica, over a real socket: appends, fetches, calls, and their errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    InvalidOffsetError,
    MembershipError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OversizedBatchError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
    SequenceGapError,
    StaleGenerationError,
    TransportError,
    UnknownGenerationError,
)
from rayqueue.partition import PartitionSettings
from rayqueue.protocol import calls
from rayqueue.protocol.data import READ_FOLLOWER, Appended, Cursor, FetchRequest
from rayqueue.protocol.frames import SLACK_BYTES, Kind
from rayqueue.protocol.seals import Seals
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from tests.unit.net.client_net import GROUP, SEALS, TIMEOUT_S, Cluster, at, batch

Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def make(nodes: int = 1, **named: Any) -> Cluster:
        made.append(Cluster(tmp_path, nodes, **named))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def values_of(payload: memoryview | bytes) -> list[bytes | None]:
    return [record.value for record in RecordBatch.decode(bytes(payload)).records("t", 0)]


async def error_of(answer: asyncio.Future[Any]) -> RayQueueError:
    with pytest.raises(RayQueueError) as raised:
        await answer
    return raised.value


# -- appending ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_appended_is_fetched(make: Make, nodes: int) -> None:
    cluster = make(nodes)

    async def scenario() -> None:
        channel = await cluster.open()
        answers = await asyncio.gather(*(channel.append(batch(b"%d" % number, b"x")) for number in range(50)))
        assert [answer.base_offset for answer in answers] == list(range(0, 100, 2))  # in the order of the calls
        found = await channel.fetch(at(3))
        assert (found.high_watermark, found.start_offset) == (100, 0)
        assert [one.base_offset for one in found.batches] == list(range(2, 100, 2))  # the first one holds the cursor
        assert [values_of(one.payload)[0] for one in found.batches] == [b"%d" % number for number in range(1, 50)]
        channel.close()

    cluster.run(scenario())


def test_payloads_stay_valid_after_later_answers(make: Make) -> None:
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        for letter in (b"a", b"b"):
            await channel.append(batch(letter * 300_000))
        first, second = [await channel.fetch(at(offset, max_bytes=1)) for offset in (0, 1)]
        assert values_of(first.batches[0].payload) == [b"a" * 300_000]
        assert values_of(second.batches[0].payload) == [b"b" * 300_000]

    cluster.run(scenario())


def test_the_leaders_disk_is_enough_if_that_is_wanted(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        channel = await cluster.open()
        assert await channel.append(batch(b"a", b"b"), Kind.APPEND_LEADER) == Appended(None, 2, False)
        assert (await channel.append(batch())).base_offset == 2

    cluster.run(scenario())


def test_the_leader_alone_answers_who_wants_no_more(make: Make) -> None:
    cluster = make(3)
    for node in cluster.followers:
        cluster.replicas[node].close()

    async def scenario() -> None:
        channel = await cluster.open()
        all_of_them = channel.append(batch(b"a"))
        assert (await channel.append(batch(b"b"), Kind.APPEND_LEADER)).base_offset is None
        assert not all_of_them.done()
        channel.close()

    cluster.run(scenario())


def test_what_is_not_acknowledged_is_written_all_the_same(make: Make) -> None:
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        for number in range(10):
            channel.append(batch(b"%d" % number), Kind.APPEND_UNACKED)
        channel.append(b"not a batch", Kind.APPEND_UNACKED)
        assert (await channel.append(batch())).base_offset == 10
        assert channel.unanswered == 0

    cluster.run(scenario())


@pytest.mark.slow
def test_what_nobody_waits_for_and_is_refused_is_counted_and_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    settings = PartitionSettings(max_backlog_records=3)
    cluster = make(partition=settings)

    async def scenario() -> None:
        channel = await cluster.open()
        for number in range(9):
            channel.append(batch(b"%d" % number), Kind.APPEND_UNACKED)
        channel.append(b"not a batch", Kind.APPEND_UNACKED)
        assert isinstance(await error_of(channel.append(batch())), QueueFullError)

    cluster.run(scenario())
    replica = cluster.replicas[cluster.leader]
    assert replica.service.appends.unacked_refused == 7
    lines = [each.getMessage() for each in caplog.records if "acks='none'" in each.getMessage()]
    assert len(lines) == 1, "not a line for each"
    assert "full" in lines[0] or "backlog" in lines[0]

    def told() -> bool:
        now = replica.measures
        return now is not None and now.partition is not None and now.partition.unacked_refused == 7

    wait_for(told, "the figure")


def test_a_repeated_batch_is_answered_as_the_first_time(make: Make) -> None:
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        first = await channel.append(batch(b"a", b"b", producer=7))
        assert await channel.append(batch(b"a", b"b", producer=7)) == Appended(first.base_offset, 2, True)
        assert await channel.append(batch(b"a", b"b", producer=7), Kind.APPEND_LEADER) == Appended(0, 2, True)
        assert type(await error_of(channel.append(batch(producer=7, sequence=9)))) is SequenceGapError

    cluster.run(scenario())


def test_bad_batches_are_refused_with_the_reason(make: Make) -> None:
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        damaged = bytearray(batch(b"value"))
        damaged[-1] ^= 1
        assert type(await error_of(channel.append(bytes(damaged)))) is CorruptBatchError
        for bad in (b"", b"R", b"garbage", batch(lane=3)):
            assert isinstance(await error_of(channel.append(bad)), InvalidInputError)
        assert (await channel.append(batch())).base_offset == 0

    cluster.run(scenario())


# -- fetching -------------------------------------------------------------------------


def test_what_is_too_large_for_a_frame_is_not_sent_and_the_connection_stays(make: Make) -> None:
    """The replica would hang up, on everything else that is under way there."""
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        waits = channel.fetch(at(0, wait_ms=5000))
        most = cluster.settings.log.max_batch_bytes + SLACK_BYTES
        for kind in (Kind.APPEND, Kind.APPEND_LEADER, Kind.APPEND_UNACKED):
            with pytest.raises(OversizedBatchError, match=f"of {most} bytes"):
                await channel.append(b"x" * most, kind)
        with pytest.raises(OversizedBatchError):
            await channel.call(calls.Commit(group="g", generation=1, offsets={}, metadata=b"x" * most))
        assert channel.unanswered == 1
        await channel.append(batch(b"a"))
        assert len((await waits).batches) == 1

    cluster.run(scenario())


def test_a_fetch_waits_for_the_next_batch_and_no_longer(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        channel, other = await cluster.open(), await cluster.open()
        waiting = other.fetch(at(0, wait_ms=10_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await channel.append(batch(b"news"))
        assert [values_of(one.payload) for one in (await waiting).batches] == [[b"news"]]
        began_s = time.monotonic()
        assert (await other.fetch(at(1, wait_ms=60))).batches == []
        assert 0.055 < time.monotonic() - began_s < 5

    cluster.run(scenario())


def test_offsets_that_are_not_there(make: Make) -> None:
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        await channel.append(batch())
        error = await error_of(channel.fetch(at(2, wait_ms=10_000)))
        assert type(error) is OffsetOutOfRangeError
        assert (error.details["start"], error.details["end"]) == (0, 1)
        assert type(await error_of(channel.fetch(at(2**63)))) is InvalidOffsetError
        for cursors in ((), (Cursor(0, 0), Cursor(0, 1)), (Cursor(1, 0),)):
            assert type(await error_of(channel.fetch(FetchRequest(cursors, 1)))) is InvalidInputError
        assert await channel.call(calls.Trim(before=1)) == 1
        await channel.append(batch())
        wait_for(lambda: not cluster.replica._store.dirty, "the trim on disk")
        service = cluster.replica.service
        service.tail.reset(service.tail.end, service.partition.lane_ends())
        assert type(await error_of(channel.fetch(at(0)))) is OffsetOutOfRangeError

    cluster.run(scenario())


def test_what_memory_has_forgotten_comes_from_disk(make: Make) -> None:
    cluster = make(log={"cache_bytes": 10_000})

    async def scenario() -> None:
        channel = await cluster.open()
        for number in range(100):
            await channel.append(batch(b"%03d" % number * 1000))
        wait_for(lambda: cluster.replica.service.tail.start > 0, "memory to forget", TIMEOUT_S)
        values: list[bytes | None] = []
        while len(values) < 100:
            found = await channel.fetch(at(len(values), max_bytes=20_000))
            values += [value for one in found.batches for value in values_of(one.payload)]
        assert values == [b"%03d" % number * 1000 for number in range(100)]

    cluster.run(scenario())


def test_higher_lanes_come_first_and_wake_who_waits_for_them(make: Make) -> None:
    cluster = make(partition=PartitionSettings(lanes=3))

    async def scenario() -> None:
        channel = await cluster.open()
        for lane in (0, 2, 1, 0):
            await channel.append(batch(b"%d" % lane, lane=lane))
        request = FetchRequest((Cursor(0, 0), Cursor(1, 0), Cursor(2, 0)), 1 << 20)
        assert [one.base_offset for one in (await channel.fetch(request)).batches] == [1, 2, 0, 3]
        high = channel.fetch(FetchRequest((Cursor(1, 4), Cursor(2, 4)), 1 << 20, 10_000))
        low = channel.fetch(FetchRequest((Cursor(0, 4),), 1 << 20, 10_000))
        await channel.append(batch(b"low", lane=0))
        assert [one.base_offset for one in (await low).batches] == [4]
        assert not high.done()
        await channel.append(batch(b"high", lane=2))
        assert [one.base_offset for one in (await high).batches] == [5]

    cluster.run(scenario())


# -- calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
def test_calls(make: Make, nodes: int) -> None:
    cluster = make(nodes)

    async def scenario() -> None:
        channel = await cluster.open()
        await channel.append(RecordBatch.encode([b"a", b"b", b"c"], timestamps=[10, 20, 30]))
        assert await channel.call(calls.GetBounds()) == calls.Bounds(0, 3, 3)
        assert await channel.call(calls.GetPosition(group="g")) is None
        position = calls.Position(4, {0: 2}, b"m")
        commit = calls.Commit(group="g", generation=4, offsets={0: 2}, metadata=b"m", seal=SEALS.grant("g", GROUP, 4))
        assert await channel.call(commit) == position
        assert await channel.call(calls.GetPosition(group="g")) == position
        assert type(
            await error_of(
                channel.call(calls.Commit(group="g", generation=3, offsets={}, seal=SEALS.grant("g", GROUP, 3)))
            )
        ) is (StaleGenerationError)
        assert await channel.call(calls.GetLag(group="g")) == calls.Lag(1, {0: 1})
        assert await channel.call(calls.Pin(group="g")) is None
        assert (await channel.call(calls.GetGroups()))["g"].pinned
        assert await channel.call(calls.FindOffset(timestamp_ms=15)) == 1
        assert await channel.call(calls.Trim(before=3)) == 2  # the group is pinned there
        assert not await channel.call(calls.ForgetGroup(group="g", generation=3, seal=SEALS.floor(3)))
        assert await channel.call(calls.ForgetGroup(group="g", generation=4, seal=SEALS.floor(4)))
        assert not await channel.call(calls.ForgetGroup(group="g", generation=4, seal=SEALS.floor(4)))
        status = await channel.call(calls.GetStatus())
        assert (status.replica_id, status.role, status.high_watermark) == (cluster.leader, "leader", 3)
        assert type(await error_of(channel.call(calls.GetTopics()))) is InvalidInputError
        for name in ("", "x" * 300):
            assert type(await error_of(channel.call(calls.Pin(group=name)))) is InvalidInputError

    cluster.run(scenario())


def test_one_round_confirms_all_questions_of_a_turn(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        channel = await cluster.open()
        leadership = cluster.replica.engine._leadership
        assert leadership is not None
        await channel.call(calls.GetBounds())
        before = leadership.round
        await asyncio.gather(*(channel.call(calls.GetPosition(group=f"g{number}")) for number in range(200)))
        assert leadership.round - before < 50

    cluster.run(scenario())


# -- who leads --------------------------------------------------------------------------


def test_a_generation_that_was_not_given_is_refused(make: Make) -> None:
    """Whoever holds a replica's token may say anything. A generation far ahead would silence the group for ever."""
    cluster = make()

    async def scenario() -> None:
        channel = await cluster.open()
        await channel.append(batch(b"value"))
        ours = calls.Commit(group="g", generation=3, offsets={0: 1}, seal=SEALS.grant("g", GROUP, 3))
        await channel.call(ours)
        seals = [b"", b"x", SEALS.grant("g", GROUP, 3), SEALS.grant("g", "other-0.1", 2**40), SEALS.floor(2**40)]
        for seal in (*seals, SEALS.grant("h", GROUP, 2**40), Seals(b"another secret").grant("g", GROUP, 2**40)):
            ahead = calls.Commit(group="g", generation=2**40, offsets={}, seal=seal)
            assert type(await error_of(channel.call(ahead))) is UnknownGenerationError
            over = calls.ForgetGroup(group="g", generation=2**40 + 1, seal=seal)
            assert type(await error_of(channel.call(over))) is UnknownGenerationError
        assert await channel.call(calls.GetPosition(group="g")) == calls.Position(3, {0: 1})
        await channel.call(ours)
        without = calls.Commit(group="lone", generation=0, offsets={0: 1})
        assert (await channel.call(without)).offsets == {0: 1}

    cluster.run(scenario())


def test_a_follower_names_the_leader_and_reads_only_if_told_to(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        leader, follower = await cluster.open(), await cluster.open(cluster.followers[0])
        await leader.append(batch(b"value"))
        refused: list[asyncio.Future[Any]] = [
            follower.append(batch()),
            follower.append(batch(), Kind.APPEND_LEADER),
            follower.fetch(at(0)),
            follower.call(calls.GetBounds()),
            follower.call(calls.Commit(group="g", generation=1, offsets={})),
            follower.call(calls.Trim(before=0)),
        ]
        for answer in refused:
            error = await error_of(answer)
            assert type(error) is NotLeaderError
            assert error.details["leader"] == cluster.leader
        assert (await follower.call(calls.GetStatus())).leader == cluster.leader
        found = await follower.fetch(at(0, wait_ms=10_000, flags=READ_FOLLOWER))
        assert [values_of(one.payload) for one in found.batches] == [[b"value"]]
        waiting = follower.fetch(at(5, wait_ms=100, flags=READ_FOLLOWER))  # it may be behind: no error
        assert (await waiting).batches == []

    cluster.run(scenario())


def test_who_waits_learns_at_once_that_the_leader_leads_no_more(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        channel = await cluster.open()
        waiting = channel.fetch(at(0, wait_ms=15_000))
        reading = channel.fetch(at(0, wait_ms=15_000, flags=READ_FOLLOWER))
        await channel.call(calls.GetStatus())
        cluster.replica.transfer_leadership(cluster.followers[0], lambda _: None)  # type: ignore[arg-type]
        assert type(await error_of(waiting)) is NotLeaderError
        assert not reading.done()
        heir = cluster.replicas[cluster.followers[0]]
        await asyncio.to_thread(wait_for, lambda: heir.status.role == "leader", "the other to lead")
        other = await cluster.open(cluster.followers[0])
        await other.append(batch(b"elsewhere"))
        assert len((await reading).batches) == 1

    cluster.run(scenario())


def test_a_client_lets_another_replica_lead(make: Make) -> None:
    cluster = make(3)
    target = cluster.followers[0]

    async def scenario() -> None:
        channel = await cluster.open()
        with pytest.raises(MembershipError):
            await channel.call(calls.TransferLeader(to="r9"))
        assert await channel.call(calls.TransferLeader(to=cluster.replica.replica_id)) is True  # it does
        assert await channel.call(calls.TransferLeader(to=target)) is False  # it makes way; who leads says so itself
        heir = cluster.replicas[target]
        await asyncio.to_thread(wait_for, lambda: heir.status.role == "leader", "the other to lead")
        other = await cluster.open(target)
        assert await other.call(calls.TransferLeader(to=target)) is True
        with pytest.raises(NotLeaderError):
            await channel.call(calls.TransferLeader(to=target))

    cluster.run(scenario())


def test_closing_answers_who_waits(make: Make) -> None:
    cluster = make(3)

    async def scenario() -> None:
        channel = await cluster.open()
        for node in cluster.followers:
            cluster.replicas[node].close()
        fetching, appending = channel.fetch(at(0, wait_ms=15_000)), channel.append(batch())
        await channel.call(calls.GetStatus())
        await asyncio.to_thread(cluster.replica.close)
        assert type(await error_of(fetching)) is ReplicaClosedError
        assert isinstance(await error_of(appending), OutcomeUnknownError)
        ended = asyncio.Event()
        channel.add_closed_callback(lambda _: ended.set())
        await ended.wait()
        assert type(await error_of(channel.append(batch()))) is ReplicaClosedError
        with pytest.raises(TransportError):
            await cluster.open()

    cluster.run(scenario())
