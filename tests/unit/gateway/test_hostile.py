"""Hostile callers of REST: whatever they send gets a typed answer below 500, or no answer and a closed socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from uvicorn import Config
from uvicorn.server import ServerState

from rayqueue.config import GatewaySettings
from rayqueue.gateway.limits import Slots
from rayqueue.gateway.rest.connections import protocol_of
from rayqueue.gateway.rest.openapi import document
from rayqueue.gateway.server import Gateway
from rayqueue.gateway.values import depth_of
from rayqueue.testing import memory, wait_for

PUBLISH = "/v1/topics/orders/records"
CHUNKED = b"POST " + PUBLISH.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def small(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> Gateway:
    rq.create_topic("orders")
    return start(max_body_bytes=100_000, slow_timeout_ms=700, max_connections_per_source=20)


def send(gateway: Gateway, data: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", gateway.rest_port), timeout=15)
    made.sendall(data)
    return made


def post(gateway: Gateway, body: bytes, **headers: str) -> httpx.Response:
    url = f"http://127.0.0.1:{gateway.rest_port}{PUBLISH}"
    return httpx.post(url, content=body, headers={"Content-Type": "application/json", **headers}, timeout=30)


def closed(made: socket.socket) -> bool:
    """Whether the other side has hung up, whatever it has said before."""
    try:
        while made.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"records":[]}',
        b'{"records":[{"value":1,"text":"x"}]}',
        b'{"records":[{"base64":"*"}]}',
        b'{"records":[{"text":"\\ud800"}]}',
        b'{"records":[{"value":"\xff"}]}',
        b'{"records":[{"unknown":1}]}',
        b'{"records":[{"priority":-1}]}',
        b'{"records":[{"priority":7}]}',
        b'{"records":[{"partition":99}]}',
        b'{"records":[{"partition":1e99}]}',
        b'{"records":[{"timestamp_ms":-1}]}',
        b'{"records":[{"timestamp_ms":9007199254740992}]}',
        b'{"records":[{"headers":{"a":1}}]}',
        b'{"records":[{"value":' + b"[" * 65 + b"]" * 65 + b"}]}",
        b'{"records":[{"value":' + b"[" * 40_000 + b"]" * 40_000 + b"}]}",
        b'{"records":[{"value":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}]}",
    ],
)
def test_a_body_that_cannot_be_is_the_callers_mistake(small: Gateway, rq: memory.MemoryQueue, body: bytes) -> None:
    answer = post(small, body)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["code"]
    assert rq.topic("orders").records == 0


def test_values_may_be_nested_as_deep_as_is_said(small: Gateway) -> None:
    assert post(small, b'{"records":[{"value":' + b"[" * 64 + b"]" * 64 + b"}]}").status_code == 200
    text = json.dumps(["[" * 500] * 100).encode()  # brackets in strings are no nesting
    assert post(small, b'{"records":[{"value":' + text + b"}]}").status_code == 200


@pytest.mark.parametrize(
    ("text", "depth"),
    [(b"1", 0), (b"[]", 1), (b'{"a":[{}]}', 3), (b'["[[["]', 1), (b'["\\"[["]', 1), (b"[[], [[]]]", 3)],
)
def test_depth(text: bytes, depth: int) -> None:
    assert depth_of(text, 100) == depth


@pytest.mark.slow
def test_what_is_too_large_is_refused_packed_or_not(small: Gateway) -> None:
    assert post(small, b"x" * 100_001).status_code == 413
    body = b'{"records":[{"text":"' + b"x" * 90_000 + b'"}]}'
    assert post(small, body).status_code == 200
    assert post(small, gzip.compress(body), **{"Content-Encoding": "gzip"}).status_code == 200
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    assert post(small, bomb, **{"Content-Encoding": "gzip"}).status_code == 413
    for wrong in (b"", b"nonsense", gzip.compress(body)[:-9], gzip.compress(body) + b"more", zlib.compress(body)):
        assert post(small, wrong, **{"Content-Encoding": "gzip"}).status_code == 400
    assert post(small, body, **{"Content-Encoding": "br"}).status_code == 415
    assert post(small, body, **{"Content-Type": "text/xml"}).status_code == 415

    def endless() -> Any:
        for _ in range(200):
            yield b" " * 1000

    url = f"http://127.0.0.1:{small.rest_port}{PUBLISH}"
    assert httpx.post(url, content=endless(), headers={"Content-Type": "application/json"}).status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST ",
        b"POST /v1/topics/orders/records HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/topics/orders/records HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
def test_who_does_not_finish_a_request_is_hung_up_on(small: Gateway, begun: bytes) -> None:
    made = send(small, begun)
    begin_s = time.monotonic()
    assert closed(made)
    assert time.monotonic() - begin_s < 14


def test_bytes_that_are_no_http_get_no_further(small: Gateway) -> None:
    for data in (b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000):
        with send(small, data) as made:
            assert closed(made)
    assert post(small, b'{"records":[{"text":"x"}]}').status_code == 200


@pytest.mark.slow
def test_one_address_has_so_many_connections(small: Gateway) -> None:
    held = [send(small, b"") for _ in range(20)]
    try:
        assert closed(send(small, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
    finally:
        for each in held:
            each.close()
    deadline_s = time.monotonic() + 10
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{small.rest_port}/healthz").status_code == 200
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline_s


@pytest.mark.slow
def test_who_asks_too_much_is_told_when_to_come_again(start: Callable[..., Gateway]) -> None:
    gateway = start(requests_per_s=5)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}") as rest:
        answers = [rest.get("/v1/topics") for _ in range(20)]
    refused = [each for each in answers if each.status_code == 429]
    assert refused
    assert refused[0].headers["retry-after"] == "1"
    assert refused[0].json()["code"] == "rate_limited"


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Big: ",
        b"GET /healthz?",
        b"\r\n",
        b"POST "
        + PUBLISH.encode()
        + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Big: ",
        CHUNKED + b"1;a=",
    ],
    ids=["header", "path", "nothing", "trailer", "chunk"],
)
def test_a_head_has_an_end(rq: memory.MemoryQueue, start: Callable[..., Gateway], begun: bytes) -> None:
    """Whoever sends it shows no key before."""
    gateway = start()
    more = b"\r\n" * 5000 if begun == b"\r\n" else b"a" * 10_000
    with send(gateway, begun) as made:

        def flood() -> None:
            for _ in range(20_000_000 // len(more)):
                made.sendall(more)

        with pytest.raises(ConnectionError):
            flood()
    assert httpx.get(f"http://127.0.0.1:{gateway.rest_port}/healthz").status_code == 200


def test_a_large_head_and_small_chunks_are_no_attack(small: Gateway) -> None:
    url = f"http://127.0.0.1:{small.rest_port}"
    with httpx.Client(base_url=url) as rest:
        for _ in range(5):
            assert rest.get("/healthz", headers={"X-Big": "a" * 40_000}).status_code == 200
    body = b'{"records":[{"text":"' + b"x" * 20_000 + b'"}]}'
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    with send(small, CHUNKED + chunks) as made:
        assert made.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.parametrize("closing", [False, True])
def test_who_does_not_take_his_answer_is_hung_up_on(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], closing: bool
) -> None:
    rq.create_topic("orders")
    with rq.producer() as producer:
        producer.send_many("orders", [bytes(10_000)] * 1000)
        producer.flush()
    gateway = start(slow_timeout_ms=500, idle_timeout_ms=1500, max_answer_bytes=10_000_000)
    head = b"GET /v1/topics/orders/records?max=1000 HTTP/1.1\r\nHost: x\r\n"
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", gateway.rest_port))
        made.sendall(head + (b"Connection: close\r\n\r\n" if closing else b"\r\n"))
        made.recv(10)
        wait_for(lambda: not gateway.limits.connections._held, "it to be hung up on", 5)
    with send(gateway, head + b"\r\n") as made:  # slowly, but he does
        made.settimeout(5)
        taken = 0
        while taken < 2_000_000:
            taken += len(made.recv(100_000))
            time.sleep(0.05)


class Taken:
    """A transport, as far as a connection looks at what its caller has not taken."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.aborted = False

    def get_extra_info(self, _: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.size_bytes

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.slow
def test_who_takes_his_answers_may_have_the_next_one_on_its_way() -> None:
    async def run() -> None:
        settings = GatewaySettings(slow_timeout_ms=100)
        config = Config(lambda: None)
        make: Any = protocol_of(settings, Slots("connections", 9))
        connection = make(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
        transport = Taken()
        connection.connection_made(transport)
        connection._arrived()  # the request is there
        for _ in range(30):
            transport.size_bytes += 1  # the one before is taken, and this one is larger
            connection.on_response_complete()
            await asyncio.sleep(0.02)
            assert not transport.aborted
        connection.pause_writing()
        for _ in range(30):
            transport.size_bytes += 1  # a stream that is full again and again
            connection.resume_writing()
            connection.pause_writing()
            await asyncio.sleep(0.02)
            assert not transport.aborted
        await asyncio.sleep(0.3)
        assert transport.aborted
        connection.connection_lost(OSError())

    asyncio.run(run())


def test_pages_and_what_is_not_there_count_as_requests(start: Callable[..., Gateway]) -> None:
    gateway = start(requests_per_s=20)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}") as rest:
        for path in ("/openapi.json", "/nothing", "/console/", "/docs"):
            answers = [rest.get(path) for _ in range(60)]
            refused = [each for each in answers if each.status_code == 429]
            assert len(refused) > 20
            assert refused[0].json()["code"] == "rate_limited"


SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def everything() -> Any:
    from rayqueue.config import GatewaySettings
    from rayqueue.gateway.server import GatewayThread

    with memory.connect() as queue:
        wanted = GatewaySettings(
            rest_port=0, grpc_port=0, requests_per_s=1_000_000, session_timeout_ms=2000, max_topic_partitions=4
        )
        with GatewayThread(queue, wanted) as gateway:
            yield gateway


def test_every_schema_is_one_of_openapi_3_1() -> None:
    """Generators of clients read it too: ``items`` is one schema there, never a list of them."""

    def check(part: Any) -> None:
        if isinstance(part, dict):
            assert isinstance(part.get("items", {}), dict), part
        for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            check(each)

    check(document())


@pytest.mark.slow
@SCHEMA.exclude(path="/v1/topics/{topic}/tail").parametrize()
@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_gateway_fail(case: Any, everything: Gateway) -> None:
    if isinstance(case.query, dict) and "wait_ms" in case.query:
        case.query["wait_ms"] = 10
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{everything.rest_port}",
        checks=[
            schemathesis.checks.not_a_server_error,
            schemathesis.checks.content_type_conformance,
            schemathesis.checks.response_schema_conformance,
        ],
    )
