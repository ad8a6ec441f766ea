"""The cost of a queue that nobody uses: memory, threads and CPU of each of its actors.

    python benchmarks/idle.py [--quick] [--json] [--partitions N]

A topic on three replicas per partition, on an embedded Ray, after its start has
settled. ``own`` memory is what a process would give back by ending (USS); the
rest is shared with other workers. An actor that does nothing is measured beside
them: what Ray itself costs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

import rayqueue
from benchmarks._bench import Bench, Steps, median, parser
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import COORDINATOR_PREFIX, actor_name
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.ids import GroupId, ReplicaId

TOPIC = "idle"
SETTLE_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    own_mb: float
    resident_mb: float
    threads: int
    cpu_s: float


def usage(pid: int) -> Usage:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in rollup[1:])}
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_kb = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Usage(own_kb / 1024, sizes["Rss"] / 1024, int(stat[17]), (int(stat[11]) + int(stat[12])) / _TICKS_PER_S)


@ray.remote(num_cpus=0)
class Nothing:
    def pid(self) -> int:
        return os.getpid()


def processes(rq: RayQueue) -> dict[str, list[int]]:
    replicas = [
        actor_name(GroupId(partition.group_id), ReplicaId(replica.replica_id))
        for topic in rq.topics()
        for partition in topic.partitions
        for replica in partition.replicas
    ]
    coordinators = [name for name in found_actors(rq.namespace) if name.startswith(COORDINATOR_PREFIX)]
    found: dict[str, list[int]] = {}
    for kind, names in (("replica", replicas), ("coordinator", coordinators)):
        handles = [ray.get_actor(name, rq.namespace) for name in names]
        found[kind] = [process.pid for process in ray.get([handle.process.remote() for handle in handles])]
    return found


def measure(bench: Bench, folder: Path, steps: Steps, partitions: int, seconds: float) -> None:
    steps.next("starting")
    with embedded_ray():
        rq = rayqueue.connect(data_dir=folder)
        try:
            rq.create_topic(TOPIC, partitions=partitions, replication=3)
            nothing = Nothing.remote()  # type: ignore[attr-defined]  # what Ray makes of a class
            found = processes(rq) | {"nothing": [ray.get(nothing.pid.remote())]}
            steps.next("settling")
            time.sleep(SETTLE_S)
            steps.next("doing nothing")
            before = {pid: usage(pid) for pids in found.values() for pid in pids}
            started_s = time.monotonic()
            time.sleep(seconds)
            after = {pid: usage(pid) for pid in before}
            elapsed_s = time.monotonic() - started_s
        finally:
            rq.shutdown()
    rows: list[list[object]] = []
    for kind, pids in found.items():
        own_mb = median([after[pid].own_mb for pid in pids])
        resident_mb = median([after[pid].resident_mb for pid in pids])
        threads = median([float(after[pid].threads) for pid in pids])
        cpu = median([(after[pid].cpu_s - before[pid].cpu_s) / elapsed_s * 100 for pid in pids])
        bench.add(
            **{
                f"{kind}_own_mb": own_mb,
                f"{kind}_resident_mb": resident_mb,
                f"{kind}_threads": threads,
                f"{kind}_cpu_percent": cpu,
            }
        )
        rows.append([kind, len(pids), own_mb, resident_mb, threads, cpu])
    columns = ("actor", "how many", "own MB", "resident MB", "threads", "CPU, % of a core")
    bench.table("An idle queue (medians)", columns, rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--partitions", type=int, default=2)
    chosen = options.parse_args()
    bench = Bench("idle", chosen)
    with bench.data_dir() as folder, bench.progress(3) as steps:
        measure(bench, folder, steps, chosen.partitions, 10.0 if bench.quick else 30.0)
    bench.finish()


if __name__ == "__main__":
    main()
