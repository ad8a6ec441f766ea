"""Calls that hold anything but what was meant: refused with a typed error, and neither replica nor coordinator ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayqueue.cluster.commands import decode_command
from rayqueue.errors import InvalidInputError, RayQueueError, TransportError, UnknownFormatError
from rayqueue.partition.commands import decode as decode_partition_command
from rayqueue.protocol import calls
from rayqueue.protocol.calls import AlterTopic, Commit, CreateTopic, ForgetGroup, GetPosition, Pin, encode_call
from rayqueue.protocol.failures import decode_failure
from rayqueue.protocol.frames import Kind, head
from rayqueue.protocol.topics import TopicSettings
from rayqueue.replica.partition_service import PartitionService
from tests.unit.cluster.cluster_state import Service
from tests.unit.net.client_net import Cluster, RawClient
from tests.unit.replica.test_client_strangers import cluster_of, works

NOT_UTF8 = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("GetPosition") + b"\xa5group\xa1\xff"
DEEP = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("GetStatus") + b"\xa1x" + b"\x91" * 100_000
LONG = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("GetStatus") + b"\xa1x\xdd\xff\xff\xff\xff"
POISON = [NOT_UTF8, DEEP, LONG, b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000]


@pytest.mark.parametrize("body", POISON)
def test_no_bytes_are_more_than_a_typed_error(body: bytes) -> None:
    for decode in (calls.decode_partition_call, calls.decode_coordinator_call):
        with pytest.raises(InvalidInputError):
            decode(body)
    with pytest.raises(TransportError):
        calls.decode_answer(calls.DescribeCluster(), body)
    assert isinstance(decode_failure(body), RayQueueError)
    with pytest.raises(UnknownFormatError):
        decode_command(b"\x20" + body)
    with pytest.raises(UnknownFormatError):
        decode_command(body)
    with pytest.raises(UnknownFormatError):
        decode_partition_command(body)


@pytest.mark.parametrize("name", ["self", "message", "cls", "__class__", "args", ""])
def test_a_failure_may_name_its_details_as_it_likes(name: str) -> None:
    error = decode_failure(msgspec.msgpack.encode(["not_leader", "elsewhere", {name: 1}]))
    assert (error.code, str(error), error.details) == ("not_leader", "elsewhere", {name: 1})


@pytest.mark.parametrize("name", ["self", "changes", "partitions_", "__class__", ""])
def test_settings_that_no_topic_has(name: str) -> None:
    service = Service()
    service.ask(CreateTopic(name="t", settings=TopicSettings()))
    refusal = service.ask(AlterTopic(name="t", topic_id=1, changes={name: 1})).answer
    assert isinstance(refusal, InvalidInputError)
    assert "no setting" in str(refusal)
    assert service.ask(AlterTopic(name="t", topic_id=1, changes={"partitions": 2})).answer.settings.partitions == 2


def test_a_bug_that_a_call_finds_refuses_the_call_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topic changes are carried out one after the other, so one may raise while another client is served."""
    service = Service()
    real = TopicSettings.check

    def check(settings: TopicSettings) -> TopicSettings:
        if settings.partitions == 13:
            raise ZeroDivisionError
        return real(settings)

    monkeypatch.setattr(TopicSettings, "check", check)
    refusal = service.ask(CreateTopic(name="t", settings=TopicSettings(partitions=13))).answer
    assert isinstance(refusal, InvalidInputError)
    assert "ZeroDivisionError" in str(refusal)
    assert service.ask(CreateTopic(name="t", settings=TopicSettings(partitions=3))).answer.name == "t"


def send(client: RawClient, *bodies: bytes) -> None:
    for number, body in enumerate(bodies, 1):
        client.socket.sendall(head(Kind.CALL, number, len(body)) + body)


def failures(client: RawClient, count: int) -> list[RayQueueError]:
    found: list[RayQueueError] = []
    while len(found) < count:
        frames = client.frames()
        assert frames, "hung up"
        found += [decode_failure(frame.body) for frame in frames if frame.kind == Kind.FAILED]
    return found


def test_a_replica_survives_them(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        client = RawClient(cluster.endpoint())
        send(client, *POISON)
        assert {type(each) for each in failures(client, len(POISON))} == {InvalidInputError}
        client.close()
        works(cluster)


@pytest.mark.parametrize("later", [False, True], ids=["when it comes", "once the leader is confirmed"])
def test_whatever_serving_a_client_raises_hangs_up_on_that_client(
    tmp_path: Path, later: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RecursionError("a bug that some bytes have found")

    with cluster_of(tmp_path) as cluster:
        beside = RawClient(cluster.endpoint())
        with monkeypatch.context() as patch:
            if later:
                patch.setattr(cluster.replica.service.partition, "position", broken, raising=False)
            else:
                patch.setattr(PartitionService, "_call", broken)
            client = RawClient(cluster.endpoint())
            send(client, encode_call(GetPosition(group="g")))
            (answer,) = client.frames()
            assert (answer.kind, answer.request, type(decode_failure(answer.body))) == (Kind.FAILED, 0, TransportError)
            assert client.is_closed()
            client.close()
        assert "RecursionError" in caplog.text
        send(beside, encode_call(GetPosition(group="g")))
        (answer,) = beside.frames()
        assert answer.kind == Kind.ANSWER
        beside.close()
        works(cluster)


def answer_to(cluster: Cluster, call: calls.Call) -> Any:
    async def scenario() -> Any:
        channel = await cluster.open()
        try:
            return await channel.call(call)
        finally:
            channel.close()

    return cluster.run(scenario())


@pytest.mark.parametrize("name", ["", "größe", "a b", "-x", "x" * 121, "a/b", "a\0b"])
def test_a_partition_takes_only_names_that_a_group_may_have(tmp_path: Path, name: str) -> None:
    with cluster_of(tmp_path) as cluster:
        for call in (Commit(group=name, generation=1, offsets={}), Pin(group=name)):
            with pytest.raises(InvalidInputError, match="cannot name a group"):
                answer_to(cluster, call)
        assert answer_to(cluster, calls.GetGroups()) == {}
        if name:  # one from before there was this rule can be let go of
            assert answer_to(cluster, Pin(group=name, pinned=False)) is None
            assert answer_to(cluster, ForgetGroup(group=name)) is False


def test_a_commit_names_no_more_lanes_than_there_can_be(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster, pytest.raises(InvalidInputError, match="lanes"):
        answer_to(cluster, Commit(group="g", generation=0, offsets=dict.fromkeys(range(300), 0)))
