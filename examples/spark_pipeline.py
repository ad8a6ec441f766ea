"""A pipeline from Ray tasks through Spark and back, that loses and repeats nothing.

    Ray tasks --> topic "clicks" --> Spark structured streaming, sums by page and minute --> topic "sums" --> Ray Data

    python examples/spark_pipeline.py                     # Spark on this Ray by RayDP, or in this process if that fails
    python examples/spark_pipeline.py --kill              # kill leaders and restart the query in the middle

Every sum is checked against what the tasks have sent.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

import rayqueue
import rayqueue.data
import rayqueue.spark

PAGES = ("home", "search", "cart", "help")
BEGIN_MS = 1_790_000_000_000 // 60_000 * 60_000
MINUTE_MS = 60_000
SCHEMA = "page string, amount long"


@ray.remote(num_cpus=0)
def click(rq: rayqueue.RayQueue, task: int, count: int) -> dict[str, list[int]]:
    """Sends clicks. Returns what it has sent, by page and minute: how many, and their sum."""
    sent: dict[str, list[int]] = {}
    with rq.producer() as producer:
        for number in range(count):
            page = PAGES[(number + task) % len(PAGES)]
            timestamp_ms = BEGIN_MS + (number * 7 + task * 13) % 600 * 1000
            value = json.dumps({"page": page, "amount": number}).encode()
            producer.send("clicks", value, key=page.encode(), timestamp_ms=timestamp_ms)
            total = sent.setdefault(f"{page} {timestamp_ms // MINUTE_MS * MINUTE_MS}", [0, 0])
            total[0] += 1
            total[1] += number
    return sent


def start_query(rq: rayqueue.RayQueue, spark: Any, checkpoint: Path) -> Any:
    """Sums by page and minute, each written once, when its minute is over."""
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

    clicks = rayqueue.spark.stream_dataframe(
        rq, "clicks", spark=spark, startingOffsets="earliest", group="sums", value_schema=SCHEMA
    )
    sums = (
        clicks.withWatermark("timestamp", "1 hour")
        .groupBy(F.window("timestamp", "1 minute"), "page")
        .agg(F.count("*").alias("clicks"), F.sum("amount").alias("amount"))
        .select(F.col("page"), F.unix_millis(F.col("window.start")).alias("minute"), "clicks", "amount")
    )
    writer = rayqueue.spark.encode_values(sums, "json", key="page").writeStream.format("rayqueue")
    options = {"topic": "sums", "checkpointLocation": str(checkpoint)}
    return writer.options(**options).outputMode("append").trigger(processingTime="200 milliseconds").start()


def send_all(rq: rayqueue.RayQueue, tasks: range, count: int) -> dict[str, list[int]]:
    expected: dict[str, list[int]] = {}
    for sent in ray.get([click.remote(rq, task, count) for task in tasks]):
        for name, (clicks, amount) in sent.items():
            total = expected.setdefault(name, [0, 0])
            total[0] += clicks
            total[1] += amount
    return expected


def close_minutes(rq: rayqueue.RayQueue) -> None:
    """A click long after all others, so that every minute before it is over."""
    with rq.producer() as producer:
        for partition in range(2):
            value = json.dumps({"page": "end", "amount": 0}).encode()
            producer.send("clicks", value, partition=partition, timestamp_ms=BEGIN_MS + 3 * 3600_000)


def kill_leader(rq: rayqueue.RayQueue, topic: str) -> None:
    """kill -9 of the process that leads the first partition."""
    info = next(each for each in rq.topics() if each.name == topic)
    leader = next(each.replica_id for each in rq.topic(topic).partitions[0].replicas if each.role == "leader")
    handle = ray.get_actor(f"rayqueue/{info.partitions[0].group_id}/{leader}", rq.namespace)
    pid = ray.get(handle.process.remote()).pid
    print(f"kill -9 {pid}, which leads {topic}-0")
    os.kill(pid, signal.SIGKILL)


def ended(rq: rayqueue.RayQueue, topic: str) -> int:
    return sum(each.end_offset for each in rq.topic(topic).partitions)


def wait_until(condition: Any, what: str, query: Any, timeout_s: float = 180.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)


def run(rq: rayqueue.RayQueue, spark: Any, checkpoint: Path, *, tasks: int, count: int, kill: bool) -> dict[str, Any]:
    for topic in ("clicks", "sums"):
        rq.create_topic(topic, partitions=2, replication=3 if kill else 1, if_missing=True)
    query = start_query(rq, spark, checkpoint)
    expected = send_all(rq, range(tasks), count)
    wait_until(lambda: _processed(rq) > 0, "the first clicks are summed", query)
    if kill:
        kill_leader(rq, "clicks")
        query.stop()
        print("stopped the query")
    for name, (clicks, amount) in send_all(rq, range(tasks, 2 * tasks), count).items():
        expected[name][0] += clicks
        expected[name][1] += amount
    if kill:
        kill_leader(rq, "sums")
        query = start_query(rq, spark, checkpoint)
        print("started it again")
    close_minutes(rq)
    wait_until(lambda: ended(rq, "sums") >= len(expected), "every minute is summed", query)
    query.processAllAvailable()
    query.stop()
    found = Counter()  # type: ignore[var-annotated]
    for row in rayqueue.data.read_topic(rq, "sums", columns=["value"]).iter_rows():
        told = json.loads(row["value"])
        found[f"{told['page']} {told['minute']}", told["clicks"], told["amount"]] += 1
    wanted = Counter((name, clicks, amount) for name, (clicks, amount) in expected.items())
    return {
        "clicks": 2 * tasks * count,
        "sums": len(wanted),
        "missing": [*map(str, wanted - found)],
        "wrong_or_repeated": [*map(str, found - wanted)],
    }


def _processed(rq: rayqueue.RayQueue) -> int:
    try:
        return sum(sum(each.committed.values()) for each in rq.group("sums").partitions)
    except rayqueue.errors.UnknownGroupError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("auto", "raydp", "local"), default="auto")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--count", type=int, default=2000, help="clicks of each task, before and after the kills")
    parser.add_argument("--kill", action="store_true", help="kill -9 leaders and restart the query in the middle")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rqp-"))
    rq = rayqueue.connect("local", data_dir=home / "data")
    try:
        spark = rayqueue.spark.session(rq, engine=arguments.engine, start_timeout_s=240)
        engine = rayqueue.spark.engine_of(spark)
        print(f"Spark runs as {engine.engine} {engine.reason}", file=sys.stderr)
        try:
            report = run(
                rq, spark, home / "checkpoint", tasks=arguments.tasks, count=arguments.count, kill=arguments.kill
            )
        finally:
            rayqueue.spark.stop(spark)
    finally:
        rq.shutdown()
        shutil.rmtree(home, ignore_errors=True)
    report["engine"] = engine.engine
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"{report['clicks']} clicks became {report['sums']} sums; ", end="")
        print(f"{len(report['missing'])} missing, {len(report['wrong_or_repeated'])} wrong or repeated")
    return 1 if report["missing"] or report["wrong_or_repeated"] else 0


if __name__ == "__main__":
    sys.exit(main())
