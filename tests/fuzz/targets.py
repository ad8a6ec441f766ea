"""Every decoder that sees bytes of others, and what stands behind it, as something that takes one input.

A target raises only typed errors of ``rayqueue.errors``, and not the one that
says that a promise is broken. One that keeps state is made anew for each chunk
of inputs, so that a chunk can be replayed.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple, get_args

import msgspec

from rayqueue.cluster import commands as cluster_commands
from rayqueue.config import Settings
from rayqueue.errors import InvariantBrokenError, RayQueueError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.store import Entry
from rayqueue.net.channel import Channel
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings, commands
from rayqueue.partition.jobs import commands as job_commands
from rayqueue.protocol import calls, hello
from rayqueue.protocol.data import (
    ANY_LANE,
    Cursor,
    FetchRequest,
    decode_appended,
    decode_fetched,
    encode_appended,
    encode_fetch,
    encode_fetched,
)
from rayqueue.protocol.failures import decode_failure, encode_failure
from rayqueue.protocol.frames import Frame, FrameReader, Kind, head
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, Settlement, decode_options, encode_options
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicPartition, TopicSettings
from rayqueue.raft import messages, wire
from rayqueue.raft.clients import Guest
from rayqueue.raft.handshake import Acceptor, Dialer, Identity
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import HEADER_BYTES, BatchHeader, Compression, RecordBatch, validate
from rayqueue.records.checksum import crc32c, entry_crc
from rayqueue.records.compression import pack, unpack
from rayqueue.replica.partition_service import PartitionService
from tests.fuzz import mutations, value_forms
from tests.unit.cluster.cluster_state import Service
from tests.unit.partition.partition_log import Log

Run = Callable[[bytes], None]


class Target(NamedTuple):
    seeds: list[bytes]
    """Inputs that are right, or nearly."""
    make: Callable[[], Run]
    draw: Callable[[Random, list[bytes]], bytes] = mutations.plain


def typed(run: Run, data: bytes) -> None:
    """``AssertionError``, or what is not ours, unless it takes the input or refuses it as it should."""
    try:
        run(data)
    except InvariantBrokenError:
        raise
    except RayQueueError:
        return


# -- calls and answers ---------------------------------------------------------------------


_SETTLEMENT = Settlement(kind="nack", token=1, jobs=((1, 2), (5, 1)), reason="r")


def _example(cls: type[calls.Call]) -> calls.Call:
    """A call with something in every field."""
    known: dict[str, Any] = {
        "group": "g",
        "name": "t",
        "names": ("t",),
        "member": "m1",
        "topics": ("t",),
        "settings": TopicSettings(partitions=2),
        "changes": {"partitions": 3},
        "offsets": {0: 1},
        "metadata": b"m",
        "reading": (TopicPartition("t", 0),),
        "generation": 1,
        "before": 1,
        "timestamp_ms": 1,
        "count": 2,
        "worker": "w1",
        "settlements": (_SETTLEMENT,),
        "ids": (1, 2),
        "dedupe_ids": ("d",),
    }
    wanted = [each.name for each in msgspec.structs.fields(cls) if each.name in known or each.required]
    return cls(**{name: known.get(name, 1) for name in wanted})


PARTITION_CALLS = [calls.encode_call(_example(cls)) for cls in get_args(calls.PartitionCall)]
COORDINATOR_CALLS = [calls.encode_call(_example(cls)) for cls in get_args(calls.CoordinatorCall)]


def _answers() -> Run:
    kinds = [_example(cls) for cls in {*get_args(calls.PartitionCall), *get_args(calls.CoordinatorCall)}]
    kinds.sort(key=lambda call: type(call).__name__)

    def run(data: bytes) -> None:
        for call in kinds:
            try:
                calls.decode_answer(call, data)
            except RayQueueError:
                continue

    return run


_TOPIC = TopicInfo("t", 1, TopicSettings(), (PartitionInfo(0, "t-0-1", (ReplicaInfo("r0", "b0"),)),))
ANSWERS = [
    calls.encode_answer(answer)
    for answer in (
        calls.Position(1, {0: 5}, b"m"),
        calls.Bounds(0, 5),
        calls.Lag(5, {0: 5}),
        calls.ReplicaStatus("n1", "leader", "n1", 3, 0, 5, 100),
        calls.Topics(1, (_TOPIC,)),
        calls.Assignment("m1", 1, (calls.Grant("t", 0, 1),), False),
        calls.ClusterInfo("c", "n1", 1, (calls.Broker("b0", "h", True, 1),), 1, 1, 1),
        {"g": calls.Position(1, {0: 5})},
        None,
        True,
        7,
    )
]


def _coordinator() -> Run:
    service = Service()

    def run(data: bytes) -> None:
        call = calls.decode_coordinator_call(data)
        service.ask(call, client=1)
        service.pass_time(0.01)

    return run


# -- a partition's service, without the replica around it ------------------------------------------


class _Replica:
    """What a service asks of its replica, where every proposal is committed at once."""

    group_id = GroupId("t-0-1")
    replica_id, role, leader, term, is_leader = ReplicaId("n1"), "leader", ReplicaId("n1"), Term(1), True

    def __init__(self, partition: PartitionSettings | None = None) -> None:
        self.log = Log(partition or PartitionSettings(lanes=2))
        self.clients = self.engine = self
        settings = Settings(calls={"max_fetches": 100}, transport={"secret": _SECRET.decode()})
        self.service: Any = PartitionService(self, self.log.partition, settings)  # type: ignore[arg-type]
        self.work: list[Callable[[], None]] = []

    refuses_records = False

    @property
    def applied(self) -> int:
        return self.log.partition.applied

    @property
    def next_index(self) -> int:
        return self.applied + 1

    def client_status(self) -> calls.ReplicaStatus:
        start, end = self.service.bounds()
        return calls.ReplicaStatus(self.replica_id, self.role, self.leader, self.term, start, end, 0)

    def check_leads(self) -> None: ...

    def tell_log(self, payload: bytes) -> None:
        self.log.apply(payload)

    def is_full(self, client: int) -> bool:
        return False

    def send(self, client: int, kind: Kind, request: int, buffers: Any) -> None:
        b"".join(buffers)

    def answer(self, client: int, request: int, answer: Any) -> None:
        if isinstance(answer, RayQueueError):
            self.fail(client, request, answer)
        else:
            self.send(client, Kind.ANSWER, request, (calls.encode_answer(answer),))

    def fail(self, client: int, request: int, error: RayQueueError) -> None:
        decode_failure(encode_failure(error))

    def confirm(self, answer: Callable[[Any], None]) -> None:
        answer(None)

    def once_settled(self, work: Callable[[], None]) -> None:
        self.log.store.sync()
        work()

    def once_synced(self, pending: Any, result: Any) -> None: ...

    def hand_over(self, to: ReplicaId, answer: Callable[[Any], None]) -> None:
        answer(None)

    def propose(self, payload: bytes, answer: Callable[[Any], None]) -> None:
        answer(self.log.apply(payload))

    def serving(self, client: int, request: int | None, work: Callable[[], None]) -> None:
        work()  # unlike a replica: whatever is raised is to be seen

    def run(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def snapshot(self) -> Any:
        return self.log.store.snapshot()


class _Now:
    """Checks of batches in the same thread, so that what they raise is to be seen."""

    def __init__(self, check: Callable[[bytes], Any]) -> None:
        self._check = check

    def __contains__(self, client: int) -> bool:
        return False

    def add(self, client: int, payload: bytes, done: Callable[[Any], None]) -> None:
        done(self._check(payload))


def _queue() -> Run:
    return _serving(_Replica(PartitionSettings(queue=True, lanes=2, ordered_by_key=True, lease_ms=5, max_deliveries=2)))


def _partition() -> Run:
    return _serving(_Replica())


def _serving(replica: _Replica) -> Run:
    service = replica.service
    service.appends._checks.close()
    service.appends._checks = _Now(service.appends._check)
    service.disk.close()
    service.disk.read = lambda work, done: done(work())
    service.lead(0.0)

    def run(data: bytes) -> None:
        kind, body = data[:1] or b"\0", data[1:]
        if kind[0] in (Kind.APPEND, Kind.APPEND_LEADER, Kind.APPEND_UNACKED):
            body = _resealed(body)
        replica.service.serve(1, Frame(kind[0], 1, memoryview(body)))
        replica.service.gather()
        replica.service.tick(0.0)

    return run


def _draw_request(rng: Random, seeds: list[bytes]) -> bytes:
    seed = rng.choice(seeds)
    if seed[0] == Kind.CALL or rng.random() < 0.3:
        return bytes((Kind.CALL,)) + mutations.packed(rng, PARTITION_CALLS)
    return seed[:1] + mutations.mutated(rng, seed[1:]) if rng.random() < 0.9 else mutations.mutated(rng, seed)


# -- batches -------------------------------------------------------------------------------------


def _batches() -> Iterator[bytes]:
    rng = Random(5)
    values = [rng.randbytes(rng.randrange(30)) for _ in range(40)]
    headers = [{"größe": b"1", "b": b""} if row % 3 else None for row in range(40)]
    keys = [None if row % 5 else b"k%d" % row for row in range(40)]
    for method in Compression:
        yield RecordBatch.encode([b"v"], timestamps=1, compression=method)
        yield RecordBatch.encode([b"value " * 20] * 40, timestamps=list(range(40)), compression=method)
        yield RecordBatch.encode(values, keys, headers, timestamps=1, producer_id=7, compression=method)
        yield RecordBatch.encode([None, *values], timestamps=1, lane=1, compression=method)
    yield RecordBatch.encode([bytes(1 << 22)], timestamps=1, compression=Compression.ZSTD)
    yield RecordBatch.encode([b""] * 10_000, timestamps=1, compression=Compression.ZSTD)


BATCHES = list(_batches())


def _resealed(data: bytes) -> bytes:
    """With a length and a checksum that fit, as whoever means harm would send it."""
    if len(data) < 72:
        return data
    data = data[:16] + struct.pack("<I", len(data)) + data[20:]
    return data[:12] + struct.pack("<I", crc32c(data[16:])) + data[16:]


def _draw_batch(rng: Random, seeds: list[bytes]) -> bytes:
    """Half of them with other numbers inside the message, compressed again: such are not found by looking outside."""
    if rng.random() < 0.5:
        return mutations.plain(rng, seeds)
    seed = rng.choice(seeds)
    header = BatchHeader.parse(seed)
    packed = seed[HEADER_BYTES:]
    message = bytearray(unpack(packed, header.compression, header.message_bytes) if header.compression else packed)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(0, min(len(message), 2000) - 8, 4)
        number = rng.choice((0, 1, 2, 40, 41, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
        match rng.randrange(3):
            case 0:
                struct.pack_into("<I", message, at, number)
            case 1:
                message[at : at + 4], message[at + 4 : at + 8] = message[at + 4 : at + 8], message[at : at + 4]
            case _:
                message[at + rng.randrange(4)] ^= 1 << rng.randrange(8)
    return _resealed(seed[:HEADER_BYTES] + pack(bytes(message), Compression(header.compression)))


def _batch() -> Run:
    def run(data: bytes) -> None:
        for payload in (data, _resealed(data)):
            try:
                validate(payload, 1 << 20, max_message_bytes=1 << 24, max_records=250_000, max_record_bytes=1 << 20)
            except RayQueueError:
                _read(payload)
                continue
            try:
                batch = RecordBatch.decode(payload)
                assert len(batch.records()) == len(batch) == batch.arrow().num_rows
            except RayQueueError as error:
                raise AssertionError("a replica accepts what a consumer cannot read") from error

    return run


def _read(payload: bytes) -> None:
    """As a consumer does that got it from somebody who did not check. It bounds nothing but the unpacked length."""
    try:
        batch = RecordBatch.decode(payload, max_message_bytes=1 << 20)
    except RayQueueError:
        return
    for read in (batch.records, batch.arrow):
        try:
            read()
        except RayQueueError:
            continue


# -- streams -------------------------------------------------------------------------------------------


def _in_pieces(reader: Any, take: Callable[[int], Any], data: bytes) -> None:
    """As a socket gives them."""
    came = 0
    while data:
        space = reader.space()
        assert len(space) > 0
        piece, data = data[: min(len(space), 700)], data[min(len(space), 700) :]
        space[: len(piece)] = piece
        came += len(piece)
        for _ in take(len(piece)):
            pass
        assert reader.size_bytes <= max(2 * came, 64 * 1024)


def _frames() -> Run:
    def run(data: bytes) -> None:
        reader = FrameReader(1 << 20)
        _in_pieces(reader, reader.frames, data)

    return run


FRAMES = [
    *(head(Kind.CALL, 1, len(body)) + body for body in PARTITION_CALLS),
    head(Kind.APPEND, 2, len(BATCHES[0])) + BATCHES[0],
    head(Kind.FETCH, 3, 0),
]

_ENTRIES = tuple(
    Entry(Index(index), Term(1), payload, entry_crc(index, 1, payload))
    for index, payload in enumerate((b"\x01", b"x" * 300, BATCHES[0]), 6)
)
RAFT = [
    b"".join(wire.encode(message))
    for message in (
        messages.PreVote(Term(2), Index(5), Term(1)),
        messages.PreVoteReply(Term(2), Term(3), True),
        messages.RequestVote(Term(2), Index(5), Term(1), False),
        messages.VoteReply(Term(2), True),
        messages.AppendEntries(Term(2), Index(5), Term(1), Index(4), 9, _ENTRIES),
        messages.AppendEntries(Term(2), Index(5), Term(1), Index(4), 9, ()),
        messages.AppendReply(Term(2), True, Index(5), Index(8), 9),
        messages.InstallSnapshot(Term(2), Index(5), Term(1), 9, b"members", b"state" * 10),
        messages.TimeoutNow(Term(2)),
        messages.Inquiry(Term(2), 7),
        messages.Account(Term(2), 7, Index(5), Term(1), Index(0), ReplicaSet.of(["a", "b"]).encode()),
    )
]


def _raft() -> Run:
    def run(data: bytes) -> None:
        for stream in (data, _raft_resealed(data)):
            reader = wire.FrameReader(1 << 20, 4096)
            try:
                _in_pieces(reader, reader.messages, stream)
            except RayQueueError:
                continue

    return run


def _raft_resealed(data: bytes) -> bytes:
    if len(data) < 9:
        return data
    return struct.pack("<II", len(data) - 4, crc32c(data[8:])) + data[8:]


# -- handshakes ----------------------------------------------------------------------------------------

_SECRET = b"a secret of sixteen"
_ME = Identity(ReplicaId("n1"), GroupId("g"), "127.0.0.1", 9, bytes(16))
_YOU = Identity(ReplicaId("n2"), GroupId("g"), "127.0.0.1", 9, bytes(16))


def _dialer() -> Dialer:
    return Dialer(_YOU, _SECRET, ReplicaId("n1"), nonce=b"d" * 32, attempt=1)


def _acceptor() -> Acceptor:
    return Acceptor(_ME, _SECRET, nonce=b"a" * 32)


def _handshake_seeds() -> list[bytes]:
    dialer, acceptor = _dialer(), _acceptor()
    challenge = acceptor.receive(dialer.hello)
    proof = dialer.receive(challenge)
    acceptor.receive(proof)
    welcome = acceptor.welcome()
    key = hello.key_of(b"t" * 32)
    first = hello.hello(b"c" * 32)
    guest = first + hello.proof(key, b"client", first, hello.hello(b"a" * 32))
    refusal = acceptor.refuse(7)  # type: ignore[arg-type]
    return [dialer.hello, dialer.hello + proof, challenge, challenge + welcome, refusal, guest]


def _handshakes() -> Run:
    def run(data: bytes) -> None:
        for side in (_acceptor(), _dialer(), Guest(b"t" * 32, b"a" * 32, b"")):
            try:
                for at in range(0, len(data), 50):
                    side.receive(data[at : at + 50])
            except RayQueueError:
                continue

    return run


# -- the client's side ---------------------------------------------------------------------------------------


class _Wire(asyncio.Transport):
    def write(self, data: Any) -> None: ...

    def writelines(self, data: Any) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


def _channel() -> Run:
    """A connection of a client to whoever listens where a replica did."""
    loop = asyncio.new_event_loop()
    settings = Settings(transport={"max_frame_bytes": 8 << 20})
    endpoint = Endpoint("127.0.0.1", 9, bytes(32), ReplicaId("n1"), None, Term(1))

    async def talk(data: bytes) -> None:
        channel = Channel(endpoint, settings, loop)
        channel.connection_made(_Wire())
        channel._greeting = None
        channel._greeted.set_result(None)
        asked: list[asyncio.Future[Any]] = [
            channel.append(BATCHES[0]),
            channel.fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1000)),
            channel.call(calls.GetBounds()),
            channel.call(calls.GetTopics()),
        ]
        _in_pieces_of(channel, data)
        channel.close()
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, RayQueueError), repr(result)

    def run(data: bytes) -> None:
        loop.run_until_complete(talk(data))

    return run


def _in_pieces_of(channel: Channel, data: bytes) -> None:
    while data and not channel.closed:
        space = channel.get_buffer(-1)
        piece, data = data[: len(space)], data[len(space) :]
        space[: len(piece)] = piece
        channel.buffer_updated(len(piece))


_FETCHED = b"".join(encode_fetched(9, 0, [(0, 1, BATCHES[0]), (1, 40, BATCHES[1])]))
_FAILURE = encode_failure(RayQueueError("why", leader="n2"))
REPLIES = [
    head(Kind.APPENDED, 1, 13) + encode_appended(5, 1, False),
    head(Kind.FETCHED, 2, len(_FETCHED)) + _FETCHED,
    head(Kind.ANSWER, 3, len(ANSWERS[1])) + ANSWERS[1],
    head(Kind.ANSWER, 4, len(ANSWERS[4])) + ANSWERS[4],
    head(Kind.FAILED, 3, len(_FAILURE)) + _FAILURE,
    head(Kind.FAILED, 0, len(_FAILURE)) + _FAILURE,
]


def _each(*decoders: Callable[[Any], Any]) -> Callable[[], Run]:
    def make() -> Run:
        def run(data: bytes) -> None:
            for decode in decoders:
                try:
                    decode(data)
                except InvariantBrokenError:
                    raise
                except RayQueueError:
                    continue

        return run

    return make


def _members(data: bytes) -> None:
    """Memberships come from a majority's log, so that only a bug can have written others: it is said so, no more."""
    try:
        ReplicaSet.decode(data)
    except InvariantBrokenError:
        return


TARGETS: dict[str, Target] = {
    "partition calls": Target(PARTITION_CALLS, _each(calls.decode_partition_call), mutations.packed),
    "coordinator": Target(COORDINATOR_CALLS, _coordinator, mutations.packed),
    "answers": Target(ANSWERS, _answers, mutations.packed),
    "failures": Target(
        [_FAILURE, msgspec.msgpack.encode(["not_leader", "x", {"leader": None}])],
        _each(decode_failure),
        mutations.packed,
    ),
    "partition": Target(
        [
            *(bytes((Kind.CALL,)) + body for body in PARTITION_CALLS),
            *(bytes((kind,)) + body for body in BATCHES[:-2] for kind in (Kind.APPEND, Kind.APPEND_UNACKED)),
            bytes((Kind.FETCH,)) + encode_fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1000, 5)),
            bytes((Kind.FETCH,)) + encode_fetch(FetchRequest((Cursor(1, 0), Cursor(0, 2)), 1000, 5)),
        ],
        _partition,
        _draw_request,
    ),
    "queue": Target(
        [
            *[bytes((Kind.CALL,)) + call for call in PARTITION_CALLS],
            bytes((Kind.APPEND,)) + RecordBatch.encode([b"v"] * 5, [b"k"] * 5, timestamps=1),
            bytes((Kind.APPEND,))
            + RecordBatch.encode(
                [b"v"], headers=[{JOB_HEADER: encode_options(JobOptions(5, 7, 9, "d", True))}], timestamps=1
            ),
        ],
        _queue,
        _draw_request,
    ),
    "batches": Target(BATCHES, _batch, _draw_batch),
    "values": Target(value_forms.seeds(), value_forms.read_by_all, value_forms.draw),
    "frames": Target(FRAMES, _frames),
    "raft frames": Target(RAFT, _raft),
    "handshakes": Target(_handshake_seeds(), _handshakes),
    "fetched and appended": Target(
        [_FETCHED, encode_appended(5, 1, True)],
        _each(lambda data: decode_fetched(memoryview(data)), lambda data: decode_appended(memoryview(data))),
    ),
    "a client's connection": Target(REPLIES, _channel),
    "job options": Target(
        [
            encode_options(JobOptions()),
            encode_options(JobOptions(5, 7, 9, "d", True)),
        ],
        _each(decode_options),
    ),
    "commands": Target(
        [
            commands.commit_command("g", 1, {0: 5}, metadata=b"m"),
            commands.trim_command(5),
            commands.trim_command(5, as_of=3),
            commands.pin_command("g"),
            commands.delete_group_command("g"),
            commands.fence_command(7, 1),
            commands.configure_command(PartitionSettings()),
            job_commands.lease_command(5, [job_commands.Request("w", 1, 10, 1, 0)]),
            job_commands.settle_command(5, [job_commands.settle("w", _SETTLEMENT)]),
            job_commands.end_workers_command(5, ["w"]),
            job_commands.change_command(5, "redrive", [1, 2]),
            job_commands.ack_all_command(5, [((1, ((3, 2),)), (2, ((7, 1),)))]),
            cluster_commands.encode_command(cluster_commands.CreateTopic("t", TopicSettings(), (("b0",),))),
            cluster_commands.encode_command(cluster_commands.ChangeGroup("g", (cluster_commands.Leave("m"),))),
        ],
        _each(commands.decode, cluster_commands.decode_command),
    ),
    "members": Target([ReplicaSet.of(["n1", "n2"], ["n3"]).encode()], lambda: _members),
}
if find_spec("fastapi") is not None and find_spec("grpc_health") is not None:  # the gateway's extra
    from tests.fuzz import gateway_forms

    TARGETS |= {name: Target(*each) for name, each in gateway_forms.TARGETS.items()}
