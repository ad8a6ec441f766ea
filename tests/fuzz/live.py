"""A live group of three replicas under wrong frames, and a client beside them that behaves.

Real processes, real sockets, real files. No replica may die, the leader must
stay, and the client must be served as if nobody else were there, but for the
time that two cores need for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.net.channel import Channel
from rayqueue.net.endpoint import Endpoint
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.frames import Kind, head
from rayqueue.records import Compression, RecordBatch
from rayqueue.testing import ProcessGroup
from tests.fuzz import mutations
from tests.fuzz.targets import BATCHES, COORDINATOR_CALLS, FRAMES, PARTITION_CALLS, TARGETS, _resealed
from tests.unit.net.client_net import RawClient

MAX_P99_MS = 500.0
SLOWER = 3
"""One of the two bounds: generous, for the cores are shared by replicas, attackers and whatever else runs here."""
_ATTACKERS = 3
_IDLE = 40


@dataclass(slots=True)
class LiveReport:
    frames: int = 0
    connections: int = 0
    strangers: int = 0
    appended: int = 0
    alone_p99_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0
    grown_mb: float = 0.0
    """The leader's memory."""
    complaints: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        return {**asdict(self), "complaints": len(self.complaints)}


def attack(seconds: float, seed: int) -> LiveReport:
    report = LiveReport()
    with tempfile.TemporaryDirectory() as path, ProcessGroup(Path(path)) as group:
        _attack(group, seconds, seed, report)
        report.complaints += group.crashes
    return report


def _attack(group: ProcessGroup, seconds: float, seed: int, report: LiveReport) -> None:
    leader = group.leader()
    endpoints = [group.endpoint(node) for node in (leader, *(node for node in group.replica_ids if node != leader))]
    before, memory_mb = group.status(leader), _memory_mb(group.pid(leader))
    alone = asyncio.run(_behave(endpoints[0], min(2.0, seconds / 2), report))
    report.alone_p99_ms = _p99(alone)
    ends_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_misbehave, args=(endpoints, ends_s, random.Random(f"live {seed} {number}"), report))
        for number in range(_ATTACKERS)
    ]
    for thread in threads:
        thread.start()
    took_ms = asyncio.run(_behave(endpoints[0], seconds, report))
    for thread in threads:
        thread.join(seconds + 30)
    report.p99_ms, report.longest_ms = _p99(took_ms), round(max(took_ms), 1)
    report.grown_mb = round(_memory_mb(group.pid(leader)) - memory_mb, 1)
    after = group.status(leader)
    if (after.role, after.term) != ("leader", before.term):
        report.complaints.append(f"{leader} led term {before.term} and is {after.role} of term {after.term}")
    most_ms = max(MAX_P99_MS, SLOWER * report.alone_p99_ms)
    if report.p99_ms > most_ms:
        report.complaints.append(f"the client beside waited {report.p99_ms} ms (p99); {most_ms} are allowed")


async def _behave(endpoint: Endpoint, seconds: float, report: LiveReport) -> list[float]:
    """Append and read back, one after the other; how long each pair took, in ms."""
    channel = await Channel.open(endpoint, Settings())
    took_ms: list[float] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        began_s = time.perf_counter()
        value = b"%d" % len(took_ms)
        method = Compression.LZ4 if len(took_ms) % 4 == 0 else Compression.NONE
        try:
            answer = await channel.append(RecordBatch.encode([value * 40] * 5, timestamps=1, compression=method))
            offset = answer.base_offset or 0
            found = await channel.fetch(FetchRequest((Cursor(ANY_LANE, offset),), 1 << 20))
            read = RecordBatch.decode(found.batches[0].payload, base_offset=offset).values()
        except RayQueueError as error:
            report.complaints.append(f"the client beside got {error!r}")
            break
        if read != [value * 40] * 5:
            report.complaints.append(f"the client beside read something else at {offset}")
        took_ms.append((time.perf_counter() - began_s) * 1000)
        report.appended += 1
        await asyncio.sleep(0.002)
    channel.close()
    return took_ms or [float("inf")]


def _misbehave(endpoints: list[Endpoint], ends_s: float, rng: random.Random, report: LiveReport) -> None:
    idle: list[RawClient] = []
    while time.monotonic() < ends_s:
        # Mostly the leader: it is the one that has something to lose.
        endpoint = endpoints[0] if rng.random() < 0.7 else rng.choice(endpoints)
        with contextlib.suppress(OSError, RayQueueError):
            if rng.random() < 0.15:
                _stranger(endpoint, rng)
                report.strangers += 1
                continue
            client = RawClient(endpoint)
            report.connections += 1
            if rng.random() < 0.1 and len(idle) < _IDLE:
                client.socket.sendall(head(Kind.APPEND, 1, 1_000_000)[: rng.randrange(10)])
                idle.append(client)
                continue
            client.socket.settimeout(1.0)
            for _ in range(rng.randrange(1, 60)):
                client.socket.sendall(_frame(rng))
                report.frames += 1
            client.socket.close()
    for client in idle:
        client.close()


def _stranger(endpoint: Endpoint, rng: random.Random) -> None:
    with socket.create_connection((endpoint.host, endpoint.port), 2.0) as stranger:
        seeds = TARGETS["handshakes"].seeds
        stranger.sendall(mutations.plain(rng, seeds))


def _frame(rng: random.Random) -> bytes:
    match rng.randrange(8):
        case 0:
            return mutations.mutated(rng, rng.choice(FRAMES))
        case 1 | 2 | 3:
            body = _resealed(mutations.mutated(rng, rng.choice(BATCHES)))
            kind = rng.choice((Kind.APPEND, Kind.APPEND_LEADER, Kind.APPEND_UNACKED))
        case 4:
            seeds = [seed[1:] for seed in TARGETS["partition"].seeds if seed[0] == Kind.FETCH]
            kind, body = Kind.FETCH, mutations.mutated(rng, rng.choice(seeds))
        case _:
            kind, body = Kind.CALL, mutations.packed(rng, PARTITION_CALLS + COORDINATOR_CALLS)
    return head(kind, rng.randrange(1, 1000), len(body)) + body


def _p99(took_ms: list[float]) -> float:
    return round(sorted(took_ms)[int(len(took_ms) * 0.99)], 1)


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6
