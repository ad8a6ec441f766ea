"""A Raft group in memory: its log is committed as it is proposed, and the real services answer its clients.

One object stands for all replicas of the group: they have the same log, and one
of them leads, until ``change_leader``. It has what a service needs of
``rayqueue.replica.Replica``, without Raft, threads or disk, and belongs to the
loop of the client's I/O thread, in which everything happens in the order of the
calls. Clients come by ``connect``: frames are written, read and answered as over
a socket.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from rayqueue.config import Settings
from rayqueue.errors import MembershipError, NotLeaderError, RayQueueError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry, Schema, Snapshot
from rayqueue.net.channel import Channel
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import Partition, PartitionSettings, configure_command
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol import hello
from rayqueue.protocol.calls import Commit, ReplicaStatus, decode_partition_call
from rayqueue.protocol.failures import encode_failure
from rayqueue.protocol.frames import SLACK_BYTES, Frame, FrameReader, Kind, head
from rayqueue.raft.handshake import SPEAKS
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records.checksum import entry_crc
from rayqueue.replica.clients import Clients
from rayqueue.replica.partition_service import PartitionService
from rayqueue.replica.service import Service
from rayqueue.replica.status import Status

Request = Literal["append", "fetch", "commit"]
_LATE_S = 0.05
_ports = count(1)


@dataclass(slots=True)
class Fault:
    """A fault: of the next requests of one kind."""

    request: Request
    error: RayQueueError
    carried_out: bool
    left: int


class MemoryGroup:
    """A group with a log. ``serve_with`` says what its clients may ask."""

    def __init__(self, group_id: str, replica_ids: Iterable[str], schema: Schema, settings: Settings) -> None:
        self.group_id = GroupId(group_id)
        self.replica_ids = tuple(map(ReplicaId, replica_ids))
        self.replica_set = ReplicaSet.of(self.replica_ids)
        self.leader: ReplicaId | None = self.replica_ids[0]
        self.term = Term(1)
        self.port = next(_ports)
        self.faults: list[Fault] = []
        self.store = MemoryStore(self.group_id, self.replica_ids[0], schema)
        self.max_frame_bytes = settings.log.max_batch_bytes + SLACK_BYTES
        self._loop = asyncio.get_running_loop()
        self._token = secrets.token_bytes(hello.TOKEN_BYTES)
        self._index = 0
        self._asked: ReplicaId | None = None
        self._connections: dict[int, _Connection] = {}
        self._numbers = count(1)
        self._muted: tuple[int, int] | None = None
        self._holding: Request | Literal["any"] | None = None
        self._held: list[tuple[_Connection, Frame]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def serve_with(self, machine: StateMachine, service: Service) -> None:
        self._machine = machine
        self._service = service
        service.won()
        service.lead(time.monotonic())
        self._turn()

    # -- for the directory, and for tests ------------------------------------------------------

    def endpoint(self, replica_id: ReplicaId) -> Endpoint:
        return Endpoint("memory", self.port, self._token, replica_id, self.leader, self.term)

    async def connect(self, endpoint: Endpoint, settings: Settings) -> Channel:
        """A real channel, whose bytes come here."""

        async def dial(channel: Channel) -> None:
            channel.connection_made(_Connection(self, channel, next(self._numbers)))

        return await Channel.open(endpoint, settings, dial)

    def admit(self, connection: _Connection) -> None:
        self._connections[connection.number] = connection

    def change_leader(self, to: ReplicaId | None) -> None:
        """Another replica leads from now on, in a new term; or nobody does."""
        self.leader = None
        self._service.lost(time.monotonic())
        if to is not None:
            self.leader, self.term = to, Term(self.term + 1)
            self._service.won()
            self._service.lead(time.monotonic())
        self._turn()

    def hold(self, request: Request | Literal["any"] | None) -> None:
        """Leave requests of this kind where they are, as a process that hangs does. None: carry out what was left."""
        self._holding = request
        held, self._held = self._held, []
        for connection, frame in held:
            self.received(connection, frame)

    def disconnect(self) -> None:
        """Every connection breaks: what was not answered has an unknown outcome."""
        for connection in list(self._connections.values()):
            connection.cut()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._service.close()
        self.disconnect()
        self.store.close()

    def status_of(self, replica_id: ReplicaId) -> Status:
        start, end = self._service.bounds()
        applied = Index(self._index)
        return Status(
            group_id=self.group_id,
            replica_id=replica_id,
            role="leader" if replica_id == self.leader else "follower",
            leader=self.leader,
            term=self.term,
            start_offset=start,
            high_watermark=end,
            base_index=Index(0),
            last_index=applied,
            commit=applied,
            applied=applied,
            voters=self.replica_ids,
            learners=(),
            address=("memory", self.port),
            size_bytes=self.store.size_bytes(),
            read_only=False,
            damaged=None,
            forgetful=(),
            syncs=0,
            sync_ms=0.0,
        )

    # -- clients -----------------------------------------------------------------------------

    def received(self, connection: _Connection, frame: Frame) -> None:
        """A request. It is carried out before this returns, unless it has something to wait for."""
        if self._holding is not None and _is(self._holding, frame):
            self._held.append((connection, frame._replace(body=memoryview(bytes(frame.body)))))
            return
        number, waits = connection.number, None if frame.kind == Kind.APPEND_UNACKED else frame.request
        self._asked = connection.replica_id
        try:
            fault = self._next_fault(frame)
            if fault is None:
                self.serving(number, waits, lambda: self._service.serve(number, frame))
                return
            if fault.carried_out:
                self._muted = (number, frame.request)
                self.serving(number, None, lambda: self._service.serve(number, frame))
                self._muted = None
            if waits is not None:
                self.fail(number, waits, fault.error)
        finally:
            self._asked = None
            self._turn()

    def gone(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._service.client_gone(connection.number)

    def _next_fault(self, frame: Frame) -> Fault | None:
        for fault in self.faults:
            if _is(fault.request, frame):
                fault.left -= 1
                if not fault.left:
                    self.faults.remove(fault)
                return fault
        return None

    def _turn(self) -> None:
        """After everything that happened; and when the service says that something is due."""
        if self._closed:
            return
        now_s = time.monotonic()
        self._service.gather()
        self._service.tick(now_s)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._service.next_deadline_s
        self._timer = None if due_s == float("inf") else self._later(max(0.0, due_s - now_s))

    def _later(self, wait_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(wait_s, self._due, time.monotonic() + wait_s)

    def _due(self, due_s: float) -> None:
        """If the thread did not run meanwhile, clients that could not say anything are heard before they are missed."""
        if time.monotonic() - due_s > _LATE_S:
            self._timer = self._later(_LATE_S)
        else:
            self._turn()

    # -- for the service: rayqueue.replica.replica.Replica ----------------------------------------

    @property
    def oldest_version(self) -> int:
        """All are of this release."""
        return SPEAKS.highest

    @property
    def replica_id(self) -> ReplicaId:
        """The one that is asked now."""
        return self._asked or self.leader or self.replica_ids[0]

    @property
    def is_leader(self) -> bool:
        return self.replica_id == self.leader

    @property
    def clients(self) -> MemoryGroup:
        return self

    @property
    def engine(self) -> MemoryGroup:
        return self

    @property
    def replica_set_version(self) -> Index:
        return Index(1)

    @property
    def applied(self) -> Index:
        return Index(self._index)

    @property
    def next_index(self) -> Index:
        return Index(self._index + 1)

    @property
    def refuses_records(self) -> bool:
        return False

    def client_status(self) -> ReplicaStatus:
        status = self.status_of(self.replica_id)
        bounds = status.start_offset, status.high_watermark
        return ReplicaStatus(status.replica_id, status.role, status.leader, status.term, *bounds, status.size_bytes)

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self.store.snapshot()

    def tell_log(self, payload: bytes) -> None:
        self.apply(payload)

    def hand_over(self, target: ReplicaId, answer: Callable[[Any], None]) -> None:
        if target not in self.replica_ids:
            answer(MembershipError(f"{target} cannot take over: it is not another voter", replica_id=target))
            return
        self.change_leader(target)
        answer(None)

    def check_leads(self) -> None:
        if not self.is_leader:
            raise self.not_leader()

    def not_leader(self) -> NotLeaderError:
        hint = f"ask {self.leader}" if self.leader else "no leader is known yet, retry"
        return NotLeaderError(f"{self.replica_id} does not lead; {hint}", leader=self.leader)

    def propose(self, payload: bytes, answer: Callable[[Any], None]) -> None:
        self.check_leads()
        answer(self.apply(payload))

    def apply(self, payload: bytes) -> Any:
        """Append an entry, commit it and apply it. What applying it answers."""
        self._index += 1
        index = Index(self._index)
        self.store.append([Entry(index, self.term, payload, entry_crc(index, self.term, payload))])
        answer = self._machine.apply(index, payload)
        self.store.set_applied(index)
        self.store.sync()
        return answer

    def commit(self, payload: bytes) -> Any:
        """The same, as if somebody else had proposed it. Whoever waits for it is told."""
        answer = self.apply(payload)
        self._turn()
        return answer

    def once_synced(self, pending: None, result: Any) -> None:
        """It was answered when it was proposed."""

    def once_settled(self, work: Callable[[], None]) -> None:
        work()

    def confirm(self, answer: Callable[[Any], None]) -> None:
        self.check_leads()
        answer(None)

    def send(self, client: int, kind: Kind, request: int, buffers: Sequence[bytes]) -> None:
        connection = self._connections.get(client)
        if connection is not None and self._muted != (client, request):
            connection.answer([head(kind, request, sum(map(len, buffers))), *buffers])

    answer = Clients.answer

    def fail(self, client: int, request: int, error: RayQueueError) -> None:
        self.send(client, Kind.FAILED, request, [encode_failure(error)])

    def serving(self, client: int, request: int | None, work: Callable[[], None]) -> None:
        try:
            work()
        except RayQueueError as error:
            if request is not None:
                self.fail(client, request, error)

    def is_full(self, client: int) -> bool:
        return client not in self._connections

    def run(self, work: Callable[[], None]) -> None:
        """From any thread."""

        def take() -> None:
            if not self._closed:
                work()
                self._turn()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(take)


class MemoryPartition(MemoryGroup):
    """A partition's group: the real state machine, admission, tail and service."""

    def __init__(
        self, group_id: str, replica_ids: Iterable[str], partition: PartitionSettings, settings: Settings
    ) -> None:
        super().__init__(group_id, replica_ids, PARTITION, settings)
        self.partition = Partition(self.store, partition)
        this: Any = self
        service = PartitionService(this, self.partition, settings)
        self.admission = service.appends.admission
        self.settling = service.settling
        self.serve_with(self.partition, service)
        self.store.sync()

    def configure(self, settings: PartitionSettings) -> None:
        if settings.version != self.partition.settings.version:
            self.commit(configure_command(settings))

    def apply_retention(self) -> None:
        """Apply retention, as a leader does about once per second."""
        trim = self.partition.retention_command(_now_ms())
        if trim is not None:
            self.commit(trim)


class _Connection(asyncio.Transport):
    """The connection that a channel writes to. Bytes arrive in the next round of the loop, in order."""

    def __init__(self, group: MemoryGroup, channel: Channel, number: int) -> None:
        super().__init__()
        self.number = number
        self.replica_id = channel.endpoint.replica_id
        self._group = group
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._key = hello.key_of(channel.endpoint.token)
        self._nonce = secrets.token_bytes(hello.NONCE_BYTES)
        self._their_hello = b""
        self._greeted = False
        self._reader = FrameReader(group.max_frame_bytes)
        self._written: list[bytes] = []
        self._answers: list[bytes] = []
        self._open = True

    # -- the client's side: asyncio.Transport ----------------------------------------------------

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if not self._written:
            self._loop.call_soon(self._read)
        self._written += map(bytes, list_of_data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._group.gone(self)

    # -- the group's side -----------------------------------------------------------------------

    def answer(self, buffers: Iterable[bytes]) -> None:
        if not self._answers:
            self._loop.call_soon(self._deliver)
        self._answers += buffers

    def cut(self) -> None:
        if self._open:
            self.abort()
            self._loop.call_soon(self._channel.connection_lost, None)

    def _read(self) -> None:
        data, self._written = b"".join(self._written), []
        if not self._open:
            return
        if not self._greeted:
            data = self._greet(data)
        rest = memoryview(data)
        while rest and self._open:
            space = self._reader.space()
            taken = min(len(space), len(rest))
            space[:taken] = rest[:taken]
            rest = rest[taken:]
            for frame in self._reader.frames(taken):
                self._group.received(self, frame)

    def _greet(self, data: bytes) -> bytes:
        """The replica's side of ``rayqueue.protocol.hello``. What comes after it."""
        if not self._their_hello:
            self._their_hello, data = data[: hello.HELLO_BYTES], data[hello.HELLO_BYTES :]
            self.answer([hello.hello(self._nonce)])
        if len(data) >= hello.MAC_BYTES:
            ours, proof = hello.hello(self._nonce), data[: hello.MAC_BYTES]
            hello.check_proof(proof, self._key, b"client", self._their_hello, ours)
            self._greeted = True
            self._group.admit(self)
            self.answer([hello.proof(self._key, b"replica", self._their_hello, ours)])
            data = data[hello.MAC_BYTES :]
        return data

    def _deliver(self) -> None:
        data, self._answers = memoryview(b"".join(self._answers)), []
        while data and self._open:
            space = self._channel.get_buffer(-1)
            taken = min(len(space), len(data))
            space[:taken] = data[:taken]
            data = data[taken:]
            self._channel.buffer_updated(taken)


def _is(request: Request | Literal["any"], frame: Frame) -> bool:
    if request == "any":
        return True
    if request == "append":
        return frame.kind in (Kind.APPEND, Kind.APPEND_LEADER, Kind.APPEND_UNACKED)
    if request == "fetch":
        return frame.kind == Kind.FETCH
    if frame.kind != Kind.CALL:
        return False
    call = decode_partition_call(frame.body)
    return isinstance(call, Commit) and bool(call.offsets)  # without, a member claims the partition


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
