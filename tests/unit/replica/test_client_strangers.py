"""Clients that do not behave: garbage, wrong tokens, half-open connections, too many, and those who never read."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rayqueue.errors import InvalidInputError, OversizedBatchError, QueueFullError, RayQueueError, TransportError
from rayqueue.net.channel import Channel
from rayqueue.partition import PartitionSettings
from rayqueue.protocol import calls, hello
from rayqueue.protocol.calls import decode_answer, encode_call
from rayqueue.protocol.data import Cursor, FetchRequest, encode_fetch
from rayqueue.protocol.failures import decode_failure
from rayqueue.protocol.frames import HEAD, Kind, head
from rayqueue.testing import wait_for
from tests.unit.net.client_net import TIMEOUT_S, Cluster, RawClient, at, batch

pytestmark = pytest.mark.slow


@contextmanager
def cluster_of(tmp_path: Path, nodes: int = 1, **named: Any) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, nodes, **named)
    try:
        yield cluster
    finally:
        cluster.close()


def works(cluster: Cluster) -> None:
    """A client that behaves is served."""

    async def scenario() -> None:
        channel = await cluster.open()
        assert (await channel.append(batch())).count == 1
        channel.close()

    cluster.run(scenario())


def clients_of(cluster: Cluster) -> int:
    return len(cluster.replica.clients)


def drained(connection: socket.socket) -> int:
    """Bytes that come until the other side hangs up. ``TimeoutError`` if it does not."""
    received = 0
    with suppress(ConnectionError):
        while data := connection.recv(4096):
            received += len(data)
    return received


def frame(kind: int, request: int, body: bytes = b"") -> bytes:
    return head(kind, request, len(body)) + body


# -- the handshake ----------------------------------------------------------------------


def test_without_the_token_nobody_is_served(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        with pytest.raises(ConnectionError):
            RawClient(cluster.endpoint(), token=b"x" * 32)

        async def scenario() -> None:
            with pytest.raises(TransportError):
                await Channel.open(cluster.endpoint()._replace(token=b"x" * 32), cluster.settings)

        cluster.run(scenario())
        assert clients_of(cluster) == 0
        works(cluster)


def test_a_replica_without_the_token_is_not_believed(tmp_path: Path) -> None:
    """Somebody else may listen where a replica did."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(hello.HELLO_BYTES)
            connection.sendall(hello.hello(os.urandom(32)))
            connection.recv(hello.MAC_BYTES)
            connection.sendall(os.urandom(hello.MAC_BYTES))
            connection.recv(1)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with cluster_of(tmp_path) as cluster:

        async def scenario() -> None:
            elsewhere = cluster.endpoint()._replace(port=listener.getsockname()[1])
            with pytest.raises(TransportError):
                await Channel.open(elsewhere, cluster.settings)

        cluster.run(scenario())
    thread.join(TIMEOUT_S)
    listener.close()


def test_one_that_stops_in_the_middle_of_the_handshake_is_given_up(tmp_path: Path) -> None:
    with cluster_of(tmp_path, transport={"handshake_timeout_ms": 200, "max_unauthenticated": 4}) as cluster:
        silent = [socket.create_connection(cluster.endpoint()[:2], TIMEOUT_S) for _ in range(10)]
        for number, connection in enumerate(silent):
            connection.sendall(hello.hello(bytes(32))[: number * 4])
        works(cluster)
        for connection in silent:  # the oldest for lack of room, the others when their time is up
            connection.settimeout(TIMEOUT_S)
            assert drained(connection) in (0, hello.HELLO_BYTES)
            connection.close()


def test_strangers_at_the_port(tmp_path: Path) -> None:
    rng = random.Random(3)
    with cluster_of(tmp_path) as cluster:
        for start in (b"", b"R", b"RQ", b"RQC", b"RQH", hello.hello(bytes(32)), b"GET / HTTP/1.1\r\n"):
            with socket.create_connection(cluster.endpoint()[:2], TIMEOUT_S) as stranger:
                stranger.sendall(start + rng.randbytes(4000))
                drained(stranger)
        works(cluster)


# -- frames ---------------------------------------------------------------------------


def test_garbage_from_one_who_has_the_token(tmp_path: Path) -> None:
    """It is answered with typed errors, or hung up on; everybody else is served on."""
    rng = random.Random(7)
    kinds = [*Kind, 0, 77]
    with cluster_of(tmp_path) as cluster:
        for _ in range(30):
            client = RawClient(cluster.endpoint())
            sent = 0
            for _ in range(rng.randrange(1, 40)):
                kind = rng.choice(kinds)
                client.socket.sendall(frame(kind, rng.randrange(1, 2**32), rng.randbytes(rng.randrange(200))))
                sent += kind != Kind.APPEND_UNACKED
            answered = 0
            while answered < sent:
                for answer in client.frames():
                    assert answer.kind == Kind.FAILED
                    assert isinstance(decode_failure(answer.body), RayQueueError)
                    answered += 1
            client.close()
        for _ in range(30):
            client = RawClient(cluster.endpoint())
            client.socket.sendall(rng.randbytes(3000))
            client.socket.shutdown(socket.SHUT_WR)
            assert client.is_closed()
            client.close()
        works(cluster)
        wait_for(lambda: clients_of(cluster) == 0, "all to be gone")


def test_a_frame_that_is_too_large_is_hung_up_on_with_a_reason(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        client = RawClient(cluster.endpoint())
        client.socket.sendall(HEAD.pack(2**31, Kind.APPEND, 1) + bytes(1000))
        (answer,) = client.frames()
        assert (answer.kind, answer.request) == (Kind.FAILED, 0)
        assert type(decode_failure(answer.body)) is TransportError
        client.close()

        async def scenario() -> None:
            channel = await cluster.open()
            pending = channel.fetch(at(0, wait_ms=300))
            with pytest.raises(OversizedBatchError, match="at most"):  # not sent: it would take the others with it
                await channel.append(bytes(1 << 25))
            await pending

        cluster.run(scenario())
        works(cluster)


def test_half_of_a_frame_holds_up_nobody(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        client = RawClient(cluster.endpoint())
        whole = frame(Kind.APPEND, 5, batch(b"slow"))
        for at_byte in range(len(whole) - 1):
            client.socket.sendall(whole[at_byte : at_byte + 1])
        works(cluster)
        client.socket.sendall(whole[-1:])
        assert [answer.request for answer in client.frames()] == [5]
        client.close()


def test_a_client_that_goes_leaves_nothing_behind(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        parked = cluster.replica.service.fetches.parked
        for reset in (False, True):
            client = RawClient(cluster.endpoint())
            for request in range(100):
                client.socket.sendall(frame(Kind.FETCH, request + 1, encode_fetch(at(0, wait_ms=30_000))))
            wait_for(lambda: len(parked) == 100, "the fetches to wait")
            if reset:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            wait_for(lambda: len(parked) == 0, "the fetches to be forgotten")
            assert clients_of(cluster) == 0
        works(cluster)


# -- bounds ------------------------------------------------------------------------------


def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    with cluster_of(tmp_path, calls={"max_clients": 5}) as cluster:
        clients = [RawClient(cluster.endpoint()) for _ in range(5)]
        wait_for(lambda: clients_of(cluster) == 5, "five clients")
        one_more = RawClient(cluster.endpoint())
        (answer,) = one_more.frames()
        assert (answer.request, type(decode_failure(answer.body))) == (0, QueueFullError)
        assert one_more.is_closed()
        clients.pop().close()
        wait_for(lambda: clients_of(cluster) == 4, "one to be gone")
        works(cluster)
        for client in clients:
            client.close()


def test_too_many_requests_of_one_client_are_refused(tmp_path: Path) -> None:
    with cluster_of(tmp_path, calls={"max_unanswered": 50}) as cluster:
        client = RawClient(cluster.endpoint())
        waiting = frame(Kind.FETCH, 0, encode_fetch(at(0, wait_ms=30_000)))
        client.socket.sendall(b"".join(waiting[:5] + struct.pack("<I", n) + waiting[9:] for n in range(1, 61)))
        refused: list[int] = []
        while len(refused) < 10:
            refused += [answer.request for answer in client.frames() if answer.kind == Kind.FAILED]
        assert refused == list(range(51, 61))
        works(cluster)  # which wakes the others
        answered: list[int] = []
        while len(answered) < 50:
            answered += [answer.request for answer in client.frames()]
        assert sorted(answered) == list(range(1, 51))
        client.close()


def test_too_many_waiting_fetches_are_refused(tmp_path: Path) -> None:
    with cluster_of(tmp_path, calls={"max_fetches": 20}) as cluster:

        async def scenario() -> None:
            channel = await cluster.open()
            fetches = [channel.fetch(at(0, wait_ms=10_000)) for _ in range(30)]
            await channel.append(batch())
            results = await asyncio.gather(*fetches, return_exceptions=True)
            assert sum(isinstance(result, QueueFullError) for result in results) == 10

        cluster.run(scenario())


def test_one_that_does_not_read_is_not_heard_and_costs_no_more(tmp_path: Path) -> None:
    """Its answers pile up to the limit, then its requests stay in its own socket. Others are served all the while."""
    limit_bytes = 1 << 20
    with cluster_of(tmp_path, calls={"client_queue_bytes": limit_bytes}) as cluster:

        async def fill() -> None:
            channel = await cluster.open()
            await asyncio.gather(*(channel.append(batch(bytes(900_000))) for _ in range(8)))
            channel.close()

        cluster.run(fill())
        greedy = RawClient(cluster.endpoint())
        greedy.socket.settimeout(0.3)
        request = frame(Kind.FETCH, 1, encode_fetch(at(0, max_bytes=1 << 30)))
        sent = 0

        def is_not_heard() -> Any:
            """Send until nothing more can be sent; who is not heard any more."""
            nonlocal sent
            with suppress(TimeoutError):
                while sent < 1 << 26:
                    sent += greedy.socket.send(request * 1000)
            return next((one for one in list(cluster.replica.clients._clients.values()) if one.deaf), None)

        client = wait_for(is_not_heard, "the client not to be heard any more", TIMEOUT_S)
        assert client.stream.queued_bytes <= limit_bytes + (8 << 20)
        assert sent < 1 << 26
        for _ in range(3):
            works(cluster)
        greedy.socket.settimeout(TIMEOUT_S)
        kinds = {answer.kind for _ in range(20) for answer in greedy.frames()}  # it reads, and is answered again
        assert Kind.FETCHED in kinds
        greedy.close()
        wait_for(lambda: clients_of(cluster) == 0, "it to be gone")


def test_two_thousand_waiting_fetches_hold_up_no_append(tmp_path: Path) -> None:
    """They cost nothing while they wait for what does not come, and are all answered when it does."""
    with cluster_of(tmp_path) as cluster:

        async def appends(channel: Channel, count: int) -> float:
            """Seconds per append, the median."""
            took_s = []
            for _ in range(count):
                began_s = time.perf_counter()
                await channel.append(batch(lane=0))
                took_s.append(time.perf_counter() - began_s)
            return sorted(took_s)[count // 2]

        async def scenario() -> None:
            writer = await cluster.open()
            readers = [await cluster.open() for _ in range(20)]
            alone_s = await appends(writer, 200)
            end = (await writer.call(calls.GetBounds())).end
            waiting = [reader.fetch(at(end, wait_ms=15_000)) for reader in readers for _ in range(100)]
            for reader in readers:
                await reader.call(calls.GetStatus())  # all that was sent before has arrived
            assert len(cluster.replica.service.fetches.parked) == 2000
            began_s = time.perf_counter()
            answer = await writer.append(batch(b"news"))
            woken_s = time.perf_counter() - began_s
            found = await asyncio.gather(*waiting)
            assert all([one.base_offset for one in each.batches] == [answer.base_offset] for each in found)
            assert woken_s < 0.5
            assert await appends(writer, 50) < 20 * alone_s + 0.05

        cluster.run(scenario())


def test_waiting_in_another_lane_costs_nothing(tmp_path: Path) -> None:
    with cluster_of(tmp_path, partition=PartitionSettings(lanes=2)) as cluster:

        async def scenario() -> None:
            writer, reader = await cluster.open(), await cluster.open()
            waiting = [reader.fetch(FetchRequest((Cursor(1, 0),), 1000, 15_000)) for _ in range(2000)]
            await reader.call(calls.GetStatus())
            fetches = cluster.replica.service.fetches
            looked = 0
            continued = fetches._continue

            def counting(fetch: Any) -> None:
                nonlocal looked
                looked += 1
                continued(fetch)

            fetches._continue = counting  # type: ignore[method-assign]
            for _ in range(100):
                await writer.append(batch(lane=0))
            assert looked == 0
            await writer.append(batch(lane=1))
            assert len(await asyncio.gather(*waiting)) == looked == 2000

        cluster.run(scenario())


def test_calls_of_the_coordinator_are_no_calls_of_a_partition(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        client = RawClient(cluster.endpoint())
        client.socket.sendall(frame(Kind.CALL, 1, encode_call(calls.ListGroups())))
        (answer,) = client.frames()
        assert type(decode_failure(answer.body)) is InvalidInputError
        client.socket.sendall(frame(Kind.CALL, 2, encode_call(calls.GetBounds())))
        (answer,) = client.frames()
        assert decode_answer(calls.GetBounds(), answer.body) == calls.Bounds(0, 0, 0)
        client.close()
