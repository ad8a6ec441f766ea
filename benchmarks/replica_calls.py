"""The log's path through the Ray actors: a client calls the leader, three replicas, fsync before every answer.

The same figures as ``log_path.py``, so that the difference is what the call
costs, beside calls in the same run to an async actor that does nothing.

    python benchmarks/replica_calls.py [--quick] [--json] [--plot]

"In flight" is how many calls with one batch each are under way. ``pipeline`` is
how the client really writes: one call at a time, with all batches that wait.
Ray carries arguments below 100 KB inside the call and larger ones through its
object store; a batch of 1,000 x 100 B is just above that. So everything is
measured twice: on a Ray as ``embedded_ray`` starts it (the limit raised), and
on one with Ray's own settings (``_stock``), there also with 850 records.
CPU is that of the leader's process, and of the caller's.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

from benchmarks._bench import Bench, Figures, Steps, figure, median, parser, percentile
from rayqueue.actors.start import concurrency_groups
from rayqueue.client.embedded import RAY_SYSTEM_SETTINGS, embedded_ray
from rayqueue.config import CallSettings, Settings
from rayqueue.records import RecordBatch
from rayqueue.testing.ray_group import ReplicaGroup

RECORD_BYTES = 100
FLIGHTS = (1, 8, 32)
FETCH_BYTES = 1 << 20
TIMESTAMP = 1_700_000_000_000

_producer_ids = count(1)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def encoded(records: int, *, producer_id: int = 0, sequence: int = 0) -> bytes:
    values = [os.urandom(RECORD_BYTES)] * records
    return RecordBatch.encode(values, timestamps=TIMESTAMP, producer_id=producer_id, sequence=sequence)


class Nothing:
    """An async actor with the replica's concurrency groups, for what a call costs by itself."""

    async def warm(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="append")
    async def append(self, batch: bytes) -> int:
        return len(batch)


@dataclass(slots=True)
class Run:
    """Calls and what they took."""

    calls: int
    wall_s: float
    caller_cpu_s: float
    server_cpu_s: float
    times_ms: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.calls / self.wall_s

    @property
    def server_us(self) -> float:
        return self.server_cpu_s / self.calls * 1e6

    @property
    def caller_us(self) -> float:
        return self.caller_cpu_s / self.calls * 1e6


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def timed(work: Callable[[], list[float]], server_pid: int) -> Run:
    """``work`` returns the time of each call, in ms."""
    server, caller, started = cpu_s(server_pid), time.process_time(), time.perf_counter()
    times_ms = work()
    wall = time.perf_counter() - started
    return Run(len(times_ms), wall, time.process_time() - caller, cpu_s(server_pid) - server, times_ms)


def in_flight(call: Callable[[], Any], width: int, seconds: float) -> list[float]:
    """Keep ``width`` calls under way for so long."""
    clock = time.perf_counter
    waiting: deque[tuple[float, Any]] = deque()
    times_ms: list[float] = []
    end = clock() + seconds
    while waiting or clock() < end:
        while len(waiting) < width and clock() < end:
            waiting.append((clock(), call()))
        started, ref = waiting.popleft()
        ray.get(ref)
        times_ms.append((clock() - started) * 1000)
    return times_ms


# -- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bed:
    """A group on a Ray, and how its figures are told from the other Ray's."""

    group: ReplicaGroup
    leader: Any
    pid: int
    nothing: Any
    suffix: str
    seconds: float


def plain_calls(bed: Bed) -> tuple[Figures, list[list[object]]]:
    """Calls that do nothing, with a small argument and with a batch."""
    pid = ray.get(bed.nothing.warm.remote())
    figures: Figures = {}
    rows: list[list[object]] = []
    batch = encoded(1000)
    for name, argument in (("", b"."), ("_with_batch", batch)):
        one, many = (
            timed(lambda width=width, argument=argument: _calls(bed.nothing, argument, width, bed.seconds), pid)  # type: ignore[misc]
            for width in (1, 32)
        )
        figures |= {
            f"ray_call{name}{bed.suffix}_p50_ms": percentile(one.times_ms, 50),
            f"ray_call{name}{bed.suffix}_p99_ms": percentile(one.times_ms, 99),
            f"ray_calls{name}{bed.suffix}_per_s": many.per_s,
        }
        text = "a call that does nothing" if not name else f"the same with {len(batch):,} B"
        rows.append([text, *(_shown_call(one, many))])
    return figures, rows


def _calls(actor: Any, argument: bytes, width: int, seconds: float) -> list[float]:
    return in_flight(lambda: actor.append.remote(argument), width, seconds)


def _shown_call(one: Run, many: Run) -> list[object]:
    return [percentile(one.times_ms, 50), percentile(one.times_ms, 99), many.per_s, many.server_us, many.caller_us]


def single_appends(bed: Bed) -> tuple[Figures, list[list[object]]]:
    """One record, one in flight: what a caller waits for its commit."""
    batch = encoded(1)
    one = timed(lambda: _calls(bed.leader, batch, 1, 2 * bed.seconds), bed.pid)
    many = timed(lambda: _calls(bed.leader, batch, 32, bed.seconds), bed.pid)
    figures = {
        f"commit{bed.suffix}_p50_ms": percentile(one.times_ms, 50),
        f"commit{bed.suffix}_p99_ms": percentile(one.times_ms, 99),
        f"commits{bed.suffix}_per_s": many.per_s,
    }
    return figures, [["append of one record", *_shown_call(one, many)]]


def batch_appends(bed: Bed, records: int, suffix: str) -> tuple[Figures, list[list[object]]]:
    batch = encoded(records)
    figures: Figures = {}
    rows: list[list[object]] = []
    for width in FLIGHTS:
        run = timed(lambda width=width: _calls(bed.leader, batch, width, bed.seconds), bed.pid)  # type: ignore[misc]
        name = f"{suffix}{bed.suffix}_{width}"
        figures |= _throughput(name, run, records)
        rows.append(_shown_throughput(f"{records:,} x {RECORD_BYTES} B, {width} in flight", run, records))
    return figures, rows


def pipeline_appends(bed: Bed, records: int) -> tuple[Figures, list[list[object]]]:
    """As the client writes. Batches are made before: this is about the way, not about encoding."""
    producer = next(_producer_ids)
    made: Iterator[bytes] = (encoded(records, producer_id=producer, sequence=number * records) for number in count())
    warm = [next(made) for _ in range(32)]
    pipeline = bed.group.pipeline()
    for batch in warm:
        pipeline.send(batch, lambda _: None)
    pipeline.flush()
    prepared = [next(made) for _ in range(int(600 * bed.seconds))]

    def work() -> list[float]:
        times_ms: list[float] = []
        for batch in prepared:
            sent = time.perf_counter()
            pipeline.send(batch, lambda _, sent=sent: times_ms.append((time.perf_counter() - sent) * 1000))  # type: ignore[misc]
        pipeline.flush()
        return times_ms

    run = timed(work, bed.pid)
    row = _shown_throughput(f"{records:,} x {RECORD_BYTES} B, pipeline", run, records)
    return _throughput(f"{bed.suffix}_pipeline", run, records), [row]


def _throughput(name: str, run: Run, records: int) -> Figures:
    return {
        f"msgs_per_s{name}": run.per_s * records,
        f"mb_per_s{name}": run.per_s * records * RECORD_BYTES / 1e6,
        f"batch{name}_p50_ms": percentile(run.times_ms, 50),
        f"batch{name}_p99_ms": percentile(run.times_ms, 99),
        f"leader{name}_cpu_us_per_batch": run.server_us,
        f"caller{name}_cpu_us_per_batch": run.caller_us,
    }


def _shown_throughput(what: str, run: Run, records: int) -> list[object]:
    return [what, *_throughput("", run, records).values()]


def fetches(bed: Bed) -> tuple[Figures, list[list[object]]]:
    """The newest 64 MB of the log, again and again, by calls of 1 MB: from memory and from the disk's cache."""
    end = bed.group.end_offset()
    start = max(0, end - (64 << 20) // (RECORD_BYTES + 12))
    fetched = 0

    def work() -> list[float]:
        nonlocal fetched
        times_ms: list[float] = []
        offset, deadline = start, time.perf_counter() + 2 * bed.seconds
        while time.perf_counter() < deadline:
            started = time.perf_counter()
            answer = ray.get(bed.leader.fetch.remote(offset, FETCH_BYTES))
            times_ms.append((time.perf_counter() - started) * 1000)
            fetched += sum(batch.count for batch in answer.batches)
            last = answer.batches[-1]
            offset = last.base_offset + last.count
            offset = start if offset >= end else offset
        return times_ms

    run = timed(work, bed.pid)
    rate = fetched / run.wall_s
    figures = {
        f"fetch_msgs_per_s{bed.suffix}": rate,
        f"fetch{bed.suffix}_p50_ms": percentile(run.times_ms, 50),
    }
    row: list[object] = [
        "fetch of 1 MB",
        rate,
        rate * RECORD_BYTES / 1e6,
        percentile(run.times_ms, 50),
        percentile(run.times_ms, 99),
        run.server_us,
        run.caller_us,
    ]
    return figures, [row]


def wake_ups(bed: Bed) -> tuple[Figures, list[list[object]]]:
    """From the call of an append to the return of a fetch that waits for it; the fetch waits already."""
    times_ms: list[float] = []
    offset = bed.group.end_offset()
    batch = encoded(1)
    for _ in range(200 if bed.seconds < 2 else 1000):
        waiting = bed.leader.fetch.remote(offset, FETCH_BYTES, 10_000)
        ray.get(bed.leader.status.remote())
        started = time.perf_counter()
        appended = bed.leader.append.remote(batch)
        answer = ray.get(waiting)
        times_ms.append((time.perf_counter() - started) * 1000)
        ray.get(appended)
        offset = answer.high_watermark
    figures = {
        f"append_to_fetch{bed.suffix}_p50_ms": percentile(times_ms, 50),
        f"append_to_fetch{bed.suffix}_p99_ms": percentile(times_ms, 99),
    }
    row: list[object] = ["append to waiting fetch", percentile(times_ms, 50), percentile(times_ms, 99), "", "", ""]
    return figures, [row]


# -- all of it -----------------------------------------------------------------------------------------


def measure(bench: Bench, folder: Path, steps: Steps, system: Mapping[str, Any], suffix: str, title: str) -> None:
    steps.next(f"{title}: starting Ray")
    with embedded_ray(system_settings=system):
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": concurrency_groups(CallSettings())}
        nothing: Any = ray.remote(**options)(Nothing).remote()
        with ReplicaGroup.start(f"bench{suffix.replace('_', '-')}-0", Settings(data_dir=folder)) as group:
            leader = group.leader()
            bed = Bed(
                group, group.handle(leader), group.process(leader).pid, nothing, suffix, 0.6 if bench.quick else 3.0
            )
            in_flight(lambda: bed.leader.append.remote(encoded(1)), 8, 1.0)
            rounds = 1 if bench.quick else 3
            calls = _best(
                bench,
                steps,
                title,
                rounds,
                [("calls", plain_calls), ("one record", single_appends), ("waiting fetch", wake_ups)],
                bed,
            )
            bench.table(
                f"Calls, {title}",
                ("", "p50 ms", "p99 ms", "calls/s, 32 in flight", "server CPU us", "caller CPU us"),
                calls,
            )
            sizes: list[tuple[str, Callable[[Bed], tuple[Figures, list[list[object]]]]]] = [
                ("1,000 records", lambda bed: batch_appends(bed, 1000, "")),
                ("pipeline", lambda bed: pipeline_appends(bed, 1000)),
                ("fetch", fetches),
            ]
            if suffix:
                sizes.insert(1, ("850 records", lambda bed: batch_appends(bed, 850, "_850")))
            rows = _best(bench, steps, title, rounds, sizes, bed)
            columns = ("", "msg/s", "MB/s", "p50 ms", "p99 ms", "leader CPU us", "caller CPU us")
            bench.table(f"Throughput, {title}", columns, rows)
    shutil.rmtree(folder)


def _best(
    bench: Bench,
    steps: Steps,
    title: str,
    rounds: int,
    parts: list[tuple[str, Callable[[Bed], tuple[Figures, list[list[object]]]]]],
    bed: Bed,
) -> list[list[object]]:
    """Each part so many times; the median of each figure."""
    table: list[list[object]] = []
    for name, part in parts:
        found: list[Figures] = []
        shown: list[list[list[object]]] = []
        for number in range(rounds):
            steps.next(f"{title}: {name}, round {number + 1}")
            figures, rows = part(bed)
            found.append(figures)
            shown.append(rows)
        bench.add(**{key: median([each[key] for each in found]) for key in found[0]})
        table += [_median_row(list(rows)) for rows in zip(*shown, strict=True)]
    return table


def _median_row(rows: list[list[object]]) -> list[object]:
    merged: list[object] = []
    for cells in zip(*rows, strict=True):
        numbers = [cell for cell in cells if isinstance(cell, float | int)]
        merged.append(median(numbers) if numbers else cells[0])
    return merged


def draw(bench: Bench) -> None:
    figures = bench.figures
    with figure("replica_calls", width_in=6.0) as axes:
        labels = ["1", "8", "32", "pipeline"]
        for offset, (suffix, label) in enumerate((("", "embedded Ray"), ("_stock", "Ray's own settings"))):
            heights = [figures[f"msgs_per_s{suffix}_{label}"] / 1e6 for label in labels]
            axes.bar([x + offset * 0.4 for x in range(4)], heights, 0.4, label=label)
        axes.set_xticks([x + 0.2 for x in range(4)], labels)
        axes.set(
            xlabel="calls in flight", ylabel="million msg/s", title="1,000 x 100 B through a Ray actor, three replicas"
        )
        axes.legend()


def main() -> None:
    chosen = parser(__doc__).parse_args()
    bench = Bench("replica_calls", chosen)
    stock = {key: value for key, value in RAY_SYSTEM_SETTINGS.items() if key != "max_direct_call_object_size"}
    with bench.data_dir() as folder, bench.progress(2 + (6 + 7) * (1 if bench.quick else 3)) as steps:
        measure(bench, folder / "embedded", steps, RAY_SYSTEM_SETTINGS, "", "embedded Ray")
        measure(bench, folder / "stock", steps, stock, "_stock", "Ray's own limit of 100 KB")
    if bench.plot:
        draw(bench)
    bench.finish()


if __name__ == "__main__":
    main()
