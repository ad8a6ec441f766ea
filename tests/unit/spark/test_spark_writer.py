"""Spark's writers without Spark: who the writer of a micro-batch is, and what a job leaves behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: scripts/setup installs the extra 'spark'")

from pyspark import TaskContext
from pyspark.sql.types import StructType

from rayqueue.errors import BatchConflictError, BridgeError, InvalidInputError
from rayqueue.spark import writer
from rayqueue.spark.options import write_options
from rayqueue.spark.writer import TopicStreamWriter, TopicWriter
from tests.unit.client.queue_in_memory import MemoryQueue

SCHEMA = StructType().add("value", "string")


class Task:
    """What a task is told by Spark."""

    def __init__(self, **properties: str) -> None:
        self._properties = properties

    def partitionId(self) -> int:  # Spark's names
        return 0

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = MemoryQueue()
    made.create_topic("out", partitions=2)
    monkeypatch.setattr(writer, "connected", lambda where: made)
    return made


def rows(values: list[str]) -> list[Any]:
    return [pa.record_batch({"value": values})]


def in_task(monkeypatch: pytest.MonkeyPatch, query: str | None, batch_id: int | None = None) -> None:
    properties = {"sql.streaming.queryId": query, "streaming.sql.batchId": batch_id}
    told = {name: str(value) for name, value in properties.items() if value is not None}
    monkeypatch.setattr(TaskContext, "get", lambda: Task(**told))


def micro_batch(
    monkeypatch: pytest.MonkeyPatch, query: str | None, batch_id: int, values: list[str], **options: str
) -> None:
    """As Spark runs it: the writer of the tasks is not the one that commits."""
    in_task(monkeypatch, query, batch_id)
    given = {"topic": "out", "checkpointLocation": "/same/path", "inlineBytes": "0", **options}
    tasks = TopicStreamWriter(write_options(given, stream=True), SCHEMA)
    messages: list[Any] = [tasks.write(iter(rows(values)))]
    monkeypatch.setattr(TaskContext, "get", lambda: None)
    TopicStreamWriter(write_options(given, stream=True), SCHEMA).commit(messages, batch_id)


def values_in(queue: Any) -> Counter[Any]:
    return Counter(record.value for record in queue.committed("out"))


def test_a_wiped_checkpoint_is_another_writer(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path, on the same machine or on another one: Spark draws another id with each new checkpoint."""
    for query in ("first", "second"):
        for batch_id in (0, 1):
            for _ in range(2):
                micro_batch(monkeypatch, query, batch_id, [f"{query} {batch_id}"])
    assert values_in(queue) == Counter({b"%s %d" % (q, n): 1 for q in (b"first", b"second") for n in (0, 1)})


def test_a_writer_id_that_another_checkpoint_has_used(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_batch(monkeypatch, "first", 0, ["a"], writerId="mine")
    with pytest.raises(BatchConflictError, match="other contents"):
        micro_batch(monkeypatch, "second", 0, ["b"], writerId="mine")
    assert values_in(queue) == Counter([b"a"])


def test_a_spark_that_does_not_tell_which_query_it_runs(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BridgeError, match="Set writerId"):
        micro_batch(monkeypatch, None, 0, ["a"])
    micro_batch(monkeypatch, None, 0, ["a"], writerId="mine")
    assert values_in(queue) == Counter([b"a"])


def test_foreach_batch_with_a_wiped_checkpoint(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(query: str | None, batch_id: int, value: str) -> None:
        in_task(monkeypatch, query)
        options = write_options({"topic": "out", "writerId": "sums", "batchId": str(batch_id), "inlineBytes": "0"})
        job = TopicWriter(options, SCHEMA)
        job.commit([job.write(iter(rows([value])))])

    for _ in range(2):
        write("first", 0, "a")
    with pytest.raises(BatchConflictError):
        write("second", 0, "b")
    assert values_in(queue) == Counter([b"a"])


def test_a_micro_batch_without_tasks(queue: Any) -> None:
    TopicStreamWriter(write_options({"topic": "out"}, stream=True), SCHEMA).commit([], 0)
    assert list(queue.infos) == ["out"]


def lent(queue: Any) -> list[str]:
    """Writes whose tasks have transactions."""
    return [row.write for row in queue.cluster_in_memory.machine.transactions.ids.values() if row.write]


def test_a_job_that_fails_lets_go_at_once(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, None)
    for named in ({}, {"writerId": "w", "batchId": "3"}):
        job = TopicWriter(write_options({"topic": "out", "inlineBytes": "0", **named}), SCHEMA)
        job.write(iter(rows(["open"])))
        assert len(lent(queue)) == 1
        job.abort([None])  # no message came: the task died after it had written
        assert lent(queue) == []
    assert not values_in(queue)


def test_a_micro_batch_that_fails_lets_go_of_what_it_knows(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, "first", 0)
    stream = TopicStreamWriter(write_options({"topic": "out", "inlineBytes": "0"}, stream=True), SCHEMA)
    message = stream.write(iter(rows(["open"])))
    stream.abort([None], 0)
    assert lent(queue) == ["spark.first/0"]
    stream.abort([None, message], 0)
    assert lent(queue) == []
    micro_batch(monkeypatch, "first", 0, ["a"])
    assert values_in(queue) == Counter([b"a"])


def test_an_attempt_that_is_decided_stays_so(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark aborts what it could not commit, and does not know what became of it."""
    in_task(monkeypatch, None)
    job = TopicWriter(write_options({"topic": "out", "inlineBytes": "0"}), SCHEMA)
    messages: list[Any] = [job.write(iter(rows(["a"])))]
    job.commit(messages)
    job.abort(messages)
    assert values_in(queue) == Counter([b"a"])


def test_columns_that_no_record_has() -> None:
    with pytest.raises(InvalidInputError):
        TopicStreamWriter(write_options({"topic": "out"}, stream=True), StructType().add("price", "long"))
