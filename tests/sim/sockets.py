"""TCP in virtual time, between simulated processes and replicas.

A connection never loses, repeats or reorders bytes: it delays them, for as long
as the way is cut, and it breaks when either side dies, which the other side
hears of later, or when the network says so. Underneath are the real ones: the
client's ``Channel``, and the replica's ``Clients`` with the hello before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any, Protocol

from rayqueue.ids import ReplicaId
from rayqueue.net.endpoint import Endpoint
from rayqueue.protocol import hello
from rayqueue.replica.clients import Clients
from tests.sim.network import Clock
from tests.sim.process import SimProcess

_LOOK_AGAIN_S = 0.05
_READ = 1


class Server(Protocol):
    """What listens: one life of a replica."""

    replica_id: ReplicaId
    clients: Clients
    alive: bool
    life: int

    def call(self, action: Callable[[], None]) -> None: ...


class Internet:
    """Who listens where, and every connection."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self.clock = clock
        self.rng = rng
        self.slow_s = 0.0
        """The longest that bytes of now and then take."""
        self._ports = count(1)
        self._numbers = count(1)
        self._listening: dict[int, tuple[Server, int]] = {}
        self._wires: dict[Wire, None] = {}

    def listen(self, server: Server) -> int:
        """The port of this life of the server."""
        port = next(self._ports)
        self._listening[port] = server, server.life
        server.clients.attach(_Selector())  # type: ignore[arg-type]
        return port

    def delay(self) -> float:
        delay = self.rng.uniform(0.0002, 0.003)
        if self.slow_s and self.rng.random() < 0.2:
            delay += self.rng.uniform(0, self.slow_s)
        return delay

    async def connect(self, process: SimProcess, port: int, factory: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.delay())
        while process.cut:  # noqa: ASYNC110  # the other side's answer does not come
            await asyncio.sleep(_LOOK_AGAIN_S)
        server, life = self._listening[port]
        if not server.alive or server.life != life:
            raise ConnectionRefusedError(f"nobody listens at {port}")
        wire = Wire(self, next(self._numbers), process, server)
        self._wires[wire] = None
        protocol = factory()
        wire.protocol = protocol
        protocol.connection_made(wire.transport)
        return wire.transport, protocol

    def server_gone(self, server: Server) -> None:
        """The kernel closes a dead process's sockets."""
        for wire in [wire for wire in self._wires if wire.server is server]:
            self.clock.after(self.delay(), wire.break_client)

    def process_gone(self, process: SimProcess) -> None:
        for wire in [wire for wire in self._wires if wire.process is process]:
            self.clock.after(self.delay(), wire.break_server)

    def reset(self, process: SimProcess) -> None:
        """Something in between forgets this process's connections: both sides are told."""
        for wire in [wire for wire in self._wires if wire.process is process]:
            wire.break_client()
            wire.break_server()

    def forget(self, wire: Wire) -> None:
        self._wires.pop(wire, None)


class _Selector:
    """Tells a stream which client it is."""

    def register(self, fd: int, events: int, client: Any) -> None:
        client.stream.client = client

    def modify(self, fd: int, events: int, client: Any) -> None: ...
    def unregister(self, fd: int) -> None: ...


class _Pipe:
    """Bytes in one direction, in order."""

    def __init__(self, internet: Internet, process: SimProcess, deliver: Callable[[bytes], None]) -> None:
        self._internet = internet
        self._process = process
        self._deliver = deliver
        self._under_way: deque[bytes] = deque()
        self._moving = False

    def send(self, data: bytes) -> None:
        self._under_way.append(data)
        if not self._moving:
            self._moving = True
            self._internet.clock.after(self._internet.delay(), self._arrive)

    def _arrive(self) -> None:
        clock = self._internet.clock
        if self._process.cut:
            clock.after(_LOOK_AGAIN_S, self._arrive)
            return
        self._deliver(b"".join(self._under_way))
        self._under_way.clear()
        self._moving = False


class Wire:
    """One connection. The transport is the client's end, the stream the server's."""

    def __init__(self, internet: Internet, number: int, process: SimProcess, server: Server) -> None:
        self.internet = internet
        self.number = number
        self.process = process
        self.server = server
        self.life = server.life
        self.protocol: Any = None
        self.transport = _Transport(self)
        self.stream = _Stream(self)
        self.to_server = _Pipe(internet, process, self._to_server)
        self.to_client = _Pipe(internet, process, self._to_client)
        self.client_open = self.server_open = True

    # -- the client's end ------------------------------------------------------------------

    def _to_client(self, data: bytes) -> None:
        self.process.call_soon(self._receive, data)

    def _receive(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self.client_open:
            space = self.protocol.get_buffer(-1)
            taken = min(len(space), len(rest))
            space[:taken] = rest[:taken]
            self.protocol.buffer_updated(taken)
            rest = rest[taken:]

    def break_client(self) -> None:
        """The client hears that the connection is gone, once anything can be heard."""
        if not self.client_open:
            return
        if self.process.cut:
            self.internet.clock.after(_LOOK_AGAIN_S, self.break_client)
            return
        self.process.call_soon(self._lost)

    def _lost(self) -> None:
        if self.client_open:
            self.client_open = False
            self.internet.forget(self)
            self.protocol.connection_lost(None)

    def close_client(self) -> None:
        if self.client_open:
            self.client_open = False
            self.internet.forget(self)
            self.internet.clock.after(self.internet.delay(), self.break_server)

    # -- the server's end --------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return self.server_open and self.server.alive and self.server.life == self.life

    def _to_server(self, data: bytes) -> None:
        if self.serves:
            self.server.call(partial(self.stream.arrived, data))
        elif not self.server.alive or self.server.life != self.life:
            self.internet.clock.after(self.internet.delay(), self.break_client)

    def break_server(self) -> None:
        if not self.server_open:
            return
        if self.process.cut:
            self.internet.clock.after(_LOOK_AGAIN_S, self.break_server)
        elif self.serves:
            self.server.call(self.stream.ended)


class _Transport:
    """What ``Channel`` needs of an ``asyncio.Transport``."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if self._wire.client_open:
            self._wire.to_server.send(bytes(data))

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.write(b"".join(parts))

    def abort(self) -> None:
        self._wire.close_client()


class _Stream:
    """What ``Clients`` needs of a ``rayqueue.net.streams.Stream``, and the server's half of the hello before it."""

    queued_bytes = 0
    wants_write = False
    has_more = False

    def __init__(self, wire: Wire) -> None:
        self.source = wire.process.name
        self.client: Any = None
        self._wire = wire
        self._unread = bytearray()
        self._hello = b""
        self._greeted = False
        self._ended = False

    def fileno(self) -> int:
        return self._wire.number

    # -- what the network says; in the server's turn -----------------------------------------

    def arrived(self, data: bytes) -> None:
        self._unread += data
        if not self._greeted:
            self._greet()
        elif self.client is not None and not self.client.closed:
            self._wire.server.clients.on_ready(self.client, _READ)

    def ended(self) -> None:
        self._ended = True
        self._wire.server_open = False
        if self.client is not None and not self.client.closed:
            self._wire.server.clients.on_ready(self.client, _READ)

    def _greet(self) -> None:
        clients, unread = self._wire.server.clients, self._unread
        answer = hello.hello(bytes(hello.NONCE_BYTES))
        if not self._hello and len(unread) >= hello.HELLO_BYTES:
            self._hello = bytes(unread[: hello.HELLO_BYTES])
            del unread[: hello.HELLO_BYTES]
            self._wire.to_client.send(answer)
        if self._hello and len(unread) >= hello.MAC_BYTES:
            key = hello.key_of(clients.token)
            hello.check_proof(bytes(unread[: hello.MAC_BYTES]), key, b"client", self._hello, answer)
            self._wire.to_client.send(hello.proof(key, b"replica", self._hello, answer))
            del unread[: hello.MAC_BYTES]
            self._greeted = True
            clients.admit(self, b"")  # type: ignore[arg-type]

    # -- what ``Clients`` asks -----------------------------------------------------------------

    def read_into(self, space: memoryview) -> int | None:
        taken = min(len(space), len(self._unread))
        if not taken:
            return 0 if self._ended else None
        space[:taken] = self._unread[:taken]
        del self._unread[:taken]
        return taken

    def write(self, buffers: list[Any], size_bytes: int) -> None:
        if self._wire.server_open:
            self._wire.to_client.send(b"".join(buffers))

    def flush(self) -> None:
        """Nothing waits here: the network takes everything."""

    def close(self) -> None:
        self._wire.server_open = False
        self._wire.internet.clock.after(self._wire.internet.delay(), self._wire.break_client)


def endpoint_of(server: Server, port: int, leader: ReplicaId | None, term: Any) -> Endpoint:
    return Endpoint("127.0.0.1", port, server.clients.token, server.replica_id, leader, term)
