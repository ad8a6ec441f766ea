"""The log's path: three replica processes, one disk, fsync before every answer.

Throughput and latency of appends over one client's connection (no Ray, no
producer), beside what the same disk and the same loopback can do at most; bytes
on disk per byte of payload; and CPU per batch as the log grows.

    python benchmarks/log_path.py [--quick] [--json] [--plot] [--profile]

Batches are those of an idempotent producer. "In flight" is how many of them
wait for their answer at a time. MB are payload: what users would count. CPU is
that of the replicas' processes; the client's, which makes the batches, is not in it.
``ratio_to_raw_lmdb`` compares 8 in flight with one process that does nothing
but put the same batches into LMDB, one synced transaction each.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _raw_limits as raw
from benchmarks._bench import Bench, Figures, Steps, figure, median, parser, percentile
from benchmarks._profile import SETUP, profile
from benchmarks._store_cost import small_writes
from rayqueue.config import Settings
from rayqueue.ids import ReplicaId
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.records import RecordBatch
from rayqueue.testing import LoadReport, ProcessGroup

SINGLE_BYTES = 100
LENGTHS = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
PROBE_BATCHES = 5_000
PROBE_IN_FLIGHT = 32
FILL_IN_FLIGHT = 256

_producer_ids = count(1)


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of so many records of so many bytes. ``suffix`` tells its figures from the others'."""

    records: int
    record_bytes: int
    suffix: str

    @property
    def payload_bytes(self) -> int:
        return self.records * self.record_bytes

    def batch(self) -> bytes:
        """As a producer that has not written before would send it."""
        values = [os.urandom(self.record_bytes) for _ in range(self.records)]
        return RecordBatch.encode(values, timestamps=1_700_000_000_000, producer_id=next(_producer_ids))

    def __str__(self) -> str:
        return f"{self.records:,} x {self.record_bytes:,} B"


HUNDRED_BYTES = Shape(1000, 100, "")
KILOBYTE = Shape(100, 1000, "_1kb")
SINGLE = Shape(1, SINGLE_BYTES, "_single")


@dataclass(frozen=True, slots=True)
class Cost:
    """A load, and the CPU it took on the leader and on one follower (the mean), in microseconds per batch."""

    report: LoadReport
    leader_us: float
    follower_us: float
    syncs: float
    """The leader's, per batch."""

    @property
    def all_us(self) -> float:
        return self.leader_us + 2 * self.follower_us


def measured(group: ProcessGroup, batch: bytes, batches: int, in_flight: int) -> Cost:
    leader = group.leader()
    before = {node: group.usage(node) for node in group.replica_ids}
    report = group.client.load(batch, batches, in_flight)
    after = {node: group.usage(node) for node in group.replica_ids}

    def cpu_us(node: ReplicaId) -> float:
        return (after[node].cpu_s - before[node].cpu_s) / batches * 1e6

    followers = [cpu_us(node) for node in group.replica_ids if node != leader]
    return Cost(
        report,
        cpu_us(leader),
        sum(followers) / len(followers),
        (after[leader].syncs - before[leader].syncs) / batches,
    )


def open_group(folder: Path) -> ProcessGroup:
    return ProcessGroup(folder, settings=Settings())


# -- throughput -------------------------------------------------------------------------


def throughput(bench: Bench, folder: Path, shape: Shape, steps: Steps) -> None:
    """A few rounds; in each the raw limit first, then the group, so that both see the same disk."""
    rounds = 1 if bench.quick else 3
    seconds = 1.0 if bench.quick else 3.0
    flights = (1, 8, 32)
    costs: dict[int, list[Cost]] = {in_flight: [] for in_flight in flights}
    limits: list[raw.Limit] = []
    ratios: list[float] = []
    with open_group(folder) as group:
        done = 0
        for number in range(rounds):
            steps.next(f"{shape}: LMDB alone, round {number + 1}")
            limits.append(raw.lmdb_put(folder / "raw", shape.batch(), seconds))
            for in_flight in flights:
                steps.next(f"{shape}: {in_flight} in flight, round {number + 1}")
                warm = group.client.load(shape.batch(), 100, in_flight)
                batches = min(int(warm.batches_per_s * seconds), 400_000_000 // shape.payload_bytes)
                costs[in_flight].append(measured(group, shape.batch(), max(100, batches), in_flight))
                done += warm.batches + costs[in_flight][-1].report.batches
            raw_batches_per_s = limits[-1].mb_per_s * 1e6 / len(shape.batch())
            ratios.append(costs[8][-1].report.batches_per_s / raw_batches_per_s)
        sizes = [group.status(node).size_bytes for node in group.replica_ids]
        disk_ratio = median(sizes) / (done * shape.payload_bytes)
    _report_throughput(bench, shape, costs, limits, median(ratios), disk_ratio)
    shutil.rmtree(folder)


def _report_throughput(
    bench: Bench,
    shape: Shape,
    costs: dict[int, list[Cost]],
    limits: list[raw.Limit],
    ratio: float,
    disk_ratio: float,
) -> None:
    figures: Figures = {}
    rows: list[list[object]] = []
    for in_flight, done in costs.items():
        records_per_s = median([cost.report.records_per_s for cost in done])
        latencies = [each for cost in done for each in cost.report.latencies_ms]
        name = f"{shape.suffix}_{in_flight}"
        found = {
            f"msgs_per_s{name}": records_per_s,
            f"mb_per_s{name}": records_per_s * shape.record_bytes / 1e6,
            f"batch{name}_p50_ms": percentile(latencies, 50),
            f"batch{name}_p99_ms": percentile(latencies, 99),
            f"leader{name}_cpu_us_per_batch": median([cost.leader_us for cost in done]),
            f"follower{name}_cpu_us_per_batch": median([cost.follower_us for cost in done]),
        }
        figures |= found
        rows.append([f"{in_flight} in flight", *found.values(), 1 / median([c.syncs for c in done])])
    batch_bytes = len(shape.batch())
    raw_mb_per_s = median([limit.mb_per_s for limit in limits]) * shape.payload_bytes / batch_bytes
    raw_times = [each for limit in limits for each in limit.times_ms]
    figures |= {
        f"raw_lmdb{shape.suffix}_mb_per_s": raw_mb_per_s,
        f"raw_lmdb{shape.suffix}_p50_ms": percentile(raw_times, 50),
        f"ratio_to_raw_lmdb{shape.suffix}": ratio,
        f"disk_bytes_per_payload_byte{shape.suffix}": disk_ratio,
    }
    alone = [
        "LMDB alone",
        raw_mb_per_s * 1e6 / shape.record_bytes,
        raw_mb_per_s,
        percentile(raw_times, 50),
        percentile(raw_times, 99),
        "",
        "",
        1,
    ]
    bench.add(**figures)
    columns = ("", "msg/s", "MB/s", "p50 ms", "p99 ms", "leader CPU us", "follower CPU us", "batches per sync")
    bench.table(f"Batches of {shape} ({batch_bytes:,} B encoded)", columns, [*rows, alone])
    bench.say(f"8 in flight to LMDB alone: {ratio:.2f}. Bytes on disk per byte of payload: {disk_ratio:.2f}.\n")


# -- latency ------------------------------------------------------------------------------


def latency(bench: Bench, folder: Path, steps: Steps) -> list[float]:
    """One record, one in flight: what a caller waits for its commit."""
    steps.next("one record at a time")
    with open_group(folder) as group:
        measured(group, SINGLE.batch(), 200, 1)
        cost = measured(group, SINGLE.batch(), 1_000 if bench.quick else 10_000, 1)
    steps.next("one record: raw limits")
    times_ms = cost.report.latencies_ms
    batch = SINGLE.batch()
    put = raw.lmdb_put(folder / "raw", batch, 1.0 if bench.quick else 3.0).times_ms
    sync = raw.fdatasync(folder, batch, 1.0 if bench.quick else 3.0).times_ms
    steps.next("one record: the store alone")
    by_sync = small_writes(folder / "by_sync", batch, 1.0 if bench.quick else 3.0, LmdbStore.sync)
    by_persist = small_writes(folder / "by_persist", batch, 1.0 if bench.quick else 3.0, LmdbStore.persist)
    shutil.rmtree(folder)
    bench.add(
        commit_p50_ms=percentile(times_ms, 50),
        commit_p99_ms=percentile(times_ms, 99),
        raw_lmdb_single_p50_ms=percentile(put, 50),
        raw_lmdb_single_p99_ms=percentile(put, 99),
        raw_fdatasync_single_p50_ms=percentile(sync, 50),
        raw_fdatasync_single_p99_ms=percentile(sync, 99),
        store_sync_single_p50_ms=percentile(by_sync.times_ms, 50),
        store_sync_single_cpu_us=by_sync.cpu_us,
        store_persist_single_p50_ms=percentile(by_persist.times_ms, 50),
        store_persist_single_cpu_us=by_persist.cpu_us,
        leader_single_cpu_us_per_batch=cost.leader_us,
        follower_single_cpu_us_per_batch=cost.follower_us,
    )
    rows = [
        [name, percentile(times, 50), percentile(times, 99)]
        for name, times in (
            ("commit on three replicas", times_ms),
            ("the store alone, persist", by_persist.times_ms),
            ("the store alone, sync", by_sync.times_ms),
            ("LMDB put", put),
            ("write + fdatasync", sync),
        )
    ]
    bench.table(f"One record of {SINGLE_BYTES} B, one at a time", ("", "p50 ms", "p99 ms"), rows)
    return list(times_ms)


def raw_limits(bench: Bench, folder: Path, steps: Steps) -> None:
    """The same bytes without RayQueue."""
    seconds = 1.0 if bench.quick else 3.0
    batch = HUNDRED_BYTES.batch()
    share = HUNDRED_BYTES.payload_bytes / len(batch)
    steps.next("raw limits: fdatasync")
    sync = raw.fdatasync(folder, batch, seconds)
    steps.next("raw limits: three LMDB writers at once")
    three = raw.lmdb_puts_at_once(folder, batch, seconds, 3)
    steps.next("raw limits: three LMDB writers, 8 batches a time")
    three_by_8 = raw.lmdb_puts_at_once(folder, batch, seconds, 3, per_transaction=8)
    steps.next("raw limits: loopback")
    copy = raw.loopback(batch, seconds)
    memory = raw.new_memory(8 << 20, seconds / 2)
    bench.add(
        raw_fdatasync_mb_per_s=sync.mb_per_s * share,
        raw_fdatasync_p50_ms=percentile(sync.times_ms, 50),
        raw_lmdb_3_writers_mb_per_s=three.mb_per_s * share,
        raw_lmdb_3_writers_8_per_sync_mb_per_s=three_by_8.mb_per_s * share,
        raw_loopback_mb_per_s=copy.mb_per_s * share,
        raw_new_memory_mb_per_s=memory.mb_per_s,
    )
    rows = [
        ["write + fdatasync, one writer", sync.mb_per_s * share, percentile(sync.times_ms, 50)],
        ["LMDB put, three writers, MB/s of each", three.mb_per_s * share, percentile(three.times_ms, 50)],
        ["the same, 8 batches per sync", three_by_8.mb_per_s * share, percentile(three_by_8.times_ms, 50)],
        ["loopback TCP copy", copy.mb_per_s * share, percentile(copy.times_ms, 50)],
        ["new memory, 8 MiB", memory.mb_per_s, percentile(memory.times_ms, 50)],
    ]
    bench.table(f"Raw limits for batches of {HUNDRED_BYTES}", ("", "payload MB/s", "p50 ms"), rows)


# -- length -------------------------------------------------------------------------------


def length(bench: Bench, folder: Path, steps: Steps) -> list[tuple[int, Cost]]:
    """CPU per batch when so many batches are in the log already."""
    found: list[tuple[int, Cost]] = []
    rows: list[list[object]] = []
    written = 0
    with open_group(folder) as group:
        for name, batches in LENGTHS.items():
            if bench.quick and batches > 100_000:
                break
            steps.next(f"{batches:,} small batches")
            fill = batches - PROBE_BATCHES - written
            group.client.load(SINGLE.batch(), fill, FILL_IN_FLIGHT, timeout_s=1800)
            cost = measured(group, SINGLE.batch(), PROBE_BATCHES, PROBE_IN_FLIGHT)
            written = batches
            leader = group.leader()
            found.append((batches, cost))
            figures = {
                f"cpu_us_per_batch_{name}": cost.all_us,
                f"leader_cpu_us_per_batch_{name}": cost.leader_us,
                f"follower_cpu_us_per_batch_{name}": cost.follower_us,
                f"batch_p50_ms_{name}": percentile(cost.report.latencies_ms, 50),
            }
            bench.add(**figures)
            memory_mb = group.usage(leader).memory_bytes / 1e6
            rows.append([batches, *figures.values(), group.status(leader).size_bytes / 1e6, memory_mb])
            bench.add(**{f"leader_memory_mb_{name}": memory_mb})
    columns = ("batches in the log", "CPU us, all", "leader", "one follower", "p50 ms", "disk MB", "memory MB")
    bench.table(f"Cost of one batch of {SINGLE}, {PROBE_IN_FLIGHT} in flight, by length of the log", columns, rows)
    shutil.rmtree(folder)
    return found


# -- all of it ------------------------------------------------------------------------------


def draw(bench: Bench, times_ms: list[float], costs: list[tuple[int, Cost]]) -> None:
    figures = bench.figures
    with figure("log_path_throughput", columns=2) as (bars, curve):
        for offset, (suffix, label) in enumerate((("", "1,000 x 100 B"), ("_1kb", "100 x 1 KB"))):
            heights = [figures[f"mb_per_s{suffix}_{k}"] for k in (1, 8, 32)] + [figures[f"raw_lmdb{suffix}_mb_per_s"]]
            bars.bar([x + offset * 0.4 for x in range(4)], heights, 0.4, label=label)
        bars.set_xticks([x + 0.2 for x in range(4)], ["1", "8", "32", "LMDB\nalone"])
        bars.set(xlabel="batches in flight", ylabel="payload MB/s", title="Three replicas, fsync on")
        bars.legend()
        ordered = sorted(times_ms)
        curve.plot(ordered, [number / len(ordered) for number in range(len(ordered))])
        curve.set(xlabel="ms", ylabel="share of commits", title="Commit of one record")
        curve.set_xlim(0, percentile(times_ms, 99))
    with figure("log_path_length", width_in=5.0) as axes:
        lengths = [batches for batches, _ in costs]
        axes.plot(lengths, [cost.leader_us for _, cost in costs], "o-", label="leader")
        axes.plot(lengths, [cost.follower_us for _, cost in costs], "o-", label="follower")
        axes.set(
            xscale="log", xlabel="batches in the log", ylabel="CPU us per batch", title="Cost and length of the log"
        )
        axes.set_ylim(bottom=0)
        axes.legend()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--profile", action="store_true", help="only say where the time goes, step by step")
    chosen = options.parse_args()
    bench = Bench("log_path", chosen)
    with bench.data_dir() as folder:
        if chosen.profile:
            for shape, in_flight in ((HUNDRED_BYTES, 8), (HUNDRED_BYTES, 1), (SINGLE, 1)):
                with ProcessGroup(folder / f"{in_flight}{shape.suffix}", settings=Settings(), setup=SETUP) as group:
                    report = profile(bench, group, f"{shape}, {in_flight} in flight", shape.batch, in_flight)
                    bench.add(**{f"profiled{shape.suffix}_{in_flight}_us_per_batch": 1e6 / report.batches_per_s})
        else:
            steps_in_all = 2 * 4 * (1 if bench.quick else 3) + 3 + 4 + (2 if bench.quick else 3)
            with bench.progress(steps_in_all) as steps:
                raw_limits(bench, folder, steps)
                throughput(bench, folder / "hundred", HUNDRED_BYTES, steps)
                throughput(bench, folder / "kilobyte", KILOBYTE, steps)
                times_ms = latency(bench, folder / "single", steps)
                costs = length(bench, folder / "length", steps)
            if bench.plot:
                draw(bench, times_ms, costs)
    bench.finish()


if __name__ == "__main__":
    main()
