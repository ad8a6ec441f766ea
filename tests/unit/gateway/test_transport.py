"""Transport: TLS for both listeners, and a stop that answers what is under way."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from rayqueue.config import GatewaySettings
from rayqueue.errors import ConfigError
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.rpc.v1 import admin_pb2
from rayqueue.gateway.rpc.v1.admin_pb2_grpc import AdminServiceStub
from rayqueue.gateway.server import Gateway, GatewayThread
from rayqueue.protocol.topics import TopicSettings, declared
from rayqueue.testing import memory, wait_for


def stub_of(channel: grpc.Channel, kind: Any = AdminServiceStub) -> Any:
    return kind(channel)


@pytest.mark.slow
def test_tls_for_rest_and_grpc(rq: memory.MemoryQueue, start: Callable[..., Gateway], tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert("localhost", "127.0.0.1")
    cert, key, root = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued.private_key_pem.write_to_path(key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    ca.cert_pem.write_to_path(root)
    token, _ = KeyStore(rq).create("all", ["*:*:*"])
    gateway = start(host="0.0.0.0", tls_cert_path=cert, tls_key_path=key)
    headers = {"Authorization": f"Bearer {token.text}"}
    trusting = ssl.create_default_context(cafile=str(root))
    url = f"https://127.0.0.1:{gateway.rest_port}/v1/topics"
    assert httpx.get(url, headers=headers, verify=trusting).status_code == 200
    assert httpx.get(url, verify=trusting).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(url, headers=headers)
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"), headers=headers)
    trusted = grpc.ssl_channel_credentials(root.read_bytes())
    metadata = [("authorization", headers["Authorization"])]
    with grpc.secure_channel(f"127.0.0.1:{gateway.grpc_port}", trusted) as channel:
        assert not stub_of(channel).ListTopics(admin_pb2.ListTopicsRequest(), metadata=metadata).topics
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel, pytest.raises(grpc.RpcError):
        stub_of(channel).ListTopics(admin_pb2.ListTopicsRequest(), metadata=metadata, timeout=5)


@pytest.mark.slow
def test_who_does_not_finish_the_handshake_is_counted_and_hung_up_on(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], tmp_path: Path
) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    gateway = start(tls_cert_path=cert, tls_key_path=key, slow_timeout_ms=1500, max_connections_per_source=5)
    where = ("127.0.0.1", gateway.rest_port)
    sockets = [socket.create_connection(where, timeout=5) for _ in range(5)]
    wait_for(lambda: sum(gateway.limits.connections._held.values()) == 5, "all to be counted")
    with socket.create_connection(where, timeout=1) as sixth:
        assert not received(sixth), "one more than this address may have"
    for each in sockets:
        assert not received(each), "it is hung up on in time"
        each.close()
    wait_for(lambda: not gateway.limits.connections._held, "their places to be free")
    with socket.create_connection(where, timeout=5) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
        received(nonsense)
    with httpx.Client(base_url=f"https://127.0.0.1:{gateway.rest_port}", verify=False) as rest:
        assert rest.get("/healthz").status_code == 200
        for _ in range(50):  # each shakes hands anew
            assert rest.get("/healthz", headers={"Connection": "close"}).status_code == 200
        assert rest.get("/healthz").status_code == 200
        assert sum(gateway.limits.connections._held.values()) == 1
    wait_for(lambda: not gateway.limits.connections._held, "its place to be free")


def test_no_handshake_is_lost_however_quick_the_caller_is(
    rq: memory.MemoryQueue, start: Callable[..., Gateway], tmp_path: Path
) -> None:
    """What a caller sends at once was taken from the handshake now and then, which hung until its time was up."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    gateway = start(tls_cert_path=cert, tls_key_path=key)
    tls = ssl._create_unverified_context()

    def ask() -> None:
        for _ in range(50):
            with tls.wrap_socket(socket.create_connection(("127.0.0.1", gateway.rest_port), timeout=5)) as made:
                made.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert made.recv(12) == b"HTTP/1.1 200"

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(ask) for _ in range(3)]:
            done.result()
    wait_for(lambda: not gateway.limits.connections._held, "all places to be free")


def received(made: socket.socket) -> bytes:
    try:
        return made.recv(1)
    except ConnectionError:
        return b""


def test_a_certificate_that_cannot_be_read_is_said(rq: memory.MemoryQueue, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    settings = GatewaySettings(
        rest_port=0, grpc_port=0, tls_cert_path=tmp_path / "cert.pem", tls_key_path=tmp_path / "key.pem"
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        GatewayThread(rq, settings).start()


@pytest.mark.slow
def test_a_stop_answers_what_is_under_way_and_leaves_groups(rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders")
    thread = GatewayThread(rq, GatewaySettings(rest_port=0, grpc_port=0))
    gateway = thread.start()
    url = f"http://127.0.0.1:{gateway.rest_port}"
    session = httpx.post(f"{url}/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    answers: list[int] = []

    def wait() -> None:
        answer = httpx.get(f"{url}/v1/sessions/{session}/records", params={"wait_ms": 2000}, timeout=30)
        answers.append(answer.status_code)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: any(each.members for each in rq.groups()), "a member")
    began_s = time.monotonic()
    thread.stop()
    waiting.join(30)
    assert answers == [200]
    assert time.monotonic() - began_s < 25
    assert not rq.group("g").members
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/healthz")


def test_a_port_that_is_taken_is_said(gateway: Gateway, rq: memory.MemoryQueue) -> None:
    ports: list[dict[str, Any]] = [
        {"rest_port": gateway.rest_port, "grpc_port": 0},
        {"rest_port": 0, "grpc_port": gateway.grpc_port},
    ]
    for taken in ports:
        with pytest.raises(ConfigError, match="cannot listen"):
            GatewayThread(rq, GatewaySettings(**taken)).start()


def test_the_proto_has_no_setting_that_topics_have_not() -> None:
    assert set(admin_pb2.TopicSettings.DESCRIPTOR.fields_by_name) <= set(declared(TopicSettings))
