"""Answers are bounded in bytes: a caller can take what he is handed, and gets the rest with the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from rayqueue.gateway import sessions
from rayqueue.gateway.rpc.v1 import admin_pb2, queues_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceStub
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub
from rayqueue.gateway.server import Gateway
from rayqueue.records.room import Room
from rayqueue.testing import memory
from tests.unit.gateway.test_rpc import Sent, refused, stub_of

COUNT = 900
BYTES = 6000
MOST_BYTES = 4 * 1024 * 1024
"""What a gRPC client takes unless it is told otherwise."""


@pytest.fixture
def much(rq: memory.MemoryQueue) -> memory.MemoryQueue:
    """More than such an answer holds, and a record that is larger than any should be."""
    rq.create_topic("orders")
    with rq.producer() as producer:
        producer.send_many("orders", [b"%05d" % number + bytes(BYTES) for number in range(COUNT)])
        producer.flush()
    return rq


@pytest.fixture
def records(much: memory.MemoryQueue, gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield stub_of(RecordServiceStub, channel)


def numbers(values: Any) -> list[int]:
    return [int(each[:5]) for each in values]


@pytest.mark.slow
def test_a_poll_answers_what_a_client_takes_and_goes_on(records: Any) -> None:
    session, cursor, got, answers = "", 0, list[int](), 0
    while len(got) < COUNT:
        of: dict[str, Any] = {"session": session, "cursor": cursor} if session else {"group": "g", "topics": ["orders"]}
        answer = records.Poll(pb.PollRequest(max_records=10_000, wait_ms=5000, **of))
        assert answer.ByteSize() < MOST_BYTES * 3 // 4
        session, cursor = answer.session, answer.cursor
        got += numbers(each.value for each in answer.records)
        answers += 1
    assert got == list(range(COUNT))
    assert answers >= 3
    assert records.Ack(pb.AckRequest(session=session, through=cursor)).acknowledged == COUNT


@pytest.mark.slow
def test_an_answer_that_was_lost_comes_again_in_parts(records: Any) -> None:
    first = records.Poll(pb.PollRequest(group="g", topics=["orders"], max_records=10_000, wait_ms=5000))
    of: dict[str, Any] = {"session": first.session, "max_records": 10_000, "wait_ms": 5000}
    records.Poll(pb.PollRequest(cursor=first.cursor, **of))
    again = records.Poll(pb.PollRequest(cursor=0, **of))
    assert again.ByteSize() < MOST_BYTES * 3 // 4
    assert numbers(each.value for each in again.records) == list(range(len(again.records)))
    more = records.Poll(pb.PollRequest(cursor=again.cursor, **of))
    assert more.ByteSize() < MOST_BYTES * 3 // 4
    assert more.records[0].offset == len(again.records)


@pytest.mark.slow
def test_streams_send_what_a_client_takes(records: Any) -> None:
    got: list[int] = []
    for answer in records.Fetch(pb.FetchRequest(topic="orders")):
        assert answer.ByteSize() < MOST_BYTES * 3 // 4
        got += numbers(each.value for each in answer.records)
        if len(got) == COUNT:
            break
    assert got == list(range(COUNT))
    sent = Sent()
    sent.put(join=pb.Join(group="g", topics=["orders"], credit=10_000))
    stream = records.Subscribe(iter(sent))
    got = []
    while len(got) < COUNT:
        answer = next(stream)
        assert answer.ByteSize() < MOST_BYTES * 3 // 4
        got += numbers(each.value for each in answer.records.records)
    assert got == list(range(COUNT))
    sent.end()


@pytest.mark.slow
def test_answers_of_rest_are_bounded_too(much: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    gateway = start(max_answer_bytes=50_000)
    most = 50_000 // (BYTES + 5 + 128)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}/v1", timeout=30) as rest:
        peeked = rest.get("/topics/orders/records", params={"max": 1000, "offset": 7}).json()["records"]
        assert [each["offset"] for each in peeked] == list(range(7, 7 + most))
        tracked = "/topics/orders/consumers/me/records"
        for turn in range(3):  # what does not fit is not passed over
            found = rest.get(tracked, params={"max": 1000, "wait_ms": 5000}).json()["records"]
            assert [each["offset"] for each in found] == list(range(turn * most, turn * most + most))
    alone = start(max_answer_bytes=10)
    with httpx.Client(base_url=f"http://127.0.0.1:{alone.rest_port}/v1", timeout=30) as rest:
        (one,) = rest.get("/topics/orders/records", params={"max": 1000}).json()["records"]
        assert one["offset"] == 0


@pytest.mark.slow
def test_jobs_too(rq: memory.MemoryQueue, gateway: Gateway) -> None:
    name: Any = {"queue": "emails"}
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        jobs = stub_of(QueueServiceStub, channel)
        settings = admin_pb2.TopicSettings(partitions=2, retry_backoff_ms=0)
        jobs.CreateQueue(queues_pb2.CreateQueueRequest(name="emails", settings=settings))
        for first in range(0, COUNT, 300):
            values = [b"%05d" % number + bytes(BYTES) for number in range(first, first + 300)]
            new = [queues_pb2.NewJob(value=each) for each in values]
            jobs.PutJobs(queues_pb2.PutJobsRequest(jobs=new, **name))
        peeked = jobs.PeekJobs(queues_pb2.PeekJobsRequest(max_jobs=1000, **name))
        assert 0 < peeked.ByteSize() < MOST_BYTES * 3 // 4
        got: set[int] = set()
        while len(got) < COUNT:
            answer = jobs.GetJobs(queues_pb2.GetJobsRequest(max_jobs=1000, wait_ms=5000, **name))
            assert 0 < answer.ByteSize() < MOST_BYTES * 3 // 4
            assert {each.deliveries for each in answer.jobs} == {1}
            got |= set(numbers(each.value for each in answer.jobs))
            leases = [each.lease for each in answer.jobs]
            jobs.RejectJobs(queues_pb2.RejectJobsRequest(leases=leases, reason="x", **name))
        dead = jobs.ListDeadJobs(queues_pb2.ListDeadJobsRequest(max_jobs=1000, **name))
        assert 0 < dead.ByteSize() < MOST_BYTES * 3 // 4


@pytest.mark.slow
def test_what_is_not_acknowledged_has_an_end_in_bytes(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept, for an answer that is lost. A stream waits then, and goes on."""
    monkeypatch.setattr(sessions, "MAX_UNACKED_BYTES", 1_000_000)
    last = records.Poll(pb.PollRequest(group="g", topics=["orders"], max_records=100, wait_ms=5000))
    of: dict[str, Any] = {"session": last.session, "max_records": 100, "wait_ms": 5000}
    while last.cursor * (BYTES + 5 + 128) < 1_000_000:
        last = records.Poll(pb.PollRequest(cursor=last.cursor, **of))
    told = refused(records.Poll, pb.PollRequest(cursor=last.cursor, **of))
    assert told == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
    records.Ack(pb.AckRequest(session=last.session, through=last.cursor))
    assert records.Poll(pb.PollRequest(cursor=last.cursor, **of)).records
    records.CloseSession(pb.CloseSessionRequest(session=last.session))
    sent = Sent()
    sent.put(join=pb.Join(group="h", topics=["orders"], credit=10_000))
    got = 0
    for answer in records.Subscribe(iter(sent)):
        got += len(answer.records.records)
        if answer.records.records:
            sent.put(ack=pb.AckRecords(through=answer.records.cursor))
        if got == COUNT:
            break
    sent.end()


def test_a_consumer_takes_no_more_bytes_than_it_is_told(rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders", lanes=2)
    with rq.producer() as producer:
        for size in (100, 100, 5000, 100):
            producer.send("orders", bytes(size), headers=[("h", b"12345678")])
        producer.flush()
    for options in ({}, {"delivery": "at_most_once"}, {"value_deserializer": len}):
        group = f"g{len(options)}{next(iter(options), '')}"
        with rq.consumer("orders", group=group, **options) as consumer:
            counts = [len(consumer.poll(timeout_ms=5000, max_bytes=600)) for _ in range(3)]
            assert counts == [2, 1, 1]
    with rq.consumer("orders") as consumer:
        assert len(consumer.peek("orders", 0, max_bytes=600)) == 2
        assert len(consumer.peek("orders", 0, offset=2, max_bytes=600)) == 1


class Of:
    def __init__(self, size: int) -> None:
        self.value, self.key, self.headers = bytes(size), None, ()


def test_one_that_is_larger_than_all_the_room_goes_alone() -> None:
    assert Room(500).cut([Of(10_000), Of(1)]) == 1
    room = Room(500)
    assert room.cut([Of(100), Of(100), Of(100)]) == 2
    assert room.cut([Of(1)]) == 0
    assert Room(500).cut([]) == 0
