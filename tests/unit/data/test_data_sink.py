"""Ray Data's bridge as far as it needs no cluster."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pandas", reason="Ray Data needs pandas: scripts/setup installs the extra 'spark'")

from ray.data.datasource import WriteResult

from rayqueue.bridge.job import Job
from rayqueue.data import TopicSink, sink
from rayqueue.data.source import TopicDatasource, _by_node
from rayqueue.net.scan import Range, ScanSettings
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records.table import COLUMNS
from tests.unit.client.queue_in_memory import Killed, MemoryQueue


def test_tasks_are_ranges() -> None:
    ranges = [Range("t", 1, 0, 0, 100), Range("t", 1, 1, 0, 50)]
    source = TopicDatasource(None, ranges, COLUMNS, ScanSettings())  # type: ignore[arg-type]
    tasks = source.get_read_tasks(3)
    assert [task.metadata.num_rows for task in tasks] == [50, 50, 50]
    assert source.estimate_inmemory_data_size() is None


def test_what_is_read_is_shared_by_the_nodes_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = {TopicPartition("t", 0): ["a", "b"], TopicPartition("t", 1): ["a", "b"], TopicPartition("t", 2): []}
    monkeypatch.setattr("rayqueue.data.source.replica_nodes", lambda *_: homes)
    pieces = [Range("t", 1, number, 0, 10) for number in range(3)]
    rq: Any = None
    assert _by_node(rq, pieces, place=True) == {"a": [pieces[0]], "b": [pieces[1]], None: [pieces[2]]}
    assert _by_node(rq, pieces, place=False) == {None: pieces}


# -- writing ----------------------------------------------------------------------------------


class Context:
    task_idx = 0


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A queue that the sink finds wherever it looks for it."""
    made = MemoryQueue()
    made.create_topic("out", partitions=2)
    monkeypatch.setattr(sink, "where", lambda rq: rq)
    monkeypatch.setattr(sink, "connected", lambda place: place)
    monkeypatch.setattr(sink, "Job", partial(Job, inline_bytes=0))
    return made


def job(made: TopicSink, values: list[str], *, tasks: int = 2) -> None:
    """As Ray Data runs it, without a failure."""
    made.on_write_start()
    told = [made.write([pa.table({"value": values})], Context()) for _ in range(tasks)]
    made.on_write_complete(WriteResult(num_rows=0, size_bytes=0, write_returns=told))


def lent(queue: Any) -> list[str]:
    """Writes whose tasks have transactions."""
    return [row.write for row in queue.cluster_in_memory.machine.transactions.ids.values() if row.write]


def test_a_job_that_fails_lets_go_at_once(out: Any) -> None:
    for named in ({}, {"writer": "w", "batch_id": 4}):
        made = TopicSink(out, "out", **named)  # type: ignore[arg-type]
        made.on_write_start()
        for _ in range(5):
            made.write([pa.table({"value": ["open"]})], Context())
        assert len(set(lent(out))) == 1, "one write for all tasks of a job"
        made.on_write_failed(RuntimeError("a task failed"))
        assert lent(out) == []
    assert not out.committed("out")


def test_a_sink_that_is_used_again_is_another_job(out: Any) -> None:
    made = TopicSink(out, "out")
    for value in ("a", "b"):
        job(made, [value], tasks=1)
    assert sorted(record.value for record in out.committed("out")) == [b"a", b"b"]


def test_a_driver_that_dies_while_it_publishes(out: Any) -> None:
    for at in range(1, 30):
        made = TopicSink(out, "out", writer="w", batch_id=at)
        made.on_write_start()
        told = [made.write([pa.table({"value": [f"batch {at}"]})], Context())]
        out.revive()
        out.kill_at = (at, True)
        try:
            made.on_write_complete(WriteResult(num_rows=0, size_bytes=0, write_returns=told))
        except Killed as error:
            out.revive()
            made.on_write_failed(error)
        out.revive()
        job(TopicSink(out, "out", writer="w", batch_id=1000 + at), [f"other {at}"], tasks=1)
        job(TopicSink(out, "out", writer="w", batch_id=at), [f"batch {at}"], tasks=1)
    wanted = {b"batch %d" % at: 1 for at in range(1, 30)} | {b"other %d" % at: 1 for at in range(1, 30)}
    assert Counter(record.value for record in out.committed("out")) == wanted


def test_ids_of_a_writer_come_in_any_order(out: Any) -> None:
    for batch_id in (4, 6, 5, 4, 5, 6):
        job(TopicSink(out, "out", writer="w", batch_id=batch_id), [f"batch {batch_id}"], tasks=1)
    assert sorted(record.value for record in out.committed("out")) == [b"batch 4", b"batch 5", b"batch 6"]
