"""A stop answers what waits at once and what is at work if it ends in time; what is cut off is told so."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from rayqueue.actors.names import GATEWAY_PREFIX
from rayqueue.client import lifecycle
from rayqueue.config import GatewaySettings
from rayqueue.gateway import server
from rayqueue.gateway.operations import Operations
from rayqueue.gateway.rest import problems
from rayqueue.gateway.rpc.v1 import admin_pb2, queues_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.admin_pb2_grpc import AdminServiceStub
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceStub
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub
from rayqueue.gateway.server import GatewayThread
from rayqueue.testing import memory, wait_for
from tests.unit.gateway.test_rpc import Sent, reason, stub_of

DRAIN_MS = 2000
WAIT_MS = 25_000


class Asked:
    """A request in a thread of its own, and what it was told."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.told: Any = None
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def _run(self, ask: Callable[[], Any]) -> None:
        try:
            self.told = ask()
        except (grpc.RpcError, httpx.HTTPError) as error:
            self.told = error

    def answer(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.told


@pytest.fixture
def thread(rq: memory.MemoryQueue) -> Any:
    rq.create_topic("orders")
    rq.create_topic("emails", queue=True)
    made = GatewayThread(rq, GatewaySettings(rest_port=0, grpc_port=0, drain_timeout_ms=DRAIN_MS))
    made.start()
    yield made
    made.stop()


def stopped_s(thread: GatewayThread) -> float:
    began_s = time.monotonic()
    thread.stop()
    return time.monotonic() - began_s


@pytest.mark.slow
def test_long_polls_of_rest_are_answered_at_once(thread: GatewayThread, rq: memory.MemoryQueue) -> None:
    assert thread.gateway is not None
    rest = httpx.Client(base_url=f"http://127.0.0.1:{thread.gateway.rest_port}/v1", timeout=60)
    session = rest.post("/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    job = rest.post("/queues/emails/jobs", json={"jobs": [{"text": "x", "want_result": True}]}).json()["jobs"][0]
    rest.post("/queues/emails/jobs/lease")
    wait = {"wait_ms": WAIT_MS}
    asked = [
        Asked(lambda: rest.get(f"/sessions/{session}/records", params=wait)),
        Asked(lambda: rest.get("/topics/orders/consumers/me/records", params=wait)),
        Asked(lambda: rest.post("/queues/emails/jobs/lease", params=wait)),
        Asked(lambda: rest.get(f"/queues/emails/jobs/{job['job_id']}/result", params=wait)),
    ]
    tailed = Asked(lambda: rest.get("/topics/orders/tail").text)
    wait_for(lambda: len(rq.groups()) == 2, "both groups")
    time.sleep(0.5)  # for the others nothing says that they wait
    assert stopped_s(thread) < 1.8
    answers = [each.answer() for each in asked]
    assert [each.status_code for each in answers] == [200] * 4, answers
    assert answers[3].json()["state"] == "pending"
    assert "event: error" in tailed.answer()
    assert "gateway_closing" in tailed.answer()


@pytest.mark.slow
def test_calls_and_streams_of_grpc_are_answered_at_once(thread: GatewayThread) -> None:
    assert thread.gateway is not None
    channel = grpc.insecure_channel(f"127.0.0.1:{thread.gateway.grpc_port}")
    records, jobs = stub_of(RecordServiceStub, channel), stub_of(QueueServiceStub, channel)
    session = records.Poll(pb.PollRequest(group="g", topics=["orders"])).session
    sent, produced, worked = Sent(), Sent(), Sent()
    sent.put(join=pb.Join(group="h", topics=["orders"], credit=3))
    worked._waiting.put(queues_pb2.StreamJobsRequest(open=queues_pb2.OpenJobs(queue="emails", credit=1)))
    polled = Asked(lambda: records.Poll(pb.PollRequest(session=session, wait_ms=WAIT_MS)))
    taken = Asked(lambda: jobs.GetJobs(queues_pb2.GetJobsRequest(queue="emails", wait_ms=WAIT_MS)))
    streams = [
        Asked(lambda: list(records.Fetch(pb.FetchRequest(topic="orders")))),
        Asked(lambda: list(records.Subscribe(iter(sent)))),
        Asked(lambda: list(records.Produce(iter(produced)))),
        Asked(lambda: list(jobs.StreamJobs(iter(worked)))),
    ]
    gateway = thread.gateway
    wait_for(lambda: len(gateway.drain.under_way) == 6, "all calls")
    time.sleep(0.5)
    assert stopped_s(thread) < 1.8
    assert not polled.answer().records
    assert not taken.answer().jobs
    told = [reason(each.answer()) for each in streams]
    assert told == [(grpc.StatusCode.UNAVAILABLE, "gateway_closing")] * 4
    for each in (sent, produced, worked):
        each.end()


@pytest.mark.slow
def test_what_is_cut_off_is_told_so(thread: GatewayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread.gateway is not None
    under_way: list[str] = []

    def never(name: str) -> Any:
        async def forever(*_: Any, **__: Any) -> Any:
            under_way.append(name)
            await asyncio.Event().wait()

        return forever

    for name in ("cluster", "create_topic"):
        monkeypatch.setattr(Operations, name, never(name))
    rest = httpx.Client(base_url=f"http://127.0.0.1:{thread.gateway.rest_port}/v1", timeout=60)
    admin = stub_of(AdminServiceStub, grpc.insecure_channel(f"127.0.0.1:{thread.gateway.grpc_port}"))
    asked = [
        Asked(lambda: rest.get("/cluster")),
        Asked(lambda: rest.post("/topics", json={"name": "new"})),
        Asked(lambda: admin.DescribeCluster(admin_pb2.DescribeClusterRequest())),
        Asked(lambda: admin.CreateTopic(admin_pb2.CreateTopicRequest(name="new"))),
    ]
    wait_for(lambda: len(under_way) == 4, "all calls")
    assert DRAIN_MS / 1000 < stopped_s(thread) < DRAIN_MS / 1000 + 3
    read, made, called, changed = [each.answer() for each in asked]
    for answer, status, code in ((read, 503, "gateway_closing"), (made, 504, "outcome_unknown")):
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == problems.CONTENT_TYPE
    assert reason(called) == (grpc.StatusCode.UNAVAILABLE, "gateway_closing")
    assert reason(changed) == (grpc.StatusCode.UNAVAILABLE, "outcome_unknown")


class OfRay:
    """Ray, as far as a stop asks it: two gateways, of which one is of the release before."""

    def __init__(self, within_s: float) -> None:
        told = types.SimpleNamespace(remote=lambda: within_s)
        self.handles = {
            f"{GATEWAY_PREFIX}a-0": types.SimpleNamespace(closes_within_s=told),
            f"{GATEWAY_PREFIX}b-0": object(),
        }

    def wait(self, refs: list[float], **_: Any) -> tuple[list[float], list[float]]:
        return refs, []

    def get(self, ref: float) -> float:
        return ref


def test_whoever_stops_a_gateway_waits_for_as_long_as_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    longest_s = server.stops_within_s(GatewaySettings(drain_timeout_ms=60_000))
    assert longest_s > 120
    ray = OfRay(longest_s)
    stopped: list[tuple[list[str], float]] = []

    def stop(names: list[str], _: str, within_s: float) -> None:
        stopped.append((names, within_s))
        ray.handles.clear()

    monkeypatch.setattr(lifecycle, "ray", ray)
    monkeypatch.setattr(lifecycle, "found_actors", lambda _: set(ray.handles))
    monkeypatch.setattr(lifecycle, "_find", lambda name, _: ray.handles[name])
    monkeypatch.setattr(lifecycle, "_stop", stop)
    names = sorted(ray.handles)
    lifecycle.stop_gateways("rayqueue")
    assert [(sorted(each), within_s) for each, within_s in stopped] == [(names, longest_s)]
