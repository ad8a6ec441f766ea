"""The gateway: REST and gRPC, in messages and in requests per second, beside plain echoes.

    python benchmarks/gateway.py [--quick] [--soak SECONDS] [--json]

One gateway, an actor of its own; a topic of one partition on three replicas,
fsync before every acknowledgement; 100 B. The callers are threads of this
process, over loopback.

``rest_batch100``  POST of 100 records at a time, 64 callers: each waits for its answer, so with few of them it is the
                   time of an fsync that is measured
``grpc_publish``   one stream of batches of 500 records, 32 under way
``grpc_subscribe`` one subscription that reads a topic from its beginning, acknowledging every 5,000
``single``         the same with one record in each request, as callers send that have one: 64 callers of REST, 64 unary
                   calls of gRPC under way. The gateway batches across them
``p50``, ``p99``   one caller, one record: from the request to its acknowledgement
``echo``           the same requests, to a FastAPI route that looks at nothing of the body, and to a gRPC method that
                   decodes the message; both answer with the bytes of one of the gateway's answers, made beforehand: as
                   much comes in and goes out, and nothing is done for it. The limit of the servers alone
``model_echo``     the same requests, to a FastAPI route that has pydantic models of the body and of the answer, as most
                   have; to a gRPC method that answers with a place for each record. They do the gateway's work but for
                   the queue's
``memory``         of the gateway under load; with ``--soak`` that alone, for so many seconds

``rest_to_echo``, ``rest_to_model_echo``, ``rest_single_to_echo`` and their kin are the gateway's requests per second as
a part of the echo's, for the same requests.
The echo has a core for itself; the gateway shares the machine with three replicas that write what it is sent.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

import rayqueue
from benchmarks._bench import Bench, parser, percentile
from rayqueue.client.embedded import embedded_ray
from rayqueue.config import GatewaySettings
from rayqueue.gateway import fleet
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceStub

VALUE_BYTES = 100
REST_BATCH = 100
GRPC_BATCH = 500
CALLERS = 64
UNDER_WAY = 32
ACK_EVERY = 5_000
TOPIC = "gateway"


# -- HTTP -------------------------------------------------------------------------------------------


class Http:
    """One connection. The request is made once: what is measured is the server."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._read = b""

    def post(self) -> None:
        self._socket.sendall(self._request)
        data = self._read
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head = data[:end].lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"the answer was {data[:300]!r}")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(data) < end + 4 + length:
            data += self._more()
        self._read = data[end + 4 + length :]

    def _more(self) -> bytes:
        found = self._socket.recv(1 << 16)
        if not found:
            raise SystemExit("the server has hung up")
        return found


def rest_rate(port: int, path: str, body: bytes, seconds: float) -> float:
    """Requests per second of several callers."""
    counts = [0] * CALLERS
    stop_s = time.perf_counter() + seconds

    def run(number: int) -> None:
        connection = Http(port, path, body)
        while time.perf_counter() < stop_s:
            connection.post()
            counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CALLERS)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began_s)


def rest_latency(port: int, path: str, body: bytes, count: int) -> list[float]:
    connection = Http(port, path, body)
    took_ms = []
    for _ in range(count):
        began_s = time.perf_counter()
        connection.post()
        took_ms.append((time.perf_counter() - began_s) * 1000)
    return took_ms


def batch(count: int) -> bytes:
    return json.dumps({"records": [{"text": "x" * VALUE_BYTES}] * count}).encode()


# -- gRPC -------------------------------------------------------------------------------------------


def produce_rate(call: Any, seconds: float) -> float:
    """Requests per second over one stream, so many of them under way."""
    records = [common_pb2.NewRecord(value=b"x" * VALUE_BYTES)] * GRPC_BATCH
    request = pb.ProduceRequest(topic=TOPIC, records=records)
    room = threading.Semaphore(UNDER_WAY)
    stop_s = time.perf_counter() + seconds

    def requests() -> Iterator[pb.ProduceRequest]:
        while time.perf_counter() < stop_s:
            room.acquire()
            yield request

    began_s = time.perf_counter()
    answered = 0
    for answer in call(requests()):
        if answer.problem.code:
            raise SystemExit(f"the answer was {answer.problem}")
        answered += 1
        room.release()
    return answered / (time.perf_counter() - began_s)


def append_rate(call: Any, seconds: float) -> float:
    """Unary calls of one record per second, so many of them under way."""
    request = pb.AppendRequest(topic=TOPIC, records=[common_pb2.NewRecord(value=b"x" * VALUE_BYTES)])
    room = threading.Semaphore(CALLERS)
    began_s = time.perf_counter()
    asked = []
    while time.perf_counter() < began_s + seconds:
        room.acquire()
        answer = call.future(request)
        answer.add_done_callback(lambda _: room.release())
        asked.append(answer)
    for answer in asked:
        answer.result()
    return len(asked) / (time.perf_counter() - began_s)


def append_latency(stub: Any, count: int) -> list[float]:
    request = pb.AppendRequest(topic=TOPIC, records=[common_pb2.NewRecord(value=b"x" * VALUE_BYTES)])
    took_ms = []
    for _ in range(count):
        began_s = time.perf_counter()
        stub.Append(request)
        took_ms.append((time.perf_counter() - began_s) * 1000)
    return took_ms


def subscribe_rate(stub: Any, seconds: float, most: int) -> float:
    """Records per second."""
    waiting: deque[pb.SubscribeRequest] = deque()
    bell = threading.Semaphore(0)

    def send(**message: Any) -> None:
        waiting.append(pb.SubscribeRequest(**message))
        bell.release()

    def requests() -> Iterator[pb.SubscribeRequest]:
        while True:
            bell.acquire()
            request = waiting.popleft()
            if request.WhichOneof("message") == "heartbeat":
                return
            yield request

    send(join=pb.Join(group="bench", topics=[TOPIC], credit=2 * ACK_EVERY))
    got = unacked = 0
    began_s = stop_s = 0.0
    for answer in stub.Subscribe(requests()):
        found = len(answer.records.records)
        if not found:
            continue
        if not got:
            began_s = time.perf_counter()
            stop_s = began_s + seconds
        got += found
        unacked += found
        send(credit=pb.Credit(records=found))
        if unacked >= ACK_EVERY:
            send(ack=pb.AckRecords(through=answer.records.cursor))
            unacked = 0
        if time.perf_counter() > stop_s or got >= most:
            break
    took_s = time.perf_counter() - began_s
    send(heartbeat=pb.Heartbeat())
    return got / took_s


# -- echoes -----------------------------------------------------------------------------------------


class New(BaseModel):
    text: str | None = None
    base64: str | None = None
    key: str | None = None
    headers: dict[str, str] | None = None
    priority: int = 0


class Batch(BaseModel):
    records: list[New]


class Written(BaseModel):
    partition: int
    offset: int
    timestamp_ms: int


class Places(BaseModel):
    topic: str
    records: list[Written]


NOW_MS = 1_700_000_000_000
OFFSET = 1_000_000


def http_answer(count: int) -> bytes:
    """As long as the gateway's."""
    rows = range(OFFSET, OFFSET + count)
    places = [Written(partition=0, offset=row, timestamp_ms=NOW_MS) for row in rows]
    return Places(topic=TOPIC, records=places).model_dump_json().encode()


def serve_http_echo(ready: Any) -> None:
    app = FastAPI()

    many, one = http_answer(REST_BATCH), http_answer(1)

    async def echo(request: Request) -> Response:
        await request.body()
        return Response(many, media_type="application/json")

    async def echo_one(request: Request) -> Response:
        await request.body()
        return Response(one, media_type="application/json")

    async def model_echo(body: Batch) -> Places:
        return Places(
            topic=TOPIC,
            records=[
                Written(partition=0, offset=OFFSET + row, timestamp_ms=NOW_MS) for row in range(len(body.records))
            ],
        )

    app.add_api_route("/echo", echo, methods=["POST"])
    app.add_api_route("/echo_one", echo_one, methods=["POST"])
    app.add_api_route("/model_echo", model_echo, methods=["POST"])
    listening = socket.create_server(("127.0.0.1", 0))
    ready.put(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listening])


def serve_grpc_echo(ready: Any) -> None:
    async def run() -> None:
        def places(count: int) -> list[common_pb2.Written]:
            rows = range(OFFSET, OFFSET + count)
            return [common_pb2.Written(partition=0, offset=row, timestamp_ms=NOW_MS) for row in rows]

        answer = pb.ProduceResponse(records=places(GRPC_BATCH)).SerializeToString()

        async def echo(requests: Any, context: Any) -> Any:
            async for request in requests:
                assert len(request.records) == GRPC_BATCH
                yield answer

        async def model_echo(requests: Any, context: Any) -> Any:
            async for request in requests:
                told = pb.ProduceResponse(number=request.number, records=places(len(request.records)))
                yield told.SerializeToString()

        one = pb.AppendResponse(records=places(1)).SerializeToString()

        async def echo_one(request: Any, context: Any) -> Any:
            assert len(request.records) == 1
            return one

        server = grpc.aio.server()
        handlers: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(serving, pb.ProduceRequest.FromString, None)
            for name, serving in (("Echo", echo), ("ModelEcho", model_echo))
        }
        handlers["EchoOne"] = grpc.unary_unary_rpc_method_handler(echo_one, pb.AppendRequest.FromString, None)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
        ready.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def started(serve: Any) -> tuple[Any, int]:
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue()
    process = context.Process(target=serve, args=(ready,), daemon=True)
    process.start()
    port: int = ready.get(timeout=60)
    time.sleep(0.5)
    return process, port


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- all of it ------------------------------------------------------------------------------------------


def measure_rest(bench: Bench, port: int, seconds: float, latencies: int) -> None:
    path = f"/v1/topics/{TOPIC}/records"
    rest_rate(port, path, batch(REST_BATCH), 1.0)
    requests = rest_rate(port, path, batch(REST_BATCH), seconds)
    singles = rest_rate(port, path, batch(1), seconds)
    latency_ms = rest_latency(port, path, batch(1), latencies)
    process, echo_port = started(serve_http_echo)
    try:
        rest_rate(echo_port, "/echo", batch(REST_BATCH), 1.0)
        echo = rest_rate(echo_port, "/echo", batch(REST_BATCH), seconds)
        model_echo = rest_rate(echo_port, "/model_echo", batch(REST_BATCH), seconds)
        echo_one = rest_rate(echo_port, "/echo_one", batch(1), seconds)
    finally:
        process.terminate()
    bench.add(rest_batch100_msgs_per_s=requests * REST_BATCH, rest_requests_per_s=requests, rest_echo_per_s=echo)
    bench.add(rest_model_echo_per_s=model_echo, rest_to_echo=requests / echo, rest_to_model_echo=requests / model_echo)
    bench.add(rest_single_per_s=singles, rest_echo_single_per_s=echo_one, rest_single_to_echo=singles / echo_one)
    bench.add(rest_p50_ms=percentile(latency_ms, 50), rest_p99_ms=percentile(latency_ms, 99))


def measure_grpc(bench: Bench, address: str, seconds: float, latencies: int) -> None:
    kind: Any = RecordServiceStub
    with grpc.insecure_channel(address) as channel:
        stub = kind(channel)
        produce_rate(stub.Produce, 1.0)
        requests = produce_rate(stub.Produce, seconds)
        singles = append_rate(stub.Append, seconds)
        latency_ms = append_latency(stub, latencies)
        subscribed = subscribe_rate(stub, seconds, int(requests * seconds * GRPC_BATCH * 0.9))
    process, echo_port = started(serve_grpc_echo)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{echo_port}") as channel:
            calls: list[Any] = [
                channel.stream_stream(
                    f"/bench.Echo/{name}", pb.ProduceRequest.SerializeToString, pb.ProduceResponse.FromString
                )
                for name in ("Echo", "ModelEcho")
            ]
            produce_rate(calls[0], 1.0)
            echo, model_echo = (produce_rate(call, seconds) for call in calls)
            one: Any = channel.unary_unary(
                "/bench.Echo/EchoOne", pb.AppendRequest.SerializeToString, pb.AppendResponse.FromString
            )
            echo_one = append_rate(one, seconds)
    finally:
        process.terminate()
    bench.add(grpc_publish_msgs_per_s=requests * GRPC_BATCH, grpc_requests_per_s=requests, grpc_echo_per_s=echo)
    bench.add(grpc_model_echo_per_s=model_echo, grpc_subscribe_msgs_per_s=subscribed)
    bench.add(grpc_to_echo=requests / echo, grpc_to_model_echo=requests / model_echo)
    bench.add(grpc_single_per_s=singles, grpc_echo_single_per_s=echo_one, grpc_single_to_echo=singles / echo_one)
    bench.add(grpc_p50_ms=percentile(latency_ms, 50), grpc_p99_ms=percentile(latency_ms, 99))


def measure_memory(bench: Bench, told: dict[str, Any], seconds: float) -> None:
    """The growth of the gateway's memory under load: in all, and in the second half of the time."""
    port = int(told["rest"].rpartition(":")[2])
    seen = [memory_mb(told["pid"])]
    for _ in range(2):
        rest_rate(port, f"/v1/topics/{TOPIC}/records", batch(REST_BATCH), seconds / 2)
        seen.append(memory_mb(told["pid"]))
    before, half, after = seen
    bench.add(memory_s=seconds, memory_before_mb=before, memory_after_mb=after)
    bench.add(memory_grown_mb=after - before, memory_grown_second_half_mb=after - half)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--soak", type=float, metavar="SECONDS", help="the gateway's memory alone, for so long")
    options = arguments.parse_args()
    bench = Bench("gateway", options)
    seconds, latencies, long_s = (3.0, 200, 5.0) if bench.quick else (20.0, 3000, 300.0)
    with bench.data_dir() as data_dir, bench.progress(4) as steps, embedded_ray():
        steps.next("start")
        rq = rayqueue.connect(data_dir=data_dir)
        try:
            rq.create_topic(TOPIC, partitions=1, replication=3)
            limits: dict[str, Any] = {"requests_per_s": 1_000_000, "bytes_per_s": 1 << 40}
            (told,) = fleet.start(rq, GatewaySettings(rest_port=0, grpc_port=0, **limits), count=1)
            if options.soak is None:
                steps.next("REST")
                measure_rest(bench, int(told["rest"].rpartition(":")[2]), seconds, latencies)
                steps.next("gRPC")
                measure_grpc(bench, told["grpc"], seconds, latencies)
            steps.next("memory")
            measure_memory(bench, told, options.soak or long_s)
        finally:
            rq.shutdown()
    bench.table("Gateway, three replicas, fsync, 100 B", ("", ""), list(bench.figures.items()))
    bench.finish()


if __name__ == "__main__":
    main()
