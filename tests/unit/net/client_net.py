"""Replicas of a partition in this process, over real sockets and real files, and clients of them. No Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rayqueue.client.io import IoThread
from rayqueue.config import Settings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings
from rayqueue.protocol import hello
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.frames import Frame, FrameReader
from rayqueue.protocol.seals import Seals
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import RecordBatch
from rayqueue.replica.start import PartitionReplica, create_replica, start_replica
from rayqueue.testing import wait_for

GROUP = GroupId("direct-0")
TIMEOUT_S = 20.0
SECRET = "only for this test"
SEALS = Seals(SECRET.encode())

_T = TypeVar("_T")


class Cluster:
    """The replicas of one partition, and an I/O thread for their clients."""

    def __init__(self, tmp_path: Path, nodes: int = 1, *, partition: PartitionSettings | None = None, **named: Any):
        named.setdefault("transport", {})["secret"] = SECRET
        self.settings = Settings(**named)
        self.fatal: list[BaseException] = []
        self.io = IoThread()
        self.replicas: dict[str, PartitionReplica] = {}
        ids = [ReplicaId(f"n{number}") for number in range(1, nodes + 1)]
        for node in ids:
            path = tmp_path / node
            create_replica(path, GROUP, node, ReplicaSet.of(ids), self.settings)
            self.replicas[node] = start_replica(
                path, GROUP, node, self.settings, partition=partition, on_fatal=self.fatal.append
            )
        addresses = {ReplicaId(node): replica.status.address for node, replica in self.replicas.items()}
        for replica in self.replicas.values():
            replica.set_peers(addresses)
        self.leader = wait_for(self._find_leader, "a leader", TIMEOUT_S)

    def _find_leader(self) -> str | None:
        leading = [node for node, replica in self.replicas.items() if replica.status.role == "leader"]
        return leading[0] if leading else None

    @property
    def replica(self) -> PartitionReplica:
        """The one that leads, or led when this was made."""
        return self.replicas[self.leader]

    @property
    def followers(self) -> list[str]:
        return [node for node in self.replicas if node != self.leader]

    def endpoint(self, node: str | None = None) -> Endpoint:
        node = node or self.leader
        replica = self.replicas[node]
        status = replica.status
        return Endpoint(*status.address, replica.token, ReplicaId(node), status.leader, status.term)

    async def open(self, node: str | None = None) -> Channel:
        return await Channel.open(self.endpoint(node), self.settings)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.io.call(asyncio.wait_for(work, TIMEOUT_S), 2 * TIMEOUT_S)

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
        self.io.close()
        assert self.fatal == []


class RawClient:
    """A client without manners: it proves itself and then does what a test wants."""

    def __init__(self, endpoint: Endpoint, *, token: bytes | None = None) -> None:
        self.socket = socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_S)
        self.reader = FrameReader(1 << 26)
        key = hello.key_of(token or endpoint.token)
        ours = hello.hello(bytes(range(32)))
        self.socket.sendall(ours)
        theirs = self._exactly(hello.HELLO_BYTES)
        self.socket.sendall(hello.proof(key, b"client", ours, theirs))
        hello.check_proof(self._exactly(hello.MAC_BYTES), key, b"replica", ours, theirs)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionAbortedError("hung up")
            data += more
        return data

    def frames(self) -> list[Frame]:
        """The next that come; [] at the end of the stream."""
        while True:
            count = self.socket.recv_into(self.reader.space())
            if count == 0:
                return []
            found = [Frame(kind, request, memoryview(bytes(body))) for kind, request, body in self.reader.frames(count)]
            if found:
                return found

    def is_closed(self) -> bool:
        """Reads until the other side hangs up. ``TimeoutError`` if it does not."""
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def close(self) -> None:
        self.socket.close()


def batch(*values: bytes, producer: int = 0, sequence: int = 0, lane: int = 0) -> bytes:
    return RecordBatch.encode(
        list(values) or [b"value"], timestamps=1, producer_id=producer, epoch=0, sequence=sequence, lane=lane
    )


def at(offset: int, *, max_bytes: int = 1 << 20, wait_ms: int = 0, flags: int = 0) -> FetchRequest:
    """From this offset on, in the order of offsets."""
    return FetchRequest((Cursor(ANY_LANE, offset),), max_bytes, wait_ms, flags)
