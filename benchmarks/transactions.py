"""Records per second in transactions, beside the plain idempotent producer in the same run.

    python benchmarks/transactions.py [--quick] [--json]

One process sends records of 100 B as columns (``send_many``), into one topic of
one partition and one of four, three replicas each, fsync before every answer,
default settings. Plain and transactional runs take turns; each figure is the
median of its turns. The clock runs until everything is acknowledged, or visible.

``plain_msgs_per_s``       the idempotent producer, four partitions, in calls of 1,000 records
``tx_msgs_per_s_N``        N records per transaction, four partitions, in a loop of
                           ``with producer.transaction(wait=False)``, and a ``flush`` at the end, as with the plain one
``tx_waited_msgs_per_s_N`` the same in a loop of ``with producer.transaction()``, each of which waits to be visible
``..._p1``                 the same with one partition
``tx_ratio_1000``          ``tx_msgs_per_s_1000 / plain_msgs_per_s``; ``tx_waited_ratio_1000`` likewise
``small_tx_p50_ms``        a transaction of one record until every reader can see it
``process_msgs_per_s``     ``rq.process``: read, call a function, write, with positions; one worker, batches of 1,000
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rayqueue
from benchmarks._bench import Bench, parser, percentile
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue

VALUE = b"t" * 100
SIZES = (1, 100, 1_000, 10_000)
PATIENCE_MS = 120_000


def plain(producer: Any, topic: str, records: int) -> float:
    """Records per second."""
    values = [VALUE] * 1_000
    began_s = time.monotonic()
    for _ in range(records // 1_000):
        producer.send_many(topic, values)
    producer.flush(timeout_ms=PATIENCE_MS)
    return records / (time.monotonic() - began_s)


def transactions(producer: Any, topic: str, size: int, count: int, *, wait: bool) -> float:
    """The same in transactions."""
    values = [VALUE] * size
    began_s = time.monotonic()
    for _ in range(count):
        with producer.transaction(wait=wait) as tx:
            tx.send_many(topic, values)
    producer.flush(timeout_ms=PATIENCE_MS)
    return size * count / (time.monotonic() - began_s)


def small(producer: Any, topic: str, samples: int) -> list[float]:
    took_ms = []
    for _ in range(samples):
        began_s = time.monotonic()
        with producer.transaction() as tx:
            tx.send(topic, VALUE)
        took_ms.append((time.monotonic() - began_s) * 1000)
    return took_ms


def process(rq: RayQueue, records: int) -> float:
    with rq.producer() as producer:
        plain(producer, "four", records)
    began_s = time.monotonic()
    run = rq.process("four", "one", lambda record: record.value, group="bench", batch=1_000)
    try:
        while run.figures().records < records and (time.monotonic() - began_s) * 1000 < PATIENCE_MS:
            time.sleep(0.01)
        return run.figures().records / (time.monotonic() - began_s)
    finally:
        run.stop()


def main() -> None:
    options = parser(__doc__).parse_args()
    bench = Bench("transactions", options)
    turns = 3 if bench.quick else 7
    budget = {1: 60, 100: 60, 1_000: 40, 10_000: 6} if bench.quick else {1: 500, 100: 500, 1_000: 200, 10_000: 30}
    records = 40_000 if bench.quick else 200_000
    rows: list[list[object]] = []
    with bench.data_dir() as data_dir, bench.progress(2 * turns + 3) as steps, embedded_ray(cpus=4):
        steps.next("start")
        rq = rayqueue.connect(data_dir=data_dir / "rayqueue")
        try:
            for topic, partitions in (("one", 1), ("four", 4)):
                rq.create_topic(topic, partitions=partitions)
            for topic, suffix in (("four", ""), ("one", "_p1")):
                rates: dict[tuple[str, int], list[float]] = {}
                with rq.producer() as idempotent, rq.producer(transactional_id=f"bench-{topic}") as producer:
                    plain(idempotent, topic, 5_000)
                    transactions(producer, topic, 100, 5, wait=True)
                    for turn in range(turns):
                        steps.next(f"{topic}, turn {turn + 1}")
                        rates.setdefault(("plain", 0), []).append(plain(idempotent, topic, records))
                        for size in SIZES:
                            for kind in ("tx", "tx_waited"):
                                rate = transactions(producer, topic, size, budget[size], wait=kind == "tx_waited")
                                rates.setdefault((kind, size), []).append(rate)
                    if not suffix:
                        steps.next("small transactions")
                        took_ms = small(producer, topic, 100 if bench.quick else 1_000)
                middle = {each: statistics.median(found) for each, found in rates.items()}
                best = middle["plain", 0]
                bench.add(**{f"plain_msgs_per_s{suffix}": best})
                for kind in ("tx", "tx_waited"):
                    found = {size: middle[kind, size] for size in SIZES}
                    bench.add(**{f"{kind}_msgs_per_s_{size}{suffix}": rate for size, rate in found.items()})
                    bench.add(**{f"{kind}_ratio_1000{suffix}": found[1_000] / best})
                    rows.append([f"{topic}, {kind}", best, *found.values()])
            steps.next("process")
            bench.add(process_msgs_per_s=process(rq, 20_000 if bench.quick else 200_000))
        finally:
            rq.shutdown()
    bench.add(**{f"small_tx_p{each}_ms": percentile(took_ms, each) for each in (50, 99)})
    bench.table("Records per second", ("", "plain", *map(str, SIZES)), rows)
    bench.finish()


if __name__ == "__main__":
    main()
