"""A streaming query whose driver, JVM and all, is killed -9 in the middle, and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: scripts/setup installs the extra 'spark'")

import ray

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.bridge.scan import read
from rayqueue.client.connection import RayQueue
from rayqueue.testing import wait_for
from tests.integration.consumers import running_queue
from tests.integration.sparks import need_java

pytestmark = pytest.mark.timeout(700)

ROOT = Path(__file__).resolve().parents[2]
COUNT = 12_000

_DRIVER = """
import sys
import rayqueue, rayqueue.spark
address, namespace, checkpoint = sys.argv[1:]
rq = rayqueue.connect(address, namespace=namespace, create=False)
spark = rayqueue.spark.session(rq, engine="local", cores=2)
# Rows without keys go to another partition each time they are computed: a batch that is run again is not the same.
frame = rayqueue.spark.stream_dataframe(rq, "in", startingOffsets="earliest", maxRecordsPerTrigger=1500)
writer = frame.select("value").repartition(3).writeStream.format("rayqueue")
writer = writer.options(topic="out", checkpointLocation=checkpoint, inlineBytes=2000)
writer.trigger(availableNow=True).start().awaitTermination()
"""


def start(rq: RayQueue, checkpoint: Path) -> subprocess.Popen[str]:
    place = (ray.get_runtime_context().gcs_address, rq.namespace)
    return subprocess.Popen(
        [sys.executable, "-c", _DRIVER, *map(str, place), str(checkpoint)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def values(rq: RayQueue, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for each in Lookup(rq).ranges([topic], Places(EARLIEST), Places(LATEST)):
        for batch in read(rq, each, pa.schema([("value", pa.binary())])):
            found.update(batch.column(0).to_pylist())
    return found


def test_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    need_java()
    with running_queue() as rq:
        rq.create_topic("in", partitions=2, replication=1)
        rq.create_topic("out", partitions=3, replication=1)
        sent = [b"row %d" % number for number in range(COUNT)]
        with rq.producer() as producer:
            producer.send_many("in", sent, keys=sent).result(60_000)
        killed = start(rq, tmp_path)

        def under_way() -> bool:
            assert killed.poll() is None, killed.stderr and killed.stderr.read()
            return sum(values(rq, "out").values()) > COUNT // 5

        try:
            wait_for(under_way, "a fifth of the rows", timeout_s=300)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        assert sum(values(rq, "out").values()) < COUNT, "it was done already: this test tests nothing"
        again = start(rq, tmp_path)
        _, told = again.communicate(timeout=300)
        assert again.returncode == 0, told
        found, wanted = values(rq, "out"), Counter(sent)
        assert not wanted - found, f"{len(wanted - found)} rows are lost"
        assert not found - wanted, f"{len(found - wanted)} rows are repeated"
