"""The TCP transport under TLS."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
import trustme

from rayqueue.config import TransportSettings
from rayqueue.raft.messages import Message
from rayqueue.raft.tcp import TlsContexts, tls_contexts
from rayqueue.raft.transport import PeerDown, PeerUp
from tests.unit.raft.tcp_net import (
    DEADLINE_S,
    HOST,
    A,
    B,
    Net,
    append,
    reply,
)


def certificates(folder: Path, name: str, authority: trustme.CA, *, check: bool = True) -> TlsContexts:
    issued = authority.issue_cert(f"{name}.rayqueue.test")
    cert, key, ca = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    return tls_contexts(cert, key, ca if check else None)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("check", [True, False], ids=["mutual", "encrypted only"])
@pytest.mark.slow
def test_tls(net: Net, tmp_path: Path, authority: trustme.CA, check: bool) -> None:
    a = net.node(A, tls=certificates(tmp_path, "a", authority, check=check))
    b = net.node(B, tls=certificates(tmp_path, "b", authority, check=check))
    net.introduce(a, b)
    net.until(lambda: a.connected(B) and b.connected(A))
    large = append(5, random.Random(2).randbytes(4_000_000), b"small")
    sent: list[Message] = [*map(reply, range(2000)), large, *map(reply, range(100))]
    for message in sent:
        assert a.transport.send(B, message)
        assert b.transport.send(A, message)
    net.until(lambda: len(a.received()) == len(b.received()) == len(sent))
    assert a.received() == sent
    assert b.received() == sent
    net.stop(b)
    net.until(lambda: len(a.news()) == 2)
    assert a.news() == [PeerUp(B), PeerDown(B, dead=True)]


def test_tls_bytes_left_in_the_session_are_read_though_the_socket_is_silent(
    net: Net, tmp_path: Path, authority: trustme.CA
) -> None:
    small = TransportSettings(read_budget_bytes=100, read_buffer_bytes=4096)
    a = net.node(A, tls=certificates(tmp_path, "a", authority))
    b = net.node(B, tls=certificates(tmp_path, "b", authority), settings=small)
    net.introduce(a, b)
    net.until(lambda: a.connected(B) and b.connected(A))
    message = append(1, *(b"x" * 1000 for _ in range(14)))
    assert a.transport.send(B, message)
    begin = time.monotonic()
    while not b.received():
        b.poll(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2


def test_tls_of_another_authority_is_refused(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    a = net.node(A, tls=certificates(tmp_path, "a", authority))
    b = net.node(B, tls=certificates(tmp_path, "b", trustme.CA()))
    net.introduce(a, b)
    net.until(lambda: a.transport.handshake_failures > 3 and b.transport.handshake_failures > 3)
    assert a.events == b.events == []


def test_tls_and_plain_do_not_mix(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    a, b = net.node(A, tls=certificates(tmp_path, "a", authority)), net.node(B)
    net.introduce(a, b)
    net.until(lambda: a.transport.handshake_failures > 3 and b.transport.handshake_failures > 3)
    assert a.events == b.events == []


def test_a_man_in_the_middle_cannot_pass_the_handshake_on(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    """Without a CA the dialer takes any certificate. The proof is bound to the TLS session, so relaying fails."""
    a = net.node(A, tls=certificates(tmp_path, "a", authority, check=False))
    b = net.node(B, tls=certificates(tmp_path, "b", authority, check=False))
    middle = certificates(tmp_path, "m", trustme.CA(), check=False)
    relayed = threading.Event()

    def pump(source: ssl.SSLSocket, sink: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                relayed.set()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = server.accept()
                inner = middle.server.wrap_socket(caller, server_side=True)
                outer = middle.client.wrap_socket(socket.create_connection(b.transport.address))
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        a.transport.set_peers({B: server.getsockname()})
        net.until(lambda: relayed.is_set() and b.transport.handshake_failures > 1)
        server.shutdown(socket.SHUT_RDWR)
    assert a.events == b.events == []
