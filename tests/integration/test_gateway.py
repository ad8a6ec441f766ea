"""Gateways on a real Ray cluster: started, killed under load, a leader killed under them, drained and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import ray

import rayqueue
from rayqueue.actors.names import actor_name
from rayqueue.config import GatewaySettings
from rayqueue.gateway import fleet
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(180)

RETRIABLE = (409, 429, 503, 504)


@pytest.fixture(scope="module")
def rq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rayqueue.RayQueue]:
    with ray_cluster("b1"):
        queue = rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))
        yield queue
        fleet.stop(queue)


def free_ports() -> tuple[int, int]:
    """Two that nobody gets by chance before the gateway does: Ray's workers have 10002 to 19999, and the system gives
    out 32768 and above.
    """
    found: list[int] = []
    for port in random.sample(range(20_500, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == 2:
            return found[0], found[1]
    raise AssertionError("no free port")


@pytest.fixture(scope="module")
def gateway(rq: rayqueue.RayQueue) -> dict[str, Any]:
    rest_port, grpc_port = free_ports()
    (told,) = fleet.start(rq, GatewaySettings(rest_port=rest_port, grpc_port=grpc_port, request_timeout_ms=20_000))
    assert fleet.start(rq, GatewaySettings(rest_port=rest_port, grpc_port=grpc_port)) == [told]
    assert fleet.running(rq) == [told]
    return told


class Load:
    """A caller that publishes one record after the other, and repeats what may be repeated."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self.acknowledged: list[str] = []
        self.unknown: list[str] = []
        self.refused: list[tuple[int, str]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        with httpx.Client(timeout=30) as client:
            number = 0
            while not self._stopping.is_set():
                self._publish(client, f"v{number}")
                number += 1

    def _publish(self, client: httpx.Client, text: str) -> None:
        deadline_s = time.monotonic() + 15
        while time.monotonic() < deadline_s:
            try:
                answer = client.post(
                    self._url, json={"records": [{"text": text}]}, headers={"Idempotency-Key": f"load-{text}"}
                )
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                self.acknowledged.append(text)
                return
            if answer.status_code not in RETRIABLE or not answer.json()["retriable"]:
                self.refused.append((answer.status_code, answer.text))
                return
            if answer.json()["code"] == "request_in_progress" and answer.status_code == 409:
                time.sleep(0.2)
            time.sleep(0.05)
            if self._stopping.is_set():
                break
        self.unknown.append(text)


def stub_of(channel: Any, kind: Any = RecordServiceStub) -> Any:
    return kind(channel)


def written(rq: rayqueue.RayQueue, topic: str) -> list[str]:
    found: list[str] = []
    with rq.consumer(topic) as consumer:
        while any(consumer.lag().values()) or not found:
            found += [(each.value or b"").decode() for each in consumer.poll(max_records=10_000)]
    return found


def test_what_was_acknowledged_is_there_once_though_gateway_and_leader_are_killed(
    rq: rayqueue.RayQueue, gateway: dict[str, Any]
) -> None:
    info = rq.create_topic("orders")
    load = Load(f"{gateway['rest']}/v1/topics/orders/records")
    wait_for(lambda: len(load.acknowledged) > 20, "some records", 60)
    leader = next(each for each in rq.topic("orders").partitions[0].replicas if each.role == "leader")
    name = actor_name(GroupId(info.partitions[0].group_id), ReplicaId(leader.replica_id))
    ray.kill(ray.get_actor(name, rq.namespace), no_restart=False)
    before = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > before + 20, "records after the leader's death", 60)
    os.kill(gateway["pid"], signal.SIGKILL)
    before = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > before + 20, "records after the gateway's death", 90)
    load.stop()
    assert load.refused == []
    found = written(rq, "orders")
    assert len(found) == len(set(found)), "an idempotency key was written twice"
    assert set(load.acknowledged) <= set(found)
    assert set(found) <= {*load.acknowledged, *load.unknown}
    assert len(load.unknown) <= 1, "only the one that was stopped: a key outlives its gateway"


def test_a_member_over_rest_and_one_over_grpc_share_a_topic(rq: rayqueue.RayQueue, gateway: dict[str, Any]) -> None:
    rq.create_topic("shared", partitions=2, replication=1)
    rest = httpx.Client(base_url=gateway["rest"], timeout=30)
    with rest, grpc.insecure_channel(gateway["grpc"]) as channel:
        stub = stub_of(channel)
        session = rest.post("/v1/groups/g/sessions", json={"topics": ["shared"]}).json()["session"]
        rest.get(f"/v1/sessions/{session}/records", params={"wait_ms": 0})
        polled = stub.Poll(pb.PollRequest(group="g", topics=["shared"]))

        def shared() -> bool:
            return len({each.member for each in rq.group("g").partitions} - {None}) == 2

        wait_for(shared, "a partition for each", 30)
        records = [common_pb2.NewRecord(value=b"%d" % number, partition=number % 2) for number in range(100)]
        stub.Append(pb.AppendRequest(topic="shared", records=records))
        found: list[str] = []
        cursors = [0, 0]

        def everything() -> bool:
            seen: dict[str, Any] = {"wait_ms": 100, "format": "text", "cursor": cursors[0]}
            answer = rest.get(f"/v1/sessions/{session}/records", params=seen).json()
            found.extend(each["text"] for each in answer["records"])
            more = stub.Poll(pb.PollRequest(session=polled.session, wait_ms=100, cursor=cursors[1]))
            found.extend(each.value.decode() for each in more.records)
            cursors[:] = answer["cursor"], more.cursor
            return len(found) >= 100

        wait_for(everything, "all records", 30)
        assert sorted(found, key=int) == [str(number) for number in range(100)]
        assert rest.post(f"/v1/sessions/{session}/ack", json={"through": 50}).json()["acknowledged"] == 50
        assert stub.Ack(pb.AckRequest(session=polled.session, through=50)).acknowledged == 50
        assert rq.group("g").lag == 0


@pytest.mark.long
def test_the_command_makes_keys_and_stops_gateways(rq: rayqueue.RayQueue, gateway: dict[str, Any]) -> None:
    context: Any = ray.get_runtime_context
    address = context().gcs_address

    def command(*arguments: str) -> str:
        where = ["--address", address, "--data-dir", str(rq.settings.data_dir), "--json"]
        done = subprocess.run(
            [str(Path(sys.executable).with_name("rayqueue")), *arguments, *where],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(command("gateway", "list"))[0]["rest"] == gateway["rest"]
    made = json.loads(command("keys", "create", "reader", "--grant", "describe:topic:*"))
    headers = {"Authorization": f"Bearer {made['key']}"}
    wait_for(lambda: httpx.get(f"{gateway['rest']}/v1/topics").status_code == 401, "keys to be needed", 30)
    assert httpx.get(f"{gateway['rest']}/v1/topics", headers=headers).status_code == 200
    assert made["key"].split("_", 2)[2] not in command("keys", "list")
    command("keys", "revoke", made["id"])
    wait_for(lambda: httpx.get(f"{gateway['rest']}/v1/topics", headers=headers).status_code == 401, "the end", 30)
    assert json.loads(command("gateway", "stop")) == {"stopped": 1}
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{gateway['rest']}/healthz")
    assert fleet.running(rq) == []
