"""Gateways, a leader and a node killed under callers: what was acknowledged is there, and each error could be retried.

Callers know the addresses of all gateways and go to the next one when theirs does not answer, as those behind a load
balancer do.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import rayqueue
from rayqueue.config import GatewaySettings
from rayqueue.gateway import fleet
from rayqueue.gateway.rpc.v1 import common_pb2, queues_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceStub
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub
from rayqueue.testing import faults, wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

_MORE = 15
"""How much each caller has to do after each blow."""


_PLACE = ("topic", "partition", "offset", "lane")


class Caller:
    """A thread that asks one gateway after the other; what it was refused for good is written down."""

    def __init__(self, urls: list[str], work: Callable[[Caller], None]) -> None:
        self._urls = urls
        self._at = 0
        self.client = httpx.Client(timeout=10)
        self.stopping = threading.Event()
        self.refused: list[str] = []
        self.done: list[str] = []
        self.seen: set[str] = set()
        """What it was given. An acknowledgement whose answer died with its gateway may have counted, and is not in
        ``done``."""
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Caller], None]) -> None:
        while not self.stopping.is_set():
            work(self)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.client.close()

    def ask(self, method: str, path: str, *, gone: tuple[int, ...] = (), **rest: Any) -> Any:
        """The answer's body; None if it was one of ``gone``, or the test ends. An error that may be retried is."""
        while True:
            try:
                answer = self.client.request(method, f"{self._urls[self._at]}{path}", **rest)
            except httpx.TransportError:
                self._at = (self._at + 1) % len(self._urls)
                time.sleep(0.05)
            else:
                if answer.is_success:
                    return answer.json() if answer.content else {}
                if answer.status_code in gone:
                    return None
                if not answer.json()["retriable"]:
                    self.refused.append(f"{method} {path}: {answer.status_code} {answer.text}")
                    return None
                time.sleep(0.05)
            if self.stopping.is_set():
                return None


def publisher() -> Callable[[Caller], None]:
    numbers = count()

    def publish(caller: Caller) -> None:
        text = f"v{next(numbers)}"
        if caller.ask("POST", "/v1/topics/orders/records", json={"records": [{"text": text}]}) is not None:
            caller.done.append(text)
        time.sleep(0.01)

    return publish


def putter() -> Callable[[Caller], None]:
    numbers = count()

    def put(caller: Caller) -> None:
        text = f"j{next(numbers)}"
        key = {"Idempotency-Key": f"put-{text}"}
        if caller.ask("POST", "/v1/queues/tasks/jobs", json={"jobs": [{"text": text}]}, headers=key) is not None:
            caller.done.append(text)
        time.sleep(0.01)

    return put


class RpcCaller:
    """The same over gRPC: a thread that appends with an idempotency key, and repeats what may be repeated."""

    def __init__(self, addresses: list[str]) -> None:
        self.done: list[str] = []
        self.refused: list[str] = []
        self.stopping = threading.Event()
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channels = [grpc.insecure_channel(each, options=options) for each in addresses]
        kind: Any = RecordServiceStub
        self._stubs = [kind(each) for each in self._channels]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            if self.stopping.is_set():
                return
            self._append(f"r{number}")
            time.sleep(0.01)

    def _append(self, text: str) -> None:
        new = common_pb2.NewRecord(value=text.encode())
        request = pb.AppendRequest(topic="calls", records=[new], idempotency_key=text)
        for stub in cycle(self._stubs):
            try:
                stub.Append(request, timeout=10)
            except grpc.RpcError as error:
                told = _told(error)
                if told is not None and told.get("retriable") != "true":
                    self.refused.append(f"{text}: {error}")
                    return
                if self.stopping.is_set():
                    return
                time.sleep(0.05)
            else:
                self.done.append(text)
                return

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        for each in self._channels:
            each.close()


class StreamCaller:
    """A thread that keeps one stream of gRPC, and opens it again at the next gateway when it breaks.

    ``work`` reads one stream until it ends; what it may not go on after is written down.
    """

    def __init__(self, addresses: list[str], work: Callable[[StreamCaller, grpc.Channel], None]) -> None:
        self.done: list[str] = []
        self.seen: set[str] = set()
        self.refused: list[str] = []
        self.stopping = threading.Event()
        self._addresses = addresses
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[StreamCaller, grpc.Channel], None]) -> None:
        for address in cycle(self._addresses):
            if self.stopping.is_set():
                return
            with grpc.insecure_channel(address) as channel:
                try:
                    work(self, channel)
                except grpc.RpcError as error:
                    told = _told(error)
                    # A session that has ended, or another's generation: a stream begins with a new one.
                    again = ("session_gone", "stale_generation", "unknown_member", "lease_lost")
                    if told is not None and told.get("retriable") != "true" and told.get("reason") not in again:
                        self.refused.append(str(error))
            time.sleep(0.05)

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Outgoing:
    """The requests of a stream, until it is ended."""

    def __init__(self, *first: Any) -> None:
        self._waiting: queue.Queue[Any] = queue.Queue()
        for each in first:
            self._waiting.put(each)

    def put(self, message: Any) -> None:
        self._waiting.put(message)

    def end(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting.get, None)


def producing() -> Callable[[StreamCaller, grpc.Channel], None]:
    """Each batch once: of one whose answer did not come it is not known whether it is written."""
    numbers = count()

    def work(caller: StreamCaller, channel: grpc.Channel) -> None:
        stub: Any = RecordServiceStub(channel)  # type: ignore[no-untyped-call]
        sent: dict[int, str] = {}
        out = Outgoing()

        def send() -> None:
            number = next(numbers)
            sent[number] = f"p{number}"
            record = common_pb2.NewRecord(value=sent[number].encode())
            out.put(pb.ProduceRequest(number=number, topic="streams", records=[record]))

        try:
            for _ in range(4):
                send()
            for answer in stub.Produce(iter(out), timeout=20):
                if not answer.HasField("problem"):
                    caller.done.append(sent[answer.number])
                # A delivery that was given up after its time is unknown; everything else may be asked again.
                elif not answer.problem.retriable and answer.problem.code != "delivery_timeout":
                    caller.refused.append(str(answer.problem))
                if caller.stopping.is_set():
                    out.end()
                else:
                    time.sleep(0.01)
                    send()
        finally:
            out.end()

    return work


def subscribing() -> Callable[[StreamCaller, grpc.Channel], None]:
    """At least once; what an acknowledgement was answered for counts."""

    def work(caller: StreamCaller, channel: grpc.Channel) -> None:
        stub: Any = RecordServiceStub(channel)  # type: ignore[no-untyped-call]
        join = pb.Join(group="streaming", topics=["streams"], credit=50, timeout_ms=3000)
        out = Outgoing(pb.SubscribeRequest(join=join))
        waiting: dict[int, list[str]] = {}
        try:
            for answer in stub.Subscribe(iter(out), timeout=10):
                kind = answer.WhichOneof("message")
                if kind == "records":
                    texts = [each.value.decode() for each in answer.records.records]
                    caller.seen |= set(texts)
                    waiting[answer.records.cursor] = texts
                    ack = pb.AckRecords(number=answer.records.cursor, through=answer.records.cursor)
                    out.put(pb.SubscribeRequest(ack=ack))
                    out.put(pb.SubscribeRequest(credit=pb.Credit(records=len(texts))))
                elif kind == "acked":
                    texts = waiting.pop(answer.acked.number)
                    if not answer.acked.HasField("problem"):
                        caller.done += texts
                if caller.stopping.is_set():
                    out.end()
        finally:
            out.end()

    return work


def streaming_jobs() -> Callable[[StreamCaller, grpc.Channel], None]:
    def work(caller: StreamCaller, channel: grpc.Channel) -> None:
        stub: Any = QueueServiceStub(channel)  # type: ignore[no-untyped-call]
        opened = queues_pb2.OpenJobs(queue="stream-tasks", credit=20, lease_ms=3000, timeout_ms=3000)
        out = Outgoing(queues_pb2.StreamJobsRequest(open=opened))
        try:
            for answer in stub.StreamJobs(iter(out), timeout=10):
                if answer.jobs:
                    caller.seen |= {each.value.decode() for each in answer.jobs}
                    leases = {each.lease: each.value.decode() for each in answer.jobs}
                    request = queues_pb2.AckJobsRequest(queue="stream-tasks", leases=list(leases))
                    lost = set(stub.AckJobs(request, timeout=5).lost)
                    caller.done += [text for lease, text in leases.items() if lease not in lost]
                    credit = queues_pb2.JobCredit(jobs=len(leases))
                    out.put(queues_pb2.StreamJobsRequest(credit=credit))
                if caller.stopping.is_set():
                    out.end()
        finally:
            out.end()

    return work


def _told(error: Any) -> dict[str, str] | None:
    """What the gateway says of the error; None if it is the connection's, or the deadline's."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return None
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return {"retriable": "false"}
    return {"reason": info.reason, **info.metadata}


def reader() -> Callable[[Caller], None]:
    """At least once: what was read is done when it is acknowledged; a session that is gone is opened anew."""
    session: list[str] = []

    def read(caller: Caller) -> None:
        if not session:
            opened = caller.ask("POST", "/v1/groups/billing/sessions", json={"topics": ["orders"], "timeout_ms": 3000})
            if opened is None:
                return
            session.append(opened["session"])
        path = f"/v1/sessions/{session[0]}"
        found = caller.ask("GET", f"{path}/records", gone=(409, 410, 421), params={"wait_ms": 200, "format": "text"})
        if found is not None and not found["records"]:
            return
        acked = None
        if found is not None:
            caller.seen |= {each["text"] for each in found["records"]}
            places = [{name: each[name] for name in _PLACE} for each in found["records"]]
            acked = caller.ask("POST", f"{path}/ack", gone=(400, 409, 410, 421), json={"records": places})
        if acked is None:
            session.clear()
        else:
            caller.done += [each["text"] for each in found["records"]]

    return read


def worker() -> Callable[[Caller], None]:
    def work(caller: Caller) -> None:
        params = {"max": 10, "wait_ms": 200, "lease_ms": 3000, "format": "text"}
        found = caller.ask("POST", "/v1/queues/tasks/jobs/lease", params=params)
        jobs = found["jobs"] if found else []
        if jobs:
            caller.seen |= {each["text"] for each in jobs}
            leases = [each["lease"] for each in jobs]
            # 409: the leases have ended while nobody answered, and others were given the jobs.
            told = caller.ask("POST", "/v1/queues/tasks/ack", gone=(409,), json={"leases": leases})
            lost = set(leases) if told is None else set(told["lost"])
            caller.done += [each["text"] for each in jobs if each["lease"] not in lost]

    return work


def test_a_gateway_a_leader_and_a_node_are_killed_under_callers(tmp_path: Path) -> None:
    with ray_cluster("b1", "b2", "b3") as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", partitions=2, replication=3)
        rq.create_topic("calls", partitions=2, replication=3)
        tasks = rq.queue("tasks", replication=3, max_deliveries=None)
        gateways = fleet.start(rq, GatewaySettings(rest_port=0, grpc_port=0, session_timeout_ms=3000))
        urls = [each["rest"] for each in gateways]
        kinds = {"publisher": publisher(), "putter": putter(), "reader": reader(), "worker": worker()}
        callers: dict[str, Any] = {name: Caller(urls, work) for name, work in kinds.items()}
        callers["rpc"] = RpcCaller([each["grpc"] for each in gateways])

        def go_on(what: str) -> None:
            before = {name: len(each.done) for name, each in callers.items()}
            wait_for(lambda: all(len(each.done) >= before[name] + _MORE for name, each in callers.items()), what, 90)

        go_on("every caller to begin")
        os.kill(gateways[0]["pid"], signal.SIGKILL)
        go_on("callers after a gateway's death")
        faults.kill_leader(rq, "tasks")
        faults.kill_leader(rq, "orders")
        go_on("callers after the leaders' death")
        cluster.kill("b3")
        go_on("callers after a node's death")
        for name in ("publisher", "putter", "rpc"):
            callers[name].stop()

        def all_done() -> bool:
            read, worked = callers["reader"].seen, callers["worker"].seen
            return bool(set(callers["publisher"].done) <= read and set(callers["putter"].done) <= worked)

        wait_for(all_done, "all that was acknowledged to be read and worked on", 90)
        wait_for(lambda: tasks.size().ready + tasks.size().leased == 0, "the queue to be empty", 60)
        for name in ("reader", "worker"):
            callers[name].stop()
        assert [told for each in callers.values() for told in each.refused] == []
        # An acknowledged ack never comes back: each job was done once, though its gateway, leader and node died.
        worked = callers["worker"].done
        assert len(worked) == len(set(worked))
        with rq.consumer("calls") as consumer:
            found: list[str] = []

            def read_all() -> bool:
                found.extend((each.value or b"").decode() for each in consumer.poll(max_records=10_000, timeout_ms=500))
                return set(callers["rpc"].done) <= set(found) and not any(consumer.lag().values())

            wait_for(read_all, "all that was acknowledged over gRPC", 60)
        assert len(found) == len(set(found)), "an idempotency key was written twice"
        fleet.stop(rq)


def test_a_gateway_and_leaders_are_killed_under_streams(tmp_path: Path) -> None:
    """A stream that breaks is opened again; what was answered on it is there, and each job ends once."""
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("streams", partitions=2, replication=3)
        tasks = rq.queue("stream-tasks", replication=3, max_deliveries=None)
        gateways = fleet.start(rq, GatewaySettings(rest_port=0, grpc_port=0, session_timeout_ms=3000))
        addresses = [each["grpc"] for each in gateways]
        callers = {
            name: StreamCaller(addresses, work)
            for name, work in {"produce": producing(), "subscribe": subscribing(), "jobs": streaming_jobs()}.items()
        }
        put: list[str] = []
        ended = threading.Event()

        def putting() -> None:
            for number in count():
                if ended.wait(0.02):
                    return
                tasks.put(f"j{number}".encode())
                put.append(f"j{number}")

        thread = threading.Thread(target=putting, daemon=True)
        thread.start()

        def go_on(what: str) -> None:
            before = {name: len(each.done) for name, each in callers.items()}
            wait_for(lambda: all(len(each.done) >= before[name] + _MORE for name, each in callers.items()), what, 90)

        go_on("every stream to begin")
        os.kill(gateways[0]["pid"], signal.SIGKILL)
        go_on("streams after a gateway's death")
        faults.kill_leader(rq, "streams")
        faults.kill_leader(rq, "stream-tasks")
        go_on("streams after the leaders' death")
        ended.set()
        thread.join(60)
        callers["produce"].stop()
        wait_for(lambda: set(callers["produce"].done) <= callers["subscribe"].seen, "all that was answered", 60)
        wait_for(lambda: tasks.size().ready + tasks.size().leased == 0, "the queue to be empty", 60)
        for name in ("subscribe", "jobs"):
            callers[name].stop()
        assert [told for each in callers.values() for told in each.refused] == []
        assert set(put) <= callers["jobs"].seen
        worked = callers["jobs"].done
        assert len(worked) == len(set(worked))
        fleet.stop(rq)
