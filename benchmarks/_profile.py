"""Where a replica's time goes, step by step.

``install`` runs inside each replica's process, before its replica starts, and
puts a stopwatch around the steps named in ``STEPS``; ``profile`` lets the
leader append to itself and prints what the stopwatches of the leader and of a
follower show. Times are exclusive: a step's own, without the steps inside it.
Wall time that is not CPU time was spent waiting: for the disk, for a peer, or
for Python's lock. A stopwatch costs about a microsecond per call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from benchmarks._bench import Bench
from rayqueue.testing import LoadReport, ProcessGroup

SETUP = "benchmarks._profile:install"

STEPS: tuple[tuple[str, str, str], ...] = (
    # module, attribute, step
    ("rayqueue.replica.replica", "Replica._turn", "replica: the rest of a turn"),
    ("rayqueue.replica.replica", "Replica._take_calls", "take calls"),
    ("rayqueue.replica.replica", "Replica._finish", "deliver answers"),
    ("rayqueue.replica.replica", "Replica._publish", "publish status, wake readers"),
    ("rayqueue.replica.replica", "Replica._maintain", "maintain"),
    ("rayqueue.replica.replica", "Replica.append", "append (caller's thread)"),
    ("rayqueue.partition.admission", "Admission.check", "admission: checks, crc (caller's thread)"),
    ("rayqueue.partition.admission", "Admission.admit_checked", "admission: producers"),
    ("rayqueue.raft.tcp", "TcpTransport.poll", "poll"),
    ("selectors", "EpollSelector.select", "poll: epoll, mostly waiting"),
    ("rayqueue.raft.stream", "Stream.read_into", "poll: recv"),
    ("rayqueue.raft.wire", "decode", "poll: decode, crc"),
    ("rayqueue.raft.tcp", "TcpTransport.send", "send: encode"),
    ("rayqueue.raft.stream", "Stream.write", "send: socket"),
    ("rayqueue.raft.engine", "RaftEngine.receive", "engine: receive"),
    ("rayqueue.raft.engine", "RaftEngine.step", "engine: the rest of a step"),
    ("rayqueue.raft.engine", "RaftEngine.stock_tick", "engine: stock tick"),
    ("rayqueue.raft.engine", "RaftEngine.apply_committed", "engine: apply, read entries"),
    ("rayqueue.raft.engine", "RaftEngine._write_proposals", "engine: write proposals, crc"),
    ("rayqueue.raft.engine", "RaftEngine._replicate", "engine: replicate"),
    ("rayqueue.partition.machine", "Partition.apply", "partition: apply"),
    ("rayqueue.log.lmdb_store", "LmdbStore.sync", "store: the rest of a sync"),
    ("rayqueue.log.lmdb_store", "LmdbStore._write", "LMDB: begin, commit, fdatasync"),
    ("rayqueue.log.lmdb_store", "write_ops", "LMDB: put entries and rows"),
)


# -- inside the replica's process -----------------------------------------------------


class Stopwatches:
    """Exclusive wall and CPU time per step, over all threads."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {step: 0 for *_, step in STEPS}
        self.wall_s: dict[str, float] = dict.fromkeys(self.calls, 0.0)
        self.cpu_s: dict[str, float] = dict.fromkeys(self.calls, 0.0)
        self._local = threading.local()

    def around(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        local, wall, cpu = self._local, time.perf_counter, time.thread_time

        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            inner: list[list[float]] = local.__dict__.setdefault("inner", [])
            spent = [0.0, 0.0]  # by the steps inside this one
            inner.append(spent)
            began_wall, began_cpu = wall(), cpu()
            try:
                return function(*arguments, **named)
            finally:
                took_wall, took_cpu = wall() - began_wall, cpu() - began_cpu
                inner.pop()
                if inner:
                    inner[-1][0] += took_wall
                    inner[-1][1] += took_cpu
                self.calls[step] += 1
                self.wall_s[step] += took_wall - spent[0]
                self.cpu_s[step] += took_cpu - spent[1]

        return timed

    def read(self) -> dict[str, Any]:
        return {step: (self.calls[step], self.wall_s[step], self.cpu_s[step]) for step in self.calls}


def install() -> Callable[[], dict[str, Any]]:
    """Put the stopwatches in place. What it returns reads them."""
    watches = Stopwatches()
    for module_name, path, step in STEPS:
        owner: Any = import_module(module_name)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, name, watches.around(step, getattr(owner, name)))
    return watches.read


# -- in the benchmark -----------------------------------------------------------------


def profile(bench: Bench, group: ProcessGroup, title: str, batch: Callable[[], bytes], in_flight: int) -> LoadReport:
    """Append for a few seconds and print a table. The group must have been started with ``SETUP``."""
    leader = group.leader()
    follower = next(node for node in group.nodes if node != leader)
    warm = group.load(batch(), 200, in_flight, via=leader)
    seconds = 3.0 if bench.quick else 10.0
    count = int(warm.batches_per_s * seconds)
    before = {node: group.setup_report(node) for node in (leader, follower)}
    report = group.load(batch(), count, in_flight, via=leader)
    after = {node: group.setup_report(node) for node in (leader, follower)}
    rows: list[list[object]] = []
    for *_, step in STEPS:
        row: list[object] = [step]
        for node in (leader, follower):
            calls, wall_s, cpu_s = (now - then for now, then in zip(after[node][step], before[node][step], strict=True))
            row += [calls / count, wall_s / count * 1e6, cpu_s / count * 1e6]
        rows.append(row)
    rows.sort(key=lambda row: -float(str(row[2])))
    columns = ("step, us per batch", "leader: calls", "wall", "CPU", "follower: calls", "wall", "CPU")
    bench.table(f"{title}: {1e6 / report.batches_per_s:,.0f} us per batch, with the stopwatches on", columns, rows)
    return report
