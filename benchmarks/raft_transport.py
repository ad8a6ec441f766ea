"""The TCP transport between two processes on this machine: throughput, CPU, round trip.

One AppendEntries with one entry of 100 KB at a time, as a leader sends them,
each answered by an AppendReply; the receiver verifies every checksum. The same
once more over TLS. Beside it, measured in the same run: the same bytes by
plain blocking sockets (no frames, no checksums, no answers), and the HMAC of
the same bytes (what a MAC per frame would add on each side).

    python benchmarks/raft_transport.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import trustme

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._bench import Bench, parser
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.store import Entry
from rayqueue.raft.messages import AppendEntries, AppendReply, PreVote, TimeoutNow
from rayqueue.raft.tcp import TcpTransport, tls_contexts
from rayqueue.raft.transport import Event, PeerUp, Received
from rayqueue.records.checksum import entry_crc

LEADER, FOLLOWER = ReplicaId("leader"), ReplicaId("follower")
SECRET = b"only for this benchmark"
HOST = "127.0.0.1"
PAYLOAD_BYTES = 100_000


def transport(replica_id: ReplicaId, certificates: Path | None) -> TcpTransport:
    tls = None
    if certificates is not None:
        tls = tls_contexts(certificates / "cert.pem", certificates / "key.pem", certificates / "ca.pem")
    return TcpTransport(replica_id, GroupId("bench-0"), SECRET, HOST, tls=tls)


def issue_certificates(folder: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("replica.rayqueue.test")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")


def follow(leader_port: int, certificates: Path | None) -> None:
    """The other process: answers appends, echoes small messages, tells its CPU time when asked."""
    me = transport(FOLLOWER, certificates)
    me.set_peers({LEADER: (HOST, leader_port)})
    spin = False
    while True:
        for event in me.poll(0.0 if spin else 1.0):
            if not isinstance(event, Received):
                continue
            message = event.message
            if isinstance(message, AppendEntries):
                last = Index(message.prev_index + len(message.entries))
                me.send(LEADER, AppendReply(message.term, True, message.prev_index, last, message.round))
            elif isinstance(message, PreVote):
                me.send(LEADER, message)
            elif isinstance(message, AppendReply):
                spin = message.success
                me.send(LEADER, AppendReply(Term(0), True, Index(0), Index(int(time.process_time() * 1e9)), 0))
            elif isinstance(message, TimeoutNow):
                return


def receive(me: TcpTransport, count: int = 1) -> list[Event]:
    received: list[Event] = []
    while len(received) < count:
        received += [event for event in me.poll(1.0) if isinstance(event, Received)]
    return received


def follower_cpu_s(me: TcpTransport, *, spin: bool = False) -> float:
    me.send(FOLLOWER, AppendReply(Term(0), spin, Index(0), Index(0), 0))
    (event,) = receive(me)
    assert isinstance(event, Received)
    assert isinstance(event.message, AppendReply)
    return event.message.match / 1e9


def appends(me: TcpTransport, seconds: float, in_flight: int, prefix: str = "") -> dict[str, float]:
    payload = os.urandom(PAYLOAD_BYTES)
    theirs, ours, begin = follower_cpu_s(me), time.process_time(), time.perf_counter()
    sent = answered = 0
    while time.perf_counter() - begin < seconds or answered < sent:
        while sent - answered < in_flight and time.perf_counter() - begin < seconds:
            # A leader computes the checksum once per entry, so it is part of the cost.
            entry = Entry(Index(sent + 1), Term(1), payload, entry_crc(sent + 1, 1, payload))
            if not me.send(FOLLOWER, AppendEntries(Term(1), Index(sent), Term(1), Index(sent), sent, (entry,))):
                break
            sent += 1
        answered += sum(isinstance(event, Received) for event in me.poll(1.0))
    elapsed = time.perf_counter() - begin
    ours = time.process_time() - ours
    theirs = follower_cpu_s(me) - theirs
    return {
        f"{prefix}append_100kb_per_s_{in_flight}": sent / elapsed,
        f"{prefix}append_mb_per_s_{in_flight}": sent * PAYLOAD_BYTES / elapsed / 1e6,
        f"{prefix}leader_cpu_us_per_append_{in_flight}": ours / sent * 1e6,
        f"{prefix}follower_cpu_us_per_append_{in_flight}": theirs / sent * 1e6,
    }


def round_trips(me: TcpTransport, count: int, *, spin: bool) -> dict[str, float]:
    follower_cpu_s(me, spin=spin)
    message = PreVote(Term(1), Index(2), Term(1))
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        me.send(FOLLOWER, message)
        while not me.poll(0.0 if spin else 1.0):
            pass
        times.append((time.perf_counter() - begin) * 1e6)
    follower_cpu_s(me, spin=False)
    name = "spinning" if spin else "waiting"
    return {
        f"round_trip_{name}_p50_us": statistics.median(times),
        f"round_trip_{name}_p99_us": statistics.quantiles(times, n=100)[98],
    }


def drain(port: int) -> None:
    """The raw limit's other process."""
    space = memoryview(bytearray(1 << 20))
    with socket.create_connection((HOST, port)) as sock:
        while sock.recv_into(space):
            pass


def raw_limit(seconds: float) -> dict[str, float]:
    payload = os.urandom(PAYLOAD_BYTES)
    with socket.create_server((HOST, 0)) as server:
        child = spawn("drain", server.getsockname()[1])
        sock, _ = server.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent, begin, cpu = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - begin < seconds:
                sock.sendall(payload)
                sent += 1
            elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
        child.wait()
    return {"raw_mb_per_s": sent * PAYLOAD_BYTES / elapsed / 1e6, "raw_sender_cpu_us_per_100kb": cpu / sent * 1e6}


def hmac_us() -> float:
    payload, rounds, begin = os.urandom(PAYLOAD_BYTES), 500, time.perf_counter()
    for _ in range(rounds):
        hmac.digest(SECRET, payload, "sha256")
    return (time.perf_counter() - begin) / rounds * 1e6


def spawn(role: str, port: int, certificates: Path | None = None) -> subprocess.Popen[bytes]:
    more = [] if certificates is None else ["--certificates", str(certificates)]
    return subprocess.Popen([sys.executable, __file__, "--role", role, "--port", str(port), *more])


@contextlib.contextmanager
def pair(certificates: Path | None = None) -> Iterator[TcpTransport]:
    """A leader here, its follower in another process, connected and warm."""
    me = transport(LEADER, certificates)
    child = spawn("follow", me.address[1], certificates)
    while PeerUp(FOLLOWER) not in me.poll(1.0):
        pass
    appends(me, 0.3, 8)
    yield me
    me.send(FOLLOWER, TimeoutNow(Term(1)))
    child.wait()
    me.close()


def measure(seconds: float, trips: int) -> dict[str, float]:
    figures = raw_limit(seconds) | {"hmac_us_per_100kb": hmac_us()}
    with pair() as me:
        for in_flight in (1, 8, 32):
            figures |= appends(me, seconds, in_flight)
        figures |= round_trips(me, trips, spin=False)
        figures |= round_trips(me, trips, spin=True)
    with tempfile.TemporaryDirectory() as folder:
        issue_certificates(Path(folder))
        with pair(Path(folder)) as me:
            figures |= appends(me, seconds, 8, prefix="tls_")
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--role", choices=("follow", "drain"), help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.role == "follow":
        follow(chosen.port, chosen.certificates)
    elif chosen.role == "drain":
        drain(chosen.port)
    else:
        bench = Bench("raft_transport", chosen)
        bench.add(**measure(1.0 if bench.quick else 5.0, 3000 if bench.quick else 20_000))
        bench.table("TCP transport between two processes", ("", "figure"), list(bench.figures.items()))
        bench.finish()


if __name__ == "__main__":
    main()
