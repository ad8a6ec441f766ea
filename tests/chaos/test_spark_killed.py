"""A streaming query whose driver, JVM and all, is killed -9 in the middle, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: scripts/setup installs the extra 'spark'")

import ray

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.bridge.scan import read
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.producer import Producer
from rayqueue.net.scan import ScanSettings
from rayqueue.testing import wait_for
from tests.integration.consumers import running_queue
from tests.integration.sparks import need_java

pytestmark = pytest.mark.timeout(1300)

ROOT = Path(__file__).resolve().parents[2]
STEP = 500
"""Rows that are sent at a time while the first query runs."""
BATCH = 1500
PATIENCE_S = 600
"""A cold Spark on a machine that is twenty times too busy."""

_DRIVER = """
import sys
import rayqueue, rayqueue.spark
address, namespace, checkpoint, how, batch = sys.argv[1:]
rq = rayqueue.connect(address, namespace=namespace, create=False)
spark = rayqueue.spark.session(rq, engine="local", cores=2)
# Rows without keys go to another partition each time they are computed: a batch that is run again is not the same.
frame = rayqueue.spark.stream_dataframe(rq, "in", startingOffsets="earliest", maxRecordsPerTrigger=int(batch))
writer = frame.select("value").repartition(3).writeStream.format("rayqueue")
writer = writer.options(topic="out", checkpointLocation=checkpoint, inlineBytes=2000)
writer = writer.trigger(availableNow=True) if how == "to the end" else writer.trigger(processingTime="0 seconds")
writer.start().awaitTermination()
"""


def start(rq: RayQueue, home: Path, how: str) -> subprocess.Popen[str]:
    place = (ray.get_runtime_context().gcs_address, rq.namespace)
    # To a file: a pipe that nobody reads stops a driver that has much to say.
    with (home / f"{how}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _DRIVER, *map(str, place), str(home / "checkpoint"), how, str(BATCH)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def count(rq: RayQueue, topic: str) -> int:
    return sum(values(rq, topic).values())


def values(rq: RayQueue, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for each in Lookup(rq, committed=True).ranges([topic], Places(EARLIEST), Places(LATEST)):
        for batch in read(rq, each, ("value",), ScanSettings(committed=True)):
            found.update(batch.column(0).to_pylist())
    return found


def test_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    """The first query has no end, and is fed until it is killed: however slow or fast it is, it dies at work."""
    need_java()
    with running_queue() as rq:
        rq.create_topic("in", partitions=2, replication=1)
        rq.create_topic("out", partitions=3, replication=1)
        sent: list[bytes] = []

        def send(producer: Producer, rows: int) -> None:
            more = [b"row %d" % number for number in range(len(sent), len(sent) + rows)]
            producer.send_many("in", more, keys=more).result(timeout_ms=60_000)
            sent.extend(more)

        with rq.producer() as producer:
            send(producer, 4 * BATCH)
            killed = start(rq, tmp_path, "until it is killed")

            def under_way() -> bool:
                assert killed.poll() is None, (tmp_path / "until it is killed.log").read_text()
                done = count(rq, "out")
                if len(sent) - done < 2 * BATCH:
                    send(producer, STEP)
                return done >= 3 * BATCH

            try:
                wait_for(under_way, "three micro-batches", timeout_s=PATIENCE_S)
                send(producer, BATCH)
            finally:
                os.killpg(killed.pid, signal.SIGKILL)
                killed.wait()
            send(producer, BATCH)
        again = start(rq, tmp_path, "to the end")
        try:
            code = again.wait(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(again.pid, signal.SIGKILL)
        assert code == 0, (tmp_path / "to the end.log").read_text()
        found, wanted = values(rq, "out"), Counter(sent)
        assert not wanted - found, f"{len(wanted - found)} rows are lost"
        assert not found - wanted, f"{len(found - wanted)} rows are repeated"
