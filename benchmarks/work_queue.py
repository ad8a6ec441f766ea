"""Jobs per second through a work queue (put, get, ack), beside ``ray.util.queue`` and Redis Streams in the same run.

    python benchmarks/work_queue.py [--quick] [--json]

One process puts jobs of 100 B, 1, 4 and 16 others do nothing with them but
acknowledge them; the clock runs from the first put until a look at the queue, one
in 10 ms, finds no job: the last acknowledgement is committed. The queue has four
partitions on three replicas, fsync before every answer, default settings.

``jobs_per_s_N``         one by one: ``put(wait=False)``, ``for job in queue`` with N workers
``batch_jobs_per_s_N``   in batches of 100: ``put_many(wait=False)``, ``get(100)``, ``ack(wait=False)``
``waited_jobs_per_s_1``  the same with ``ack``, which waits for each batch, and one worker
``single_jobs_per_s_1``  one by one, each step waits until it is committed: ``put``, ``get``, ``ack``, with one worker
``drop_in_items_per_s``  ``rayqueue.Queue``: ``put`` and ``get``, one by one, each of which waits, one process for each;
                         ``drop_in_batch_items_per_s`` by ``put_nowait_batch`` and ``get_nowait_batch`` of 100
``ray_queue_jobs_per_s`` ``ray.util.queue``: the same calls one by one; in memory, one copy.
                         ``ray_queue_batch_items_per_s`` the same calls in batches
``redis_jobs_per_s``     Redis Streams: XADD, XREADGROUP and XACK in batches of 100, one worker, ``appendfsync always``,
                         one copy; ``redis_pipelined_jobs_per_s`` with five batches of XADD under way, and each XACK
                         sent with the next XREADGROUP; ``redis_single_jobs_per_s`` one by one
``put_to_get_p50_ms``    from before ``put`` in one process until ``get`` of a waiting worker in another has returned
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import ray.util.queue

import rayqueue
from benchmarks._bench import Bench, parser, percentile
from benchmarks._redis import Redis, redis, redis_server
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.client.queue.queue import JobQueue
from rayqueue.protocol.jobs import QueueSizes

QUEUE = "jobs"
PARTITIONS = 4
VALUE = b"j" * 100
BATCH = 100
WORKERS = (1, 4, 16)
PATIENCE_S = 120.0
EVERY_S = 0.004
LOOK_S = 0.01
STREAM, GROUP = "jobs", "workers"


class Putter:
    """The process that puts."""

    def __init__(self, rq: RayQueue) -> None:
        self._queue = rq.queue(QUEUE, create=False)
        self._queue.size()

    def one_by_one(self, count: int) -> float:
        """When it began."""
        began_s = time.monotonic()
        for _ in range(count):
            self._queue.put(VALUE, wait=False)
        self._queue.flush()
        return began_s

    def batches(self, count: int) -> float:
        began_s = time.monotonic()
        for _ in range(count // BATCH):
            self._queue.put_many([VALUE] * BATCH, wait=False)
        self._queue.flush()
        return began_s

    waited = batches

    def single(self, count: int) -> float:
        began_s = time.monotonic()
        for _ in range(count):
            self._queue.put(VALUE)
        return began_s

    def slowly(self, count: int) -> None:
        """With the time in each. One clock for all processes of a machine."""
        for _ in range(count):
            time.sleep(EVERY_S)
            self._queue.put(b"%020d" % time.monotonic_ns())


class Doer:
    """The process of a worker."""

    def __init__(self, rq: RayQueue) -> None:
        self._queue: JobQueue[Any, Any] = rq.queue(QUEUE, create=False)
        self._queue.get(timeout_ms=0)

    def one_by_one(self, idle_ms: int) -> int:
        """Do the jobs one by one. Returns their number."""
        return self._queue.work(lambda _: None, idle_ms=idle_ms)

    def batches(self, idle_ms: int, *, wait: bool = False) -> int:
        done = 0
        while jobs := self._queue.get(BATCH, timeout_ms=idle_ms):
            self._queue.ack(jobs, wait=wait)
            done += len(jobs)
        self._queue.flush()
        return done

    def waited(self, idle_ms: int) -> int:
        return self.batches(idle_ms, wait=True)

    def single(self, idle_ms: int) -> int:
        done = 0
        while jobs := self._queue.get(timeout_ms=idle_ms):
            jobs[0].ack()
            done += 1
        return done

    def latencies(self, count: int) -> list[float]:
        took_ms: list[float] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(took_ms) < count and time.monotonic() < deadline_s:
            for job in self._queue.get(timeout_ms=1000):
                took_ms.append((time.monotonic_ns() - int(job.value or 0)) / 1e6)
                job.ack()
        return took_ms


def throughput(queue: JobQueue[Any, Any], putter: Any, doers: Sequence[Any], method: str, count: int) -> float:
    """Jobs per second, from the first put until the queue says that none is left."""
    idle_ms = 3000
    doing = [getattr(doer, method).remote(idle_ms) for doer in doers]
    time.sleep(0.2)
    began_s = ray.get(getattr(putter, method).remote(count), timeout=PATIENCE_S)
    while queue.size() != QueueSizes(0, 0, 0, 0):
        if time.monotonic() > began_s + PATIENCE_S:
            raise SystemExit(f"after {PATIENCE_S:.0f} s not all is done: {queue.size()}")
        time.sleep(LOOK_S)
    took_s = time.monotonic() - began_s
    total = sum(ray.get(doing, timeout=PATIENCE_S))
    if total != count:
        raise SystemExit(f"{count} jobs were put, and {total} were done")
    return float(count / took_s)


class ItemPutter:
    """Of ``ray.util.queue``, or of what takes its place."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, count: int) -> float:
        began_s = time.monotonic()
        for _ in range(count):
            self._queue.put(VALUE)
        return began_s

    def put_batches(self, count: int) -> float:
        began_s = time.monotonic()
        for _ in range(count // BATCH):
            self._queue.put_nowait_batch([VALUE] * BATCH)
        return began_s


class ItemGetter:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def get(self, count: int) -> float:
        for _ in range(count):
            self._queue.get()
        return time.monotonic()

    def get_batches(self, count: int) -> float:
        for _ in range(count // BATCH):
            while True:
                try:
                    self._queue.get_nowait_batch(BATCH)
                    break
                except ray.util.queue.Empty:
                    time.sleep(0.001)
        return time.monotonic()


def items(queue: Any, count: int, batched: int) -> tuple[float, float]:
    """Items per second, one by one and in batches."""
    putter, getter = actor(ItemPutter, queue), actor(ItemGetter, queue)
    ray.get([putter.put.remote(10), getter.get.remote(10)])
    getting = getter.get.remote(count)
    began_s, ended_s = ray.get([putter.put.remote(count), getting], timeout=PATIENCE_S)
    single = count / (ended_s - began_s)
    getting = getter.get_batches.remote(batched)
    began_s, ended_s = ray.get([putter.put_batches.remote(batched), getting], timeout=PATIENCE_S)
    queue.shutdown(force=True)
    for each in (putter, getter):
        ray.kill(each)
    return float(single), float(batched / (ended_s - began_s))


class RedisPutter:
    def __init__(self, path: str) -> None:
        self._redis = Redis(path)

    def put(self, count: int, batch: int, under_way: int) -> float:
        """So many batches are sent before the answers to the first are read."""
        began_s = time.monotonic()
        for _ in range(count // (batch * under_way)):
            self._redis.all([("XADD", STREAM, "*", "v", VALUE)] * batch * under_way)
        return began_s


class RedisDoer:
    def __init__(self, path: str) -> None:
        self._redis = Redis(path)

    def do(self, count: int, batch: int, under_way: int) -> float:
        """With several batches under way, the acknowledgement of one travels with the request for the next."""
        read = ("XREADGROUP", "GROUP", GROUP, "w", "COUNT", batch, "BLOCK", 5000, "STREAMS", STREAM, ">")
        done = 0
        ids: list[bytes] = []
        while done < count:
            if ids and under_way > 1:
                _, found = self._redis.all([("XACK", STREAM, GROUP, *ids), read])
            else:
                found = self._redis(*read)
            ids = [entry[0] for entry in found[0][1]]
            if under_way == 1:
                self._redis("XACK", STREAM, GROUP, *ids)
            done += len(ids)
        if under_way > 1:
            self._redis("XACK", STREAM, GROUP, *ids)
        return time.monotonic()


def redis_streams(directory: Path, count: int, batch: int, under_way: int = 1) -> float:
    with redis(directory / f"redis-{batch}-{under_way}") as path:
        Redis(path)("XGROUP", "CREATE", STREAM, GROUP, "$", "MKSTREAM")
        putter, doer = actor(RedisPutter, path), actor(RedisDoer, path)
        doing = doer.do.remote(count, batch, under_way)
        time.sleep(0.2)
        began_s, ended_s = ray.get([putter.put.remote(count, batch, under_way), doing], timeout=PATIENCE_S)
        return float(count / (ended_s - began_s))


def actor(kind: Any, *arguments: Any) -> Any:
    made: Any = ray.remote(kind)
    return made.options(num_cpus=0).remote(*arguments)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    bench = Bench("work_queue", options)
    jobs, batched, compared, samples = (3000, 50_000, 500, 200) if bench.quick else (50_000, 200_000, 5000, 2000)
    rows: list[list[Any]] = []
    with bench.data_dir() as data_dir, bench.progress(2 * len(WORKERS) + 7) as steps, embedded_ray(cpus=4):
        steps.next("start")
        rq = rayqueue.connect(data_dir=data_dir / "rayqueue")
        try:
            queue = rq.queue(
                QUEUE, partitions=PARTITIONS
            )  # one for all: its processes are what this machine has to bear
            for method, name, count, numbers in (
                ("one_by_one", "jobs_per_s", jobs, WORKERS),
                ("batches", "batch_jobs_per_s", batched, WORKERS),
                ("waited", "waited_jobs_per_s", batched // 2, WORKERS[:1]),
                ("single", "single_jobs_per_s", compared, WORKERS[:1]),
            ):
                rates = []
                for workers in numbers:
                    steps.next(f"{method}, {workers} workers")
                    putter = actor(Putter, rq)
                    doers = [actor(Doer, rq) for _ in range(workers)]
                    throughput(queue, putter, doers, method, 10 * BATCH)
                    rates.append(throughput(queue, putter, doers, method, count))
                    bench.add(**{f"{name}_{workers}": rates[-1]})
                    for each in (putter, *doers):
                        ray.kill(each)
                rows.append([f"rayqueue, {method}", *rates, *[""] * (len(WORKERS) - len(rates))])
            steps.next("latency")
            putter, doer = actor(Putter, rq), actor(Doer, rq)
            measuring = doer.latencies.remote(samples)
            ray.get(putter.slowly.remote(samples), timeout=PATIENCE_S)
            took_ms = ray.get(measuring, timeout=PATIENCE_S)
            for each in (putter, doer):
                ray.kill(each)
            steps.next("rayqueue.Queue")
            rates = list(items(rayqueue.Queue(rq=rq), compared, batched // 2))
            bench.add(drop_in_items_per_s=rates[0], drop_in_batch_items_per_s=rates[1])
            rows.append(["rayqueue.Queue, one by one", rates[0], "", ""])
            rows.append([f"rayqueue.Queue, batches of {BATCH}", rates[1], "", ""])
        finally:
            rq.shutdown()
        steps.next("ray.util.queue")
        rates = list(items(ray.util.queue.Queue(actor_options={"num_cpus": 0}), compared, batched // 2))
        bench.add(ray_queue_jobs_per_s=rates[0], ray_queue_batch_items_per_s=rates[1])
        rows.append(["ray.util.queue, one by one", rates[0], "", ""])
        rows.append([f"ray.util.queue, batches of {BATCH}", rates[1], "", ""])
        steps.next("Redis Streams")
        if redis_server() is None:
            bench.say("Redis is not compared: there is no redis-server here (Debian: apt install redis-server)")
            bench.note(redis="not installed")
        else:
            bench.add(
                redis_jobs_per_s=(many := redis_streams(data_dir, batched // 2, BATCH)),
                redis_pipelined_jobs_per_s=(piped := redis_streams(data_dir, batched // 2, BATCH, 5)),
                redis_single_jobs_per_s=(single := redis_streams(data_dir, compared, 1)),
            )
            rows += [["Redis Streams, batches", many, "", ""], ["Redis Streams, batches in a pipeline", piped, "", ""]]
            rows += [["Redis Streams, one by one", single, "", ""]]
    bench.add(**{f"put_to_get_p{each}_ms": percentile(took_ms, each) for each in (50, 99)})
    bench.table("Jobs per second", ("", *(f"{each} workers" for each in WORKERS)), rows)
    bench.table("Put to a waiting worker (ms)", ("p50", "p99"), [[percentile(took_ms, 50), percentile(took_ms, 99)]])
    bench.finish()


if __name__ == "__main__":
    main()
