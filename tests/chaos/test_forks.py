"""Forks of a process that runs on a real Ray: the child is refused and ends at once, the parent goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.ray_clusters import run_driver

pytestmark = pytest.mark.timeout(180)

_FORKS = """
import multiprocessing, os, sys, time, rayqueue
from rayqueue.errors import ForkedError

rq = rayqueue.connect(data_dir=sys.argv[1])
rq.create_topic("orders", replication=1)
producer = rq.producer()
consumer = rq.consumer("orders", group="readers")
producer.send("orders", b"0").result(30_000)
seen = [record.value for record in consumer.poll(timeout_ms=30_000)]

def refused(call):
    try:
        call()
    except ForkedError as error:
        assert "spawn" in str(error)
    else:
        os._exit(3)

def child():
    for call in (
        lambda: producer.send("orders", b"lost"), producer.flush, consumer.poll, consumer.commit, rq.topics,
        lambda: rayqueue.connect(sys.argv[1]), lambda: rq.create_topic("more"), rq.producer, rq.shutdown,
    ):
        refused(call)
    producer.close()
    consumer.close()
    rq.close()

for number in range(1, 4):
    under_way = producer.send("orders", b"%d" % number)
    began_s = time.monotonic()
    if number == 3:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(30)
        code = process.exitcode
    else:
        pid = os.fork()
        if pid == 0:
            child()
            under_way.exception(30_000)
            if number == 2:
                os._exit(0)
            sys.exit(0)  # Ray's way to end a process, and Python's: both would wait for the parent's threads
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, (number, code)
    assert time.monotonic() - began_s < 20
    under_way.result(30_000)
    while len(seen) <= number:
        seen += [record.value for record in consumer.poll(timeout_ms=30_000)]
producer.close()
consumer.close()
rq.create_topic("later", replication=1)
print(seen, [info.name for info in rq.topics()])
"""


def test_forks_of_a_process_with_its_own_ray(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # whoever else runs a Ray here is not found
    assert run_driver(_FORKS, tmp_path / "data") == "[b'0', b'1', b'2', b'3'] ['later', 'orders']"
