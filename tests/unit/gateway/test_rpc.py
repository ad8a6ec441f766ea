"""gRPC over real sockets: every method's contract, on a queue in memory."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from rayqueue.errors import LeadershipLostError
from rayqueue.gateway.audit import TOPIC as AUDIT
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.principals import KINDS
from rayqueue.gateway.rpc.serving import SERVICES
from rayqueue.gateway.rpc.v1 import admin_pb2, common_pb2, queues_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.admin_pb2_grpc import AdminServiceStub
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceStub
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub
from rayqueue.gateway.server import Gateway
from rayqueue.gateway.sessions import Session
from rayqueue.testing import memory, wait_for

STREAMS = [method for service in SERVICES for method in service.methods if method.server_streaming]
ROOT = Path(__file__).resolve().parents[3]


def stub_of(kind: Any, channel: grpc.Channel) -> Any:
    return kind(channel)


@pytest.fixture
def channel(gateway: Gateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as made:
        yield made


@pytest.fixture
def records(channel: grpc.Channel) -> Any:
    return stub_of(RecordServiceStub, channel)


@pytest.fixture
def admin(channel: grpc.Channel) -> Any:
    return stub_of(AdminServiceStub, channel)


def new(*values: bytes, **fields: Any) -> list[common_pb2.NewRecord]:
    return [common_pb2.NewRecord(value=value, **fields) for value in values]


def reason(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Its code, and ours."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "rayqueue"
    return error.code(), info.reason


def refused(call: Callable[..., Any], *arguments: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as told:
        call(*arguments)
    return reason(told.value)


class Sent:
    """A request stream that a test feeds."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Any] = queue.Queue()

    def put(self, **message: Any) -> None:
        self._waiting.put(pb.SubscribeRequest(**message))

    def end(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting.get, None)


def test_the_stubs_are_what_the_protos_say() -> None:
    loader = importlib.machinery.SourceFileLoader("protos", str(ROOT / "scripts" / "protos"))
    spec = importlib.util.spec_from_loader("protos", loader)
    assert spec is not None
    protos = importlib.util.module_from_spec(spec)
    loader.exec_module(protos)
    assert protos.stale() == [], "run scripts/protos"


@pytest.mark.slow
def test_a_simple_client_needs_append_poll_and_ack(records: Any, admin: Any) -> None:
    made = admin.CreateTopic(
        admin_pb2.CreateTopicRequest(name="orders", settings=admin_pb2.TopicSettings(partitions=2, lanes=2))
    )
    assert (made.topic.partitions, made.topic.settings.lanes) == (2, 2)
    sent = [*new(b"a", b"b", key=b"k"), *new(b"c", partition=1, priority=1, timestamp_ms=5), common_pb2.NewRecord()]
    sent[0].headers.add(name="h", value=b"\xff")
    answer = records.Append(pb.AppendRequest(topic="orders", records=sent))
    assert len(answer.records) == 4
    polled = records.Poll(pb.PollRequest(group="g", topics=["orders"], max_records=10, wait_ms=1000))
    found = list(polled.records)
    while len(found) < 4:
        found += records.Poll(pb.PollRequest(session=polled.session, wait_ms=1000)).records
    assert sorted(each.value for each in found) == [b"", b"a", b"b", b"c"]
    (first,) = (each for each in found if each.value == b"a")
    assert (first.key, first.headers[0].name, first.headers[0].value) == (b"k", "h", b"\xff")
    (empty,) = (each for each in found if not each.value)
    assert not empty.HasField("value")
    places = [common_pb2.Place(topic=e.topic, partition=e.partition, offset=e.offset, lane=e.lane) for e in found]
    acked = records.Ack(pb.AckRequest(session=polled.session, places=places[:1]))
    assert acked.acknowledged == 1
    assert records.Ack(pb.AckRequest(session=polled.session, places=places[1:])).acknowledged == 3
    described = admin.DescribeGroup(admin_pb2.DescribeGroupRequest(group="g"))
    assert (described.lag, described.group.state) == (0, "stable")
    records.CloseSession(pb.CloseSessionRequest(session=polled.session))
    gone = refused(lambda: records.Poll(pb.PollRequest(session=polled.session)))
    assert gone == (grpc.StatusCode.FAILED_PRECONDITION, "session_gone")


def test_errors_have_our_codes_and_when_to_come_again(records: Any, admin: Any) -> None:
    code = grpc.StatusCode
    unknown = refused(lambda: records.Append(pb.AppendRequest(topic="none", records=new(b"x"))))
    assert unknown == (code.NOT_FOUND, "unknown_topic")
    empty = refused(lambda: records.Append(pb.AppendRequest(topic="none")))
    assert empty == (code.INVALID_ARGUMENT, "invalid_input")
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    again = refused(lambda: admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders")))
    assert again == (code.ALREADY_EXISTS, "topic_exists")
    names = refused(lambda: admin.CreateTopic(admin_pb2.CreateTopicRequest(name="\x00")))
    assert names == (code.INVALID_ARGUMENT, "invalid_input")
    reset = refused(lambda: admin.ResetGroup(admin_pb2.ResetGroupRequest(group="g")))
    assert reset == (code.INVALID_ARGUMENT, "invalid_input")


def test_an_idempotency_key_writes_once(records: Any, admin: Any, rq: memory.MemoryQueue) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    request = pb.AppendRequest(topic="orders", records=new(b"x"), idempotency_key="k")
    first, second = records.Append(request), records.Append(request)
    assert (first.replayed, second.replayed) == (False, True)
    assert first.records[0].offset == second.records[0].offset
    assert rq.topic("orders").records == 1
    other = pb.AppendRequest(topic="orders", records=new(b"y"), idempotency_key="k")
    assert refused(lambda: records.Append(other))[1] == "request_conflict"


def test_a_stream_of_batches_is_answered_batch_by_batch(records: Any, admin: Any, rq: memory.MemoryQueue) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))

    def requests() -> Iterator[pb.ProduceRequest]:
        yield pb.ProduceRequest(number=1, topic="orders", records=new(b"a", b"b"))
        yield pb.ProduceRequest(number=2, topic="none", records=new(b"x"))
        for number in range(3, 50):
            yield pb.ProduceRequest(number=number, topic="orders", records=new(b"%d" % number))

    answers = {each.number: each for each in records.Produce(requests())}
    assert sorted(answers) == list(range(1, 50))
    assert answers[2].problem.code == "unknown_topic"
    assert [len(answers[number].records) for number in (1, 3)] == [2, 1]
    offsets = [answers[number].records[0].offset for number in range(3, 50)]
    assert offsets == sorted(offsets)
    assert rq.topic("orders").records == 49


@pytest.mark.slow
def test_a_stream_of_too_much_is_slowed_down_and_not_ended(
    rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    rq.create_topic("orders")
    for limit in ({"requests_per_s": 20}, {"bytes_per_s": 20_000}):
        gateway = start(**limit)
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            batches = [pb.ProduceRequest(number=each, topic="orders", records=new(bytes(1000))) for each in range(50)]
            began_s = time.monotonic()
            answers = list(stub_of(RecordServiceStub, channel).Produce(iter(batches)))
        assert sorted(each.number for each in answers) == list(range(50))
        assert not any(each.problem.code for each in answers)
        assert time.monotonic() - began_s > 1.0
    assert rq.topic("orders").records == 100


def test_a_text_that_repeats_what_was_sent_has_an_end(records: Any, admin: Any) -> None:
    """A status is a header, and clients take 8 KiB of those."""
    for letter in ("a", "ü", "\n", "€"):
        name = letter * 20_000
        told = refused(admin.CreateTopic, admin_pb2.CreateTopicRequest(name=name))
        assert told == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_input")
        fetching = records.Fetch(pb.FetchRequest(topic=name))
        assert refused(lambda stream=fetching: next(stream))[1] == "invalid_input"


@pytest.mark.slow
def test_a_caller_who_leaves_while_he_is_written_to_is_no_failure(
    gateway: Gateway, rq: memory.MemoryQueue, caplog: pytest.LogCaptureFixture
) -> None:
    rq.create_topic("orders")
    with rq.producer() as producer:
        producer.send_many("orders", [bytes(6000)] * 2000)
        producer.flush()
    for _ in range(15):
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            next(stub_of(RecordServiceStub, channel).Fetch(pb.FetchRequest(topic="orders")))
    wait_for(lambda: not gateway.limits.streams._held, "all to be gone")
    assert "has failed" not in caplog.text


def test_fetch_reads_from_a_place_on_and_goes_on(records: Any, admin: Any) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    records.Append(pb.AppendRequest(topic="orders", records=new(b"0", b"1", b"2")))
    stream = records.Fetch(pb.FetchRequest(topic="orders", partition=0, offset=1))
    found: list[bytes] = []
    for answer in stream:
        found += [each.value for each in answer.records]
        if found == [b"1", b"2"]:
            records.Append(pb.AppendRequest(topic="orders", records=new(b"3")))
        if len(found) == 3:
            break
    stream.cancel()
    assert found == [b"1", b"2", b"3"]


def test_a_subscription_sends_what_there_is_credit_for(records: Any, admin: Any, rq: memory.MemoryQueue) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    records.Append(pb.AppendRequest(topic="orders", records=new(*(b"%d" % number for number in range(10)))))
    sent = Sent()
    sent.put(join=pb.Join(group="g", topics=["orders"], credit=3))
    answers = records.Subscribe(iter(sent))
    assert next(answers).joined.group == "g"
    first = next(answers).records
    got = list(first.records)
    assert (len(got), first.cursor) == (3, 3)
    sent.put(ack=pb.AckRecords(number=7, through=first.cursor))
    acked = next(answers).acked
    assert (acked.number, acked.acknowledged) == (7, 3)
    sent.put(heartbeat=pb.Heartbeat())
    sent.put(credit=pb.Credit(records=100))
    while len(got) < 10:
        got += next(answers).records.records
    assert [each.value for each in got] == [b"%d" % number for number in range(10)]
    sent.put(ack=pb.AckRecords(number=8, places=[common_pb2.Place(topic="orders", partition=0, offset=0)]))
    assert next(answers).acked.problem.code == "invalid_input"
    sent.end()
    assert list(answers) == []
    wait_for(lambda: not rq.group("g").members, "the member to leave")
    assert rq.group("g").lag == 7


@pytest.mark.slow
def test_a_subscription_whose_caller_is_silent_or_gone_leaves_its_group(
    records: Any, admin: Any, rq: memory.MemoryQueue
) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    silent, gone = Sent(), Sent()
    silent.put(join=pb.Join(group="g", topics=["orders"], credit=3, timeout_ms=1000))
    gone.put(join=pb.Join(group="g", topics=["orders"], credit=3))
    first, second = records.Subscribe(iter(silent)), records.Subscribe(iter(gone))
    next(first)
    next(second)
    wait_for(lambda: any(each.members for each in rq.groups()), "a member", 30)
    second.cancel()
    assert refused(lambda: next(first)) == (grpc.StatusCode.FAILED_PRECONDITION, "session_gone")
    wait_for(lambda: not any(each.members for each in rq.groups()), "both to leave", 30)
    silent.end()
    gone.end()


def test_a_first_poll_that_fails_leaves_no_session_behind(
    records: Any, admin: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    of = {"group": "g", "topics": ["orders"]}
    for wrong in ({"max_records": 20_000}, {"wait_ms": 10**6}, {"cursor": 1}, {"isolation": 7}):
        told = refused(records.Poll, pb.PollRequest(**of, **wrong))  # type: ignore[arg-type]
        assert told == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_input")
    assert len(gateway._sessions) == 0

    async def fails(*_: Any, **__: Any) -> Any:
        raise LeadershipLostError("the leader has just gone")

    with monkeypatch.context() as broken:
        broken.setattr(Session, "read", fails)
        refused(records.Poll, pb.PollRequest(**of))  # type: ignore[arg-type]
    assert len(gateway._sessions) == 0

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as broken:
        broken.setattr(Session, "read", never)
        with pytest.raises(grpc.RpcError):
            records.Poll(pb.PollRequest(**of), timeout=0.5)  # type: ignore[arg-type]
    wait_for(lambda: len(gateway._sessions) == 0, "the session to be closed", 10)


@pytest.mark.slow
def test_a_deadline_shorter_than_the_first_wait_gets_the_session(
    records: Any, admin: Any, gateway: Gateway, rq: memory.MemoryQueue
) -> None:
    """Else each attempt would leave one behind that keeps the partitions."""
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    first = records.Poll(pb.PollRequest(group="g", topics=["orders"], wait_ms=20_000), timeout=2.0)
    assert first.session
    assert not first.records
    records.Append(pb.AppendRequest(topic="orders", records=new(b"1")))
    later = records.Poll(pb.PollRequest(session=first.session, wait_ms=5000), timeout=10)
    assert [each.value for each in later.records] == [b"1"]


@pytest.mark.slow
def test_a_deadline_and_a_cancellation_end_a_call(records: Any, admin: Any, gateway: Gateway) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders"))
    session = records.Poll(pb.PollRequest(group="g", topics=["orders"])).session
    with pytest.raises(grpc.RpcError) as told:
        records.Poll(pb.PollRequest(session=session, wait_ms=20_000), timeout=1.0)
    records.CloseSession(pb.CloseSessionRequest(session=session))
    assert told.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stream = records.Fetch(pb.FetchRequest(topic="orders"))
    threading.Timer(0.2, stream.cancel).start()
    with pytest.raises(grpc.RpcError) as told:
        list(stream)
    assert told.value.code() == grpc.StatusCode.CANCELLED
    wait_for(lambda: not gateway.limits.streams._held, "the stream's place to be free")


def test_admin_says_what_rest_says(admin: Any, records: Any) -> None:
    admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders", settings=admin_pb2.TopicSettings(retention_ms=9000)))
    records.Append(pb.AppendRequest(topic="orders", records=new(b"x")))
    assert [each.name for each in admin.ListTopics(admin_pb2.ListTopicsRequest()).topics] == ["orders"]
    altered = admin.AlterTopic(
        admin_pb2.AlterTopicRequest(
            name="orders", settings=admin_pb2.TopicSettings(partitions=2), clear=["retention_ms"]
        )
    )
    assert (altered.topic.partitions, altered.topic.settings.HasField("retention_ms")) == (2, False)
    found = admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name="orders"))
    assert (found.records, len(found.partitions), len(found.partitions[0].replicas)) == (1, 2, 3)
    polled = records.Poll(pb.PollRequest(group="g", topics=["orders"], wait_ms=2000))
    records.Ack(pb.AckRequest(session=polled.session, through=polled.cursor))
    records.CloseSession(pb.CloseSessionRequest(session=polled.session))
    request = admin_pb2.ResetGroupRequest(group="g", to_earliest=True, topic="orders", dry_run=True)
    assert admin.ResetGroup(request).positions[0].after == {0: 0}
    assert [each.group for each in admin.ListGroups(admin_pb2.ListGroupsRequest()).groups] == ["g"]
    admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="g"))
    assert len(admin.DescribeCluster(admin_pb2.DescribeClusterRequest()).brokers) == 3
    admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="orders"))
    assert not admin.ListTopics(admin_pb2.ListTopicsRequest()).topics


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "rayqueue.v1.RecordService"):
        told = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert told.status == health_pb2.HealthCheckResponse.SERVING
    names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {each.full_name for each in SERVICES} <= set(names)


@pytest.mark.slow
def test_each_stream_takes_one_place_and_a_session_one(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    rq.create_topic("orders")
    rq.create_topic("emails", queue=True)
    token, key = KeyStore(rq).create("all", ["*:*:*"])
    gateway = start(max_streams_per_caller=4)
    metadata = [("authorization", f"Bearer {token.text}")]
    sent, produced, worked = Sent(), Sent(), Sent()
    sent.put(join=pb.Join(group="h", topics=["orders"], credit=3))
    worked._waiting.put(queues_pb2.StreamJobsRequest(open=queues_pb2.OpenJobs(queue="emails", credit=1)))
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        records, jobs = stub_of(RecordServiceStub, channel), stub_of(QueueServiceStub, channel)
        streams = [
            records.Fetch(pb.FetchRequest(topic="orders"), metadata=metadata),
            records.Subscribe(iter(sent), metadata=metadata),
            records.Produce(iter(produced), metadata=metadata),
            jobs.StreamJobs(iter(worked), metadata=metadata),
        ]
        assert {each.name for each in STREAMS} == {"Fetch", "Subscribe", "Produce", "StreamJobs"}
        wait_for(lambda: gateway.limits.streams._held == {key.key_id: 4}, "a place for each")
        assert not any(each.done() for each in streams)
        again = records.Fetch(pb.FetchRequest(topic="orders"), metadata=metadata)
        assert refused(lambda: next(again)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        for each in streams:
            each.cancel()
        wait_for(lambda: not gateway.limits.streams._held, "all to be free")
    for each in (sent, produced, worked):
        each.end()


@pytest.mark.slow
def test_streams_that_need_no_key_are_counted_and_end_when_nothing_is_said(start: Callable[..., Gateway]) -> None:
    gateway = start(idle_timeout_ms=1500, slow_timeout_ms=1500, max_streams_per_caller=3)
    asked: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        asked.put(reflection_pb2.ServerReflectionRequest(list_services=""))
        told = reflection.ServerReflectionInfo(iter(asked.get, None))
        assert next(told).list_services_response.service
        assert all(next(each).status == health_pb2.HealthCheckResponse.SERVING for each in watches)
        more = health.Watch(health_pb2.HealthCheckRequest())
        assert refused(lambda: next(more)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        for each in (*watches, told):
            assert refused(lambda stream=each: next(stream)) == (grpc.StatusCode.FAILED_PRECONDITION, "session_gone")
        assert not gateway.limits.streams._held
    asked.put(None)


@pytest.mark.slow
def test_who_begins_a_call_and_sends_no_message_is_hung_up_on(start: Callable[..., Gateway]) -> None:
    gateway = start(slow_timeout_ms=500)
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(30)
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        # As a stream, so that the client lets the message wait; on the wire it is the same call.
        call: Any = channel.stream_unary("/rayqueue.v1.AdminService/ListTopics")
        assert refused(call, nothing())[0] == grpc.StatusCode.INVALID_ARGUMENT
        silent.set()
        assert refused(call, iter(()))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert call(iter([b""])) == b""
    wait_for(lambda: not gateway.limits.calls._held, "no call to be held")


def test_one_address_has_so_many_calls_under_way(start: Callable[..., Gateway], rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders")
    gateway = start(max_connections_per_source=3)
    with ExitStack() as open_channels:
        channels = [
            open_channels.enter_context(
                grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(3)
        ]
        streams = [stub_of(RecordServiceStub, each).Fetch(pb.FetchRequest(topic="orders")) for each in channels]
        wait_for(lambda: gateway.limits.calls._held.get("127.0.0.1") == 3, "three calls")
        listing = pb.AppendRequest(topic="orders", records=new(b"x"))
        told = refused(stub_of(RecordServiceStub, channels[0]).Append, listing)
        assert told == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        streams[0].cancel()
        wait_for(lambda: gateway.limits.calls._held.get("127.0.0.1") == 2, "one call less")
        assert stub_of(RecordServiceStub, channels[0]).Append(listing).records
        for each in streams[1:]:
            each.cancel()


@pytest.mark.slow
def test_one_address_has_so_many_connections(start: Callable[..., Gateway], rq: memory.MemoryQueue) -> None:
    """Also if no call is under way over them; until they have been idle for so long that they are closed."""
    gateway = start(max_connections_per_source=2, idle_timeout_ms=1500)
    listing = admin_pb2.ListTopicsRequest()
    with ExitStack() as open_channels:

        def another() -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            made = grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=options)
            return stub_of(AdminServiceStub, open_channels.enter_context(made))

        first, second, third = another(), another(), another()
        first.ListTopics(listing)
        second.ListTopics(listing)
        assert refused(third.ListTopics, listing) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limited")
        second.ListTopics(listing)

        def let_in() -> bool:
            try:
                third.ListTopics(listing)
            except grpc.RpcError:
                return False
            return True

        wait_for(let_in, "a connection that was idle to be forgotten", 30)


def test_who_looks_whether_the_gateway_lives_takes_nobodys_connection(
    start: Callable[..., Gateway], rq: memory.MemoryQueue
) -> None:
    gateway = start(max_connections_per_source=2)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as open_channels:
        for _ in range(4):
            channel = open_channels.enter_context(
                grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=options)
            )
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        assert not stub_of(AdminServiceStub, channel).ListTopics(admin_pb2.ListTopicsRequest()).topics


def test_a_stream_of_batches_ends_if_one_fails_as_nobody_foresaw(
    start: Callable[..., Gateway], rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    rq.create_topic("orders")
    gateway = start(idle_timeout_ms=5000)

    async def failing(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    silent = threading.Event()

    def one_and_no_more() -> Iterator[Any]:
        yield pb.ProduceRequest(topic="orders", records=new(b"x"))
        silent.wait(30)

    monkeypatch.setattr(gateway.operations, "publish", failing)
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as told:
            next(stub_of(RecordServiceStub, channel).Produce(one_and_no_more()))
        assert told.value.code() == grpc.StatusCode.INTERNAL
        silent.set()
    wait_for(lambda: not gateway.limits.streams._held, "no stream to be held")


@pytest.mark.slow
def test_a_stream_over_which_nothing_goes_is_ended(start: Callable[..., Gateway], rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders")
    gateway = start(idle_timeout_ms=500)
    silent = threading.Event()

    def one_and_no_more() -> Iterator[Any]:
        yield pb.ProduceRequest(topic="orders", records=new(b"x"))
        silent.wait(30)

    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stream = stub_of(RecordServiceStub, channel).Produce(one_and_no_more())
        assert next(stream).records
        assert refused(list, stream) == (grpc.StatusCode.FAILED_PRECONDITION, "session_gone")
        silent.set()
    wait_for(lambda: not gateway.limits.streams._held, "no stream to be held")


@pytest.mark.parametrize("committed", [False, True])
def test_what_is_not_committed_is_read_by_those_who_want_it(
    records: Any, admin: Any, rq: memory.MemoryQueue, gateway: Gateway, committed: bool
) -> None:
    rq.create_topic("orders")
    producer = rq.producer(transactional_id="t")
    aborted = producer.transaction()
    aborted.begin()
    aborted.send("orders", b"aborted").result()
    aborted.abort()
    with producer.transaction() as tx:
        tx.send("orders", b"committed")
    producer.close()
    wanted = [b"committed"] if committed else [b"aborted", b"committed"]
    isolation = common_pb2.ISOLATION_READ_COMMITTED if committed else common_pb2.ISOLATION_READ_UNCOMMITTED
    name = "read_committed" if committed else "read_uncommitted"
    stream = records.Fetch(pb.FetchRequest(topic="orders", partition=0, offset=0, isolation=isolation))
    fetched: list[bytes] = []
    while len(fetched) < len(wanted):
        fetched += [each.value for each in next(stream).records]
    stream.cancel()
    polled = records.Poll(pb.PollRequest(group=name, topics=["orders"], isolation=isolation, wait_ms=5000))
    sent = Sent()
    sent.put(join=pb.Join(group=f"{name}-2", topics=["orders"], credit=10, isolation=isolation))
    subscription = records.Subscribe(iter(sent))
    got: list[bytes] = []
    while len(got) < len(wanted):
        got += [each.value for each in next(subscription).records.records]
    sent.end()
    assert fetched == [each.value for each in polled.records] == got == wanted
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
        params: dict[str, Any] = {"offset": 0, "isolation": name, "format": "text"}
        peeked = rest.get("/v1/topics/orders/records", params=params).json()["records"]
        assert [each["text"].encode() for each in peeked] == wanted
        body = {"topics": ["orders"], "isolation": name}
        session = rest.post(f"/v1/groups/{name}-3/sessions", json=body).json()["session"]
        read = rest.get(f"/v1/sessions/{session}/records", params={"format": "text", "wait_ms": 5000}).json()["records"]
        assert [each["text"].encode() for each in read] == wanted
        assert rest.get("/v1/topics/orders/records", params={"isolation": "none"}).status_code == 400
    wrong = pb.FetchRequest(topic="orders", isolation=7)  # type: ignore[arg-type]
    assert refused(list, records.Fetch(wrong))[1] == "invalid_input"


# -- who may what ---------------------------------------------------------------------------------------


def each_method() -> list[Any]:
    return [method for service in SERVICES for method in service.methods]


def call(channel: grpc.Channel, method: Any, key: str | None, request: Any) -> Any:
    """Call a method that is known by its descriptor alone."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    make = kinds[method.client_streaming, method.server_streaming]
    path = f"/{method.containing_service.full_name}/{method.name}"
    made: Any = make(path, request_serializer=lambda given: given, response_deserializer=lambda told: told)
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    answer = made(iter([request]) if method.client_streaming else request, metadata=metadata, timeout=20)
    return list(answer) if method.server_streaming else answer


def an_example(method: Any) -> bytes:
    """A request that would do something, if it were allowed."""
    examples: dict[str, Any] = {
        "Append": pb.AppendRequest(topic="orders", records=new(b"x")),
        "Poll": pb.PollRequest(group="g", topics=["orders"]),
        "Produce": pb.ProduceRequest(topic="orders", records=new(b"x")),
        "Fetch": pb.FetchRequest(topic="orders"),
        "Subscribe": pb.SubscribeRequest(join=pb.Join(group="g", topics=["orders"])),
        "ResetGroup": admin_pb2.ResetGroupRequest(group="g", to_earliest=True),
        "PutJobs": queues_pb2.PutJobsRequest(queue="orders", jobs=[queues_pb2.NewJob(value=b"x")]),
        "StreamJobs": queues_pb2.StreamJobsRequest(open=queues_pb2.OpenJobs(queue="orders")),
        "Ack": pb.AckRequest(session="x.y"),
        "CloseSession": pb.CloseSessionRequest(session="x.y"),
    }
    if method.name in examples:
        return bytes(examples[method.name].SerializeToString())
    fields = {each.name for each in method.input_type.fields}
    module: Any = queues_pb2 if method.containing_service.name == "QueueService" else admin_pb2
    made: Any = getattr(module, method.input_type.name)()
    for name in fields & {"name", "group", "queue"}:
        setattr(made, name, "orders")
    if "leases" in fields:
        made.leases.append("1.0-0.0")
    if "all" in fields:
        made.all = True
    return bytes(made.SerializeToString())


@pytest.mark.slow
def test_every_method_needs_a_key_and_its_grant(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    rq.create_topic("orders")
    store = KeyStore(rq)
    nothing, _ = store.create("nothing", [])
    elsewhere, _ = store.create(
        "elsewhere", [f"{verb}:{kind}:other*" for verb in ("publish", "consume") for kind in KINDS]
    )
    revoked, key = store.create("revoked", ["*:*:*"])
    store.revoke(key.key_id)
    gateway = start()
    assert len(each_method()) == 38
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        for method in each_method():
            request = an_example(method)
            for wrong in (None, "nonsense", revoked.text):
                told = refused(
                    lambda method=method, wrong=wrong, request=request: call(channel, method, wrong, request)
                )
                assert told == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"), method.name
            for token in (nothing, elsewhere):
                if method.name == "Produce":
                    (answer,) = call(channel, method, token.text, request)
                    assert pb.ProduceResponse.FromString(answer).problem.code == "permission_denied"
                    continue
                told = refused(call, channel, method, token.text, request)
                wanted = "session_elsewhere" if method.name in ("Ack", "CloseSession") else "permission_denied"
                assert told[1] == wanted, method.name
    assert rq.topic("orders").records == 0


def test_a_refusal_within_a_stream_is_in_the_audit(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    rq.create_topic("orders")
    token, key = KeyStore(rq).create("elsewhere", ["publish:topic:other"])
    gateway = start()
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        request = pb.ProduceRequest(number=1, topic="orders", records=[common_pb2.NewRecord(value=b"x")])
        stub = stub_of(RecordServiceStub, channel)
        (answer,) = stub.Produce(iter([request]), metadata=[("authorization", f"Bearer {token.text}")])
    assert answer.problem.code == "permission_denied"

    def refusal() -> Any:
        with rq.consumer(AUDIT) as consumer:
            found = [json.loads(each.value or b"") for each in consumer.poll(timeout_ms=200)]
        return next((each for each in found if each["verb"] == "request"), None)

    entry = wait_for(refusal, "the refusal to be written down")
    assert (entry["key"], entry["name"], entry["source"]) == (key.key_id, "Produce orders", "127.0.0.1")
    assert (entry["outcome"], entry["needs"]) == ("permission_denied", "publish:topic:orders")


@pytest.mark.slow
def test_a_stream_ends_when_its_key_is_revoked(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    rq.create_topic("orders")
    store = KeyStore(rq)
    token, _ = store.create("all", ["*:*:*"])
    gateway = start()
    metadata = [("authorization", f"Bearer {token.text}")]
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub = stub_of(RecordServiceStub, channel)
        sent = Sent()
        sent.put(join=pb.Join(group="g", topics=["orders"], credit=10))
        streams = [
            stub.Subscribe(iter(sent), metadata=metadata),
            stub.Fetch(pb.FetchRequest(topic="orders"), metadata=metadata),
        ]
        next(streams[0])
        store.revoke(token.key_id)
        for stream in streams:
            assert refused(list, stream)[1] == "unauthenticated"
        sent.end()


@pytest.mark.parametrize("how", ["revoked", "grant taken back"])
@pytest.mark.slow
def test_a_stream_without_credit_ends_when_its_key_may_not_any_more(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], how: str
) -> None:
    """And what its caller acknowledges then does not count."""
    rq.create_topic("orders")
    rq.create_topic("emails", queue=True)
    for topic in ("orders", "emails"):
        with rq.producer() as producer:
            producer.send(topic, b"x").result()
    store = KeyStore(rq)
    token, _ = store.create("all", ["consume:*:*"])
    gateway = start()
    metadata = [("authorization", f"Bearer {token.text}")]
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        sent, jobs = Sent(), Sent()
        sent.put(join=pb.Join(group="g", topics=["orders"], credit=1, timeout_ms=60_000))
        reading = stub_of(RecordServiceStub, channel).Subscribe(iter(sent), metadata=metadata)
        assert next(reading).joined.group == "g"
        got = next(reading).records
        assert [each.value for each in got.records] == [b"x"]
        jobs._waiting.put(
            queues_pb2.StreamJobsRequest(open=queues_pb2.OpenJobs(queue="emails", credit=1, timeout_ms=60_000))
        )
        working = stub_of(QueueServiceStub, channel).StreamJobs(iter(jobs), metadata=metadata)
        assert next(working).timeout_ms == 60_000
        assert next(working).jobs
        if how == "revoked":
            store.revoke(token.key_id)
        else:
            store.grant(token.key_id, ["consume:*:*"], take_back=True)

        def heard() -> bool:
            caller = gateway.keys._ring.get(token.key_id)
            return caller is not None and (caller.revoked_ms is not None or not caller.grants)

        wait_for(heard, "the gateway to hear of it")
        sent.put(ack=pb.AckRecords(number=1, through=got.cursor))
        expected = "unauthenticated" if how == "revoked" else "permission_denied"
        began_s = time.monotonic()
        for stream in (reading, working):
            assert refused(list, stream)[1] == expected
        assert time.monotonic() - began_s < 20
        sent.end()
        jobs.end()
    assert not rq.group("g").partitions, "nothing is committed"


def test_what_comes_while_a_key_is_revoked_is_not_handed_out(
    rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    rq.create_topic("orders")
    rq.create_topic("emails", queue=True)
    store = KeyStore(rq)
    token, _ = store.create("all", ["consume:*:*"])
    gateway = start()
    headers = {"Authorization": f"Bearer {token.text}"}
    url = f"http://127.0.0.1:{gateway.rest_port}/v1"
    answers: dict[str, int] = {}
    session = httpx.post(f"{url}/groups/g/sessions", json={"topics": ["orders"]}, headers=headers).json()["session"]

    def ask(method: str, path: str) -> None:
        answers[path] = httpx.request(method, f"{url}{path}", headers=headers, timeout=60).status_code

    reading = ("GET", f"/sessions/{session}/records?wait_ms=20000")
    working = ("POST", "/queues/emails/jobs/lease?wait_ms=20000")
    asking = [threading.Thread(target=ask, args=each) for each in (reading, working)]
    for each in asking:
        each.start()
    wait_for(lambda: any(each.members for each in rq.groups()), "a member")
    wait_for(lambda: gateway.queues._known, "the question for jobs")
    store.revoke(token.key_id)
    wait_for(lambda: gateway.keys._ring.keys[0].revoked_ms is not None, "the gateway to hear of it")
    with rq.producer() as producer:
        producer.send("orders", b"x").result()
        producer.send("emails", b"x").result()
    for each in asking:
        each.join(30)
    assert answers == {reading[1]: 401, working[1]: 401}
    with rq.queue("emails") as emails:
        (job,) = emails.get(timeout_ms=10_000)
        assert (job.value, job.deliveries) == (b"x", 1)
        job.ack()


# -- hostile callers --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_that_are_no_message_do_no_harm(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    from random import Random

    rq.create_topic("orders")
    gateway = start(max_body_bytes=50_000, slow_timeout_ms=500, max_topic_partitions=4)
    dice = Random(14)
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        for method in each_method():
            example = an_example(method)
            for number in range(20):
                body = bytearray(example if number % 2 else dice.randbytes(dice.randrange(60)))
                for _ in range(dice.randrange(4)):
                    if body:
                        body[dice.randrange(len(body))] = dice.randrange(256)
                told = _told(channel, method, bytes(body))
                assert told not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (method.name, bytes(body))
        rq.create_topic("orders", if_missing=True)  # one of these may have deleted it
        stub = stub_of(RecordServiceStub, channel)
        with pytest.raises(grpc.RpcError) as large:
            stub.Append(pb.AppendRequest(topic="orders", records=new(b"x" * 60_000)))
        assert large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        bomb = pb.AppendRequest(topic="orders", records=new(b"\0" * 3_000_000))
        with pytest.raises(grpc.RpcError) as large:
            stub.Append(bomb, compression=grpc.Compression.Gzip)
        assert large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Append(pb.AppendRequest(topic="orders", records=new(b"well"))).records


def _told(channel: grpc.Channel, method: Any, body: bytes) -> grpc.StatusCode | None:
    """What became of it; streams that go on are left soon."""
    make = channel.stream_stream if method.client_streaming else channel.unary_stream
    path = f"/{method.containing_service.full_name}/{method.name}"
    made: Any = make(path, request_serializer=lambda given: given, response_deserializer=lambda told: told)
    try:
        if method.name in ("Fetch", "Subscribe"):
            list(made(iter([body]) if method.client_streaming else body, timeout=0.1))
        else:
            call(channel, method, None, body)
    except grpc.RpcError as error:
        return error.code()
    return None
