"""Losses and restarts: how long they take, and what producers notice.

    python benchmarks/recovery.py [--quick] [--json] [--plot] [--megabytes N] [--partitions 1,30,100] [--only PART]

Four things are measured, each on Ray nodes of this machine, fsync on:

- *Rebuild.* One replica of three loses its directory, by kill -9 and deletion,
  while nothing is written. From then until its successor has every record:
  ``rebuild_mb_per_s``, over what the partition holds (1 GB; --quick: 48 MB).
- *Restart of everything.* All replicas are killed, and their Ray is ended. From
  ``connect()`` on a new Ray until every partition has acknowledged a record:
  ``restart_s_N`` for N partitions of one replica (three of each of a hundred would
  need 30 GB of memory). Ray's own start comes before it and is told beside, ``ray_start_s_N``.
- *Rolling restart.* Three brokers, one after the other (``restart_broker``),
  under a numbered record per partition every 10 ms. The gap is the longest time
  without an acknowledgement, per partition and broker: ``rolling_gap_p50_s``,
  ``rolling_gap_max_s``. At the end everything is read back: ``lost``.
- *A move.* Batches are written as fast as they are acknowledged, before and while
  a replica is moved to a fourth broker: ``throughput_during_move_ratio``. The first
  seconds of writing do not count: a disk that was idle takes more than it can take for long. All
  brokers share the disk and the processors of this machine, and the fourth copy with them.

``--only restart``, ``rolling``, ``rebuild`` or ``move`` measures one of them. Values are random bytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

import rayqueue
from benchmarks._bench import Bench, Figures, Steps, figure, median, parser
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import PREFIX, STARTER
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.shared import SharedConnections
from rayqueue.config import MIB
from rayqueue.testing import wait_for
from tests.chaos.traffic import Traffic, check
from tests.integration.ray_clusters import ray_cluster

TOPIC = "recovery"
PATIENCE_S = 600.0
VALUE_BYTES = 1000
CHUNK = 500
"""Records of one ``send_many``."""
LOOK_EVERY_S = 0.2
"""While a move runs: whoever asks all the time takes the processor from those who write."""
PARTS = ("restart", "rolling", "rebuild", "move")


def processes() -> dict[str, int]:
    """Every replica's, by actor."""
    names = [name for name in found_actors("rayqueue") if name.startswith(PREFIX) and name != STARTER]
    asked = {name: ray.get_actor(name, "rayqueue").process.remote() for name in names}
    return {name: ray.get(ref, timeout=60).pid for name, ref in asked.items()}


def chunks(value_bytes: int) -> Iterator[list[bytes]]:
    """Values for one ``send_many`` after the other, no two alike nearby."""
    pool = [os.urandom(value_bytes) for _ in range(CHUNK * 8)]
    for start in cycle(range(0, len(pool) - CHUNK, CHUNK // 2)):
        yield pool[start : start + CHUNK]


# -- restart of everything ------------------------------------------------------------------------


def restart(folder: Path, partitions: int) -> tuple[float, float]:
    """Seconds until every partition serves again, and of Ray's own start before."""
    with embedded_ray():
        rq = rayqueue.connect(data_dir=folder)
        rq.create_topic(TOPIC, partitions=partitions, replication=1)
        acknowledge_all(rq, partitions)
        for pid in processes().values():
            os.kill(pid, signal.SIGKILL)
        SharedConnections.end_all()
    started_s = time.monotonic()
    with embedded_ray():
        up_s = time.monotonic()
        rq = rayqueue.connect(data_dir=folder)
        acknowledge_all(rq, partitions)
        done_s = time.monotonic()
        rq.shutdown()
    return done_s - up_s, up_s - started_s


def acknowledge_all(rq: rayqueue.RayQueue, partitions: int) -> None:
    with rq.producer() as producer:
        sent = [producer.send(TOPIC, b"x", partition=number) for number in range(partitions)]
        for each in sent:
            each.result(timeout_ms=int(PATIENCE_S * 1000))


def measure_restarts(bench: Bench, folder: Path, steps: Steps, counts: list[int]) -> None:
    for count in counts:
        steps.next(f"restart of everything, {count} partitions")
        serves_s, ray_s = restart(folder / f"restart-{count}", count)
        bench.add(**{f"restart_s_{count}": serves_s, f"ray_start_s_{count}": ray_s})
        shutil.rmtree(folder / f"restart-{count}")


# -- rebuild --------------------------------------------------------------------------------------


def fill(rq: rayqueue.RayQueue, topic: str, megabytes: int) -> int:
    """Records written."""
    sends = -(-megabytes * MIB // (VALUE_BYTES * CHUNK))
    with rq.producer() as producer:
        for values in islice(chunks(VALUE_BYTES), sends):
            producer.send_many(topic, values)
    return sends * CHUNK


def rebuild(rq: rayqueue.RayQueue, folder: Path, megabytes: int) -> float:
    """Seconds from the loss of one copy until there are three again."""
    rq.create_topic("rebuild", replication=3)
    end = fill(rq, "rebuild", megabytes)
    wait_for(lambda: copies(rq, "rebuild", end) == 3, "three copies", PATIENCE_S)
    victim = next(each for each in rq.topic("rebuild").partitions[0].replicas if each.role == "follower")
    name = next(name for name in processes() if "/rebuild-0." in name and name.endswith(f"/{victim.replica_id}"))
    (path,) = folder.rglob(f"{name.removeprefix(PREFIX)}")
    began_s = time.monotonic()
    os.kill(processes()[name], signal.SIGKILL)
    shutil.rmtree(path)
    wait_for(
        lambda: (
            victim.replica_id not in {each.replica_id for each in rq.topic("rebuild").partitions[0].replicas}
            and copies(rq, "rebuild", end) == 3
        ),
        "three copies again",
        PATIENCE_S,
    )
    return time.monotonic() - began_s


def copies(rq: rayqueue.RayQueue, topic: str, end: int) -> int:
    replicas = rq.topic(topic).partitions[0].replicas
    return sum(each.problem is None and (each.high_watermark or 0) >= end for each in replicas)


# -- rolling restart ------------------------------------------------------------------------------


def rolling(rq: rayqueue.RayQueue, brokers: tuple[str, ...], rounds: int) -> tuple[list[float], int]:
    """Gaps, one per partition and restarted broker; and acknowledged records that are lost."""
    partitions = len(brokers)
    rq.create_topic(TOPIC, partitions=partitions, replication=3)
    sending = Traffic(rq, TOPIC, partitions)
    gaps: list[float] = []
    try:
        wait_for(lambda: sending.least > 200, "some records", PATIENCE_S)
        for _ in range(rounds):
            for broker in brokers:
                time.sleep(0.5)  # steady traffic before each
                began_s = time.monotonic()
                rq.restart_broker(broker)
                gaps += sending.pauses(began_s)
    finally:
        sending.stop()
    try:
        check(rq, TOPIC, sending, PATIENCE_S)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return gaps, 1
    return gaps, 0


# -- a move ---------------------------------------------------------------------------------------


@contextmanager
def writing(rq: rayqueue.RayQueue, topic: str) -> Iterator[list[tuple[float, int]]]:
    """Batches as fast as they are acknowledged; when each was, and its records."""
    acked: list[tuple[float, int]] = []
    stop = threading.Event()

    def write() -> None:
        with rq.producer() as producer:
            for values in chunks(100):
                if stop.is_set():
                    return
                producer.send_many(topic, values)
                acked.append((time.monotonic(), CHUNK))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield acked
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def rate(acked: list[tuple[float, int]], since_s: float, until_s: float) -> float:
    return sum(count for when_s, count in list(acked) if since_s <= when_s < until_s) / (until_s - since_s)


def move(rq: rayqueue.RayQueue, megabytes: int, window_s: float) -> Figures:
    """Records per second before, while and after a replica is moved; and how long that took."""
    rq.create_topic("moved", replication=3)
    fill(rq, "moved", megabytes)
    held = {each.broker for each in rq.topic("moved").partitions[0].replicas}
    leader = rq.topic("moved").partitions[0].leader
    (target,) = {each.broker for each in rq.cluster().brokers} - held
    source = next(broker for broker in sorted(held) if broker != leader)
    with writing(rq, "moved") as acked:
        time.sleep(window_s)
        began_s = time.monotonic()
        time.sleep(window_s)
        moving_s = time.monotonic()
        rq.move_replica("moved", 0, source=source, target=target)
        while rq.cluster().moves:
            time.sleep(LOOK_EVERY_S)
        moved_s = time.monotonic()
        time.sleep(window_s)
        before, during = rate(acked, began_s, moving_s), rate(acked, moving_s, moved_s)
        after = rate(acked, moved_s, time.monotonic())
    return {
        "throughput_before_move_per_s": before,
        "throughput_during_move_per_s": during,
        "throughput_after_move_per_s": after,
        "throughput_during_move_ratio": during / before,
        "move_s": moved_s - moving_s,
    }


def measure_cluster(bench: Bench, folder: Path, steps: Steps, parts: Collection[str], megabytes: int) -> list[float]:
    """All that needs several brokers."""
    brokers = ("b1", "b2", "b3")
    gaps: list[float] = []
    steps.next("starting three brokers")
    with ray_cluster(*brokers) as cluster:
        rq = rayqueue.connect(data_dir=folder / "cluster")
        if "rolling" in parts:
            steps.next("rolling restart")
            gaps, lost = rolling(rq, brokers, rounds=1 if bench.quick else 3)
            bench.add(rolling_gap_p50_s=median(gaps), rolling_gap_max_s=max(gaps), rolling_lost=lost)
        if "rebuild" in parts:
            steps.next(f"rebuild of {megabytes} MB")
            rebuild_s = rebuild(rq, folder / "cluster", megabytes)
            bench.add(rebuild_s=rebuild_s, rebuild_mb=megabytes, rebuild_mb_per_s=megabytes / rebuild_s)
        if "move" in parts:
            steps.next("a move under load")
            cluster.add("b4")
            wait_for(lambda: sum(each.alive for each in rq.cluster().brokers) == 4, "the fourth broker", PATIENCE_S)
            bench.add(**move(rq, megabytes // 4, 5.0 if bench.quick else 10.0))
        rq.shutdown()
    return gaps


def draw(gaps: list[float], restarts: dict[int, float]) -> None:
    with figure("recovery", columns=2) as (left, right):
        left.bar(range(1, len(gaps) + 1), [gap * 1000 for gap in gaps])
        left.set(xlabel="partition and restarted broker", ylabel="ms without acknowledgements", title="Rolling restart")
        right.bar([str(count) for count in restarts], list(restarts.values()))
        right.set(xlabel="partitions", ylabel="s until all serve", title="Everything killed and started again")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, help="what the lost replica holds; default 1024, with --quick 48")
    options.add_argument("--partitions", help="of the restarts, such as 1,30,100; with --quick 1,30")
    options.add_argument("--only", choices=PARTS, help="measure this and nothing else")
    chosen = options.parse_args()
    parts = (chosen.only,) if chosen.only else PARTS
    megabytes = chosen.megabytes or (48 if chosen.quick else 1024)
    counts = [int(each) for each in (chosen.partitions or ("1,30" if chosen.quick else "1,30,100")).split(",")]
    bench = Bench("recovery", chosen)
    gaps: list[float] = []
    with bench.data_dir() as folder, bench.progress(len(counts) + len(PARTS)) as steps:
        if "restart" in parts:
            measure_restarts(bench, folder, steps, counts)
        if parts != ("restart",):
            gaps = measure_cluster(bench, folder, steps, parts, megabytes)
    figures = bench.figures
    titles = {f"restart_s_{count}": f"restart of everything, {count} partitions, s" for count in counts} | {
        "rolling_gap_p50_s": "rolling restart, gap p50 s",
        "rolling_gap_max_s": "rolling restart, gap max s",
        "rebuild_mb_per_s": "rebuild MB/s",
        "throughput_during_move_ratio": "throughput during a move / before",
    }
    rows: list[list[object]] = [[title, figures[name]] for name, title in titles.items() if name in figures]
    bench.table("Losses and restarts", ("", "value"), rows)
    if bench.plot and parts == PARTS:
        draw(gaps, {count: figures[f"restart_s_{count}"] for count in counts})
    bench.finish()


if __name__ == "__main__":
    main()
