"""The profile of a replica: where its time goes, step by step.

``install`` runs inside each replica's process, before its replica starts, and
puts a stopwatch around the steps named in ``STEPS``; ``profile`` appends to the
leader and prints what the stopwatches of the leader and of a follower show.
Times are exclusive: a step's own, without the steps inside it. Wall time that is
not CPU time was spent waiting: for the disk, for a peer, or for Python's lock.
What the stopwatches cost is subtracted, as far as it can be known beforehand.
"""

from __future__ import annotations

import statistics
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
    ("rayqueue.replica.replica", "Replica._stepped", "deliver answers"),
    ("rayqueue.replica.replica", "Replica._publish", "publish status"),
    ("rayqueue.replica.replica", "Replica._maintain", "maintain"),
    ("rayqueue.replica.clients", "Clients.on_ready", "clients: read requests"),
    ("rayqueue.replica.clients", "Clients.flush", "clients: write answers"),
    ("rayqueue.partition.admission", "Admission.check", "admission: checks, crc"),
    ("rayqueue.partition.admission", "Admission.admit_checked", "admission: producers"),
    ("rayqueue.raft.tcp", "TcpTransport.poll", "poll"),
    ("selectors", "EpollSelector.select", "poll: epoll, mostly waiting"),
    ("rayqueue.net.streams", "Stream.read_into", "poll: recv"),
    ("rayqueue.raft.wire", "decode", "poll: decode, crc"),
    ("rayqueue.raft.tcp", "TcpTransport.send", "send: encode"),
    ("rayqueue.net.streams", "Stream.write", "send: socket"),
    ("rayqueue.raft.engine", "RaftEngine.receive", "engine: receive"),
    ("rayqueue.raft.engine", "RaftEngine.step", "engine: the rest of a step"),
    ("rayqueue.raft.engine", "RaftEngine.stock_tick", "engine: stock tick"),
    ("rayqueue.raft.engine", "RaftEngine.apply_committed", "engine: apply, read entries"),
    ("rayqueue.raft.engine", "RaftEngine._write_proposals", "engine: write proposals, crc"),
    ("rayqueue.raft.engine", "RaftEngine._replicate", "engine: replicate"),
    ("rayqueue.partition.machine", "Partition.apply", "partition: apply"),
    ("rayqueue.log.lmdb_store", "LmdbStore.persist", "store: persist"),
    ("rayqueue.log.buffer", "encode_ops", "write-ahead file: encode"),
    ("rayqueue.log.wal", "Wal.write", "write-ahead file: write, wait for the disk"),
    ("rayqueue.log.lmdb_store", "LmdbStore.sync", "store: the rest of a sync"),
    ("rayqueue.log.lmdb_store", "LmdbStore._write", "LMDB: begin, commit, fdatasync"),
    ("rayqueue.log.lmdb_store", "write_ops", "LMDB: put entries and rows"),
)


# -- inside the replica's process -----------------------------------------------------


class Stopwatches:
    """Exclusive wall and CPU time per step, over all threads, less what the stopwatches themselves take."""

    def __init__(self) -> None:
        self._steps: dict[str, list[float]] = {}  # calls, calls inside, wall, CPU
        self._local = threading.local()
        self._own, self._inside = self._calibrate()

    def around(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        local, wall, cpu = self._local, time.perf_counter, time.thread_time
        total = self._steps.setdefault(step, [0.0, 0.0, 0.0, 0.0])

        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            try:
                outer: list[list[float]] = local.outer
            except AttributeError:
                outer = local.outer = []
            inside = [0.0, 0.0, 0.0]  # calls, wall and CPU of the steps inside this one
            outer.append(inside)
            began_wall, began_cpu = wall(), cpu()
            try:
                return function(*arguments, **named)
            finally:
                took_cpu, took_wall = cpu() - began_cpu, wall() - began_wall
                outer.pop()
                if outer:
                    above = outer[-1]
                    above[0] += 1
                    above[1] += took_wall
                    above[2] += took_cpu
                total[0] += 1
                total[1] += inside[0]
                total[2] += took_wall - inside[1]
                total[3] += took_cpu - inside[2]

        return timed

    def read(self) -> dict[str, tuple[float, float, float]]:
        """Calls, wall and CPU seconds of each step so far."""
        (own_wall, own_cpu), (inside_wall, inside_cpu) = self._own, self._inside
        return {
            step: (calls, wall - calls * own_wall - inside * inside_wall, cpu - calls * own_cpu - inside * inside_cpu)
            for step, (calls, inside, wall, cpu) in self._steps.items()
        }

    def _calibrate(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The cost of a stopwatch per call, to its own step and to the step around it: wall and CPU."""
        rounds, times = 100, 100
        inner = self.around("inner", lambda: None)

        def repeat() -> None:
            for _ in range(times):
                inner()

        outer = self.around("outer", repeat)
        own: list[tuple[float, float]] = []
        inside: list[tuple[float, float]] = []
        for _ in range(rounds):
            self._steps["inner"][:] = self._steps["outer"][:] = [0.0] * 4
            outer()
            own.append((self._steps["inner"][2] / times, self._steps["inner"][3] / times))
            inside.append((self._steps["outer"][2] / times, self._steps["outer"][3] / times))
        del self._steps["inner"], self._steps["outer"]
        return _medians(own), _medians(inside)


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in pairs), statistics.median(cpu for _, cpu in pairs)


def install() -> Callable[[], dict[str, tuple[float, float, float]]]:
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
    follower = next(node for node in group.replica_ids if node != leader)
    warm = group.client.load(batch(), 200, in_flight)
    seconds = 3.0 if bench.quick else 10.0
    count = int(warm.batches_per_s * seconds)
    before = {node: group.setup_report(node) for node in (leader, follower)}
    report = group.client.load(batch(), count, in_flight)
    after = {node: group.setup_report(node) for node in (leader, follower)}
    rows: list[list[object]] = []
    for *_, step in STEPS:
        row: list[object] = [step]
        for node in (leader, follower):
            calls, wall_s, cpu_s = (now - then for now, then in zip(after[node][step], before[node][step], strict=True))
            row += [calls / count, max(0.0, wall_s / count * 1e6), max(0.0, cpu_s / count * 1e6)]
        rows.append(row)
    rows.append(["all of them", *(sum(float(str(row[column])) for row in rows) for column in range(1, 7))])
    rows.sort(key=lambda row: -float(str(row[2])))
    columns = ("step, us per batch", "leader: calls", "wall", "CPU", "follower: calls", "wall", "CPU")
    bench.table(f"{title}: {1e6 / report.batches_per_s:,.0f} us per batch, with the stopwatches on", columns, rows)
    return report
