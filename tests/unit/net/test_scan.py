"""The scan of a range: exactly its batches, from whichever replica, whatever happens to log, leader and follower."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from rayqueue.config import Settings
from rayqueue.errors import (
    CorruptBatchError,
    DataLossError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    UnreadableBatchError,
)
from rayqueue.net.scan import Range, Scan, ScanSettings, fetch
from rayqueue.protocol.calls import Trim
from rayqueue.protocol.data import ANY_LANE, READ_FOLLOWER, Cursor, FetchAnswer, FetchedBatch, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from tests.unit.client.queue_in_memory import MemoryQueue

P0 = TopicPartition("t", 0)
WHOLE = Range("t", 1, 0, 0, 50)
LEADER = ScanSettings(follower=False)
HERE = "10.0.0.7"

Serve = Callable[[FetchRequest], "FetchAnswer | Exception | None"]


@pytest.fixture
def queue() -> MemoryQueue:
    """A partition of ten batches of five records; batch ``n`` is of second ``n``."""
    made = MemoryQueue()
    made.create_topic("t", partitions=1)
    for at in range(10):
        made.append("t", 0, *[b"%d" % (5 * at + row) for row in range(5)], timestamps=1000 * at)
    return made


class Replica:
    """A channel to a replica that answers as it is told: None never comes."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.requests: list[FetchRequest] = []

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        self.requests.append(request)
        answer: asyncio.Future[FetchAnswer] = asyncio.get_running_loop().create_future()
        outcome = self._serve(request)
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        elif outcome is not None:
            answer.set_result(outcome)
        return answer


class Routes:
    """To one partition, with a leader and one follower."""

    def __init__(self, queue: MemoryQueue, follower: Serve | None = None, leader: Serve | None = None) -> None:
        self.truth = queue.partitions[P0].fetch
        self.leads = Replica(leader or self.truth)
        self.follows = Replica(follower or self.truth)
        self.leader_channel: Replica | None = None
        self.hosts: list[str | None] = []
        self.failures: list[Exception] = []

    @property
    def coordinator(self) -> Any:
        raise AssertionError("a scan asks the partition only")

    async def topic(self, name: str, *, refresh: bool = False) -> Any:
        raise AssertionError("a scan asks the partition only")

    async def partition(self, place: TopicPartition, topic_id: int | None = None) -> Routes:
        assert (place, topic_id) == (P0, 1)
        return self

    trouble = ""

    async def leader(self) -> Replica:
        return self.leads

    async def any_replica(self, prefer_host: str | None = None) -> Replica:
        self.hosts.append(prefer_host)
        return self.follows

    async def call(self, call: Any, **_: Any) -> Any:
        raise AssertionError("a scan fetches")

    def failed(self, error: Exception) -> None:
        self.failures.append(error)


def settings(**client: Any) -> Settings:
    return Settings(client={"retry_min_ms": 1, "retry_max_ms": 2, **client})


def bases(routes: Any, wanted: Range = WHOLE, options: ScanSettings = LEADER, **client: Any) -> list[int]:
    """Where the batches begin that a scan finds."""

    async def scan() -> list[int]:
        reading = Scan(routes, wanted, settings(**client), options, host=HERE)
        return [batch.base_offset async for batch in reading.batches()]

    return asyncio.run(scan())


@pytest.mark.parametrize(("start", "end"), [(0, 50), (0, 0), (7, 8), (12, 31), (49, 50)])
@pytest.mark.parametrize("fetch_bytes", [1, 1 << 20])
def test_the_batches_of_a_range(queue: MemoryQueue, start: int, end: int, fetch_bytes: int) -> None:
    found = bases(Routes(queue), Range("t", 1, 0, start, end), ScanSettings(follower=False, fetch_bytes=fetch_bytes))
    first = start - start % 5
    if start == end:
        assert not found
    elif fetch_bytes == 1:
        assert found == list(range(first, end, 5))
    else:  # the answer goes on behind the range
        assert found == list(range(first, 50, 5))


def test_batches_out_of_time_are_left_out(queue: MemoryQueue) -> None:
    wanted = Range("t", 1, 0, 0, 50, min_timestamp_ms=3000, max_timestamp_ms=5000)
    assert bases(Routes(queue), wanted) == [15, 20, 25]


def test_a_batch_whose_header_is_damaged_is_left_to_whoever_decodes_it(queue: MemoryQueue) -> None:
    def damaged(request: FetchRequest) -> FetchAnswer:
        answer = queue.partitions[P0].fetch(request)
        first, *rest = answer.batches
        return answer._replace(batches=[first._replace(payload=memoryview(bytes(len(first.payload)))), *rest])

    wanted = Range("t", 1, 0, 0, 50, min_timestamp_ms=3000, max_timestamp_ms=5000)
    assert bases(Routes(queue, leader=damaged), wanted) == [0, 15, 20, 25]


def test_the_next_answer_is_fetched_while_the_caller_looks_at_one_and_no_more_once_it_is_closed(
    queue: MemoryQueue,
) -> None:
    def first_only(request: FetchRequest) -> FetchAnswer | None:
        return None if request.cursors[0].offset else queue.partitions[P0].fetch(request)

    routes = Routes(queue, leader=first_only)

    async def scan() -> None:
        reading: Any = Scan(routes, WHOLE, settings(), ScanSettings(follower=False, fetch_bytes=1)).batches()
        first = await anext(reading)
        await asyncio.sleep(0.01)
        assert first.base_offset == 0
        assert [request.cursors[0].offset for request in routes.leads.requests] == [0, 5]
        await reading.aclose()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1
        assert len(routes.leads.requests) == 2

    asyncio.run(scan())


# -- retention and other logs ----------------------------------------------------------------


def test_a_range_that_retention_takes_while_it_is_read(queue: MemoryQueue) -> None:
    queue.partitions[P0].call(Trim(before=20))
    with pytest.raises(DataLossError, match="records 0 to 19 of t-0"):
        bases(Routes(queue))
    lenient = ScanSettings(follower=False, fail_on_data_loss=False)
    assert bases(Routes(queue), options=lenient) == list(range(20, 50, 5))


def test_a_range_of_another_log(queue: MemoryQueue) -> None:
    with pytest.raises(DataLossError, match="not the log"):
        bases(Routes(queue), Range("t", 1, 0, 60, 70))


def test_a_leader_that_never_gets_what_was_committed_is_an_error_in_the_end(queue: MemoryQueue) -> None:
    with pytest.raises(OutcomeUnknownError, match="t-0 does not have offset 50 yet"):
        bases(Routes(queue), Range("t", 1, 0, 40, 55), call_timeout_ms=50)


# -- leaders and followers -------------------------------------------------------------------


def test_a_leader_that_is_lost_while_a_range_is_read(queue: MemoryQueue) -> None:
    failures: list[Exception] = [NotLeaderError("not me", leader=None), NotLeaderError("not me", leader=None)]
    routes = Routes(queue, leader=lambda request: failures.pop() if failures else routes.truth(request))
    assert bases(routes) == list(range(0, 50, 5))
    assert len(routes.failures) == 2


def test_the_follower_on_the_callers_host_is_asked(queue: MemoryQueue) -> None:
    routes = Routes(queue)
    assert bases(routes, options=ScanSettings()) == list(range(0, 50, 5))
    assert set(routes.hosts) == {HERE}
    assert not routes.leads.requests
    assert all(request.flags & READ_FOLLOWER for request in routes.follows.requests)


def test_a_follower_that_lags_hands_over_to_the_leader(queue: MemoryQueue) -> None:
    def lags(request: FetchRequest) -> FetchAnswer:
        answer = queue.partitions[P0].fetch(request)
        return answer._replace(batches=[batch for batch in answer.batches if batch.base_offset < 20])

    routes = Routes(queue, follower=lags)
    assert bases(routes, options=ScanSettings()) == list(range(0, 50, 5))
    assert [request.cursors[0].offset for request in routes.leads.requests] == [20]
    assert not routes.failures, "the leader is who it was"


@pytest.mark.slow
@pytest.mark.parametrize("ill", [OutcomeUnknownError("it hung up"), None], ids=["gone", "hung"])
def test_a_follower_that_fails_hands_over_to_the_leader(queue: MemoryQueue, ill: Exception | None) -> None:
    routes = Routes(queue, follower=lambda _: ill)
    assert bases(routes, options=ScanSettings(), call_timeout_ms=1000) == list(range(0, 50, 5))
    assert len(routes.follows.requests) == 1


def test_an_offset_past_the_end_of_a_follower_is_no_data_loss(queue: MemoryQueue) -> None:
    routes = Routes(queue, follower=lambda _: OffsetOutOfRangeError("behind", start=0, end=0))
    assert bases(routes, options=ScanSettings()) == list(range(0, 50, 5))


def test_a_fetch_that_nobody_answers_is_given_up(queue: MemoryQueue) -> None:
    async def ask() -> None:
        routes = Routes(queue, leader=lambda _: None)
        await fetch(routes, FetchRequest((Cursor(ANY_LANE, 0),), 100, 20), patience_ms=30)

    with pytest.raises(OutcomeUnknownError, match="within 50 ms"):
        asyncio.run(ask())


# -- batches that cannot be read ---------------------------------------------------------------


def damaged() -> tuple[FetchedBatch, CorruptBatchError]:
    return FetchedBatch(5, 5, memoryview(b"")), CorruptBatchError("the checksum differs")


def test_an_unreadable_batch_is_raised_with_its_place(queue: MemoryQueue) -> None:
    scan = Scan(Routes(queue), Range("t", 1, 0, 7, 50), settings(), LEADER)
    with pytest.raises(UnreadableBatchError, match=r"t-0 .* from offset 7 to 10: the checksum differs") as told:
        scan.unreadable(*damaged())
    assert told.value.details == {"topic": "t", "partition": 0, "offset": 7, "end": 10}


def test_or_left_out_logged_and_counted(queue: MemoryQueue, caplog: pytest.LogCaptureFixture) -> None:
    scan = Scan(Routes(queue), WHOLE, settings(), ScanSettings(follower=False, on_corrupt="skip"))
    with caplog.at_level(logging.WARNING):
        scan.unreadable(*damaged())
        scan.unreadable(*damaged())
    assert scan.skipped == 2
    assert "t-0 cannot be read from offset 5 to 10" in caplog.messages[0]
    assert "number 2 of this range" in caplog.messages[1]
