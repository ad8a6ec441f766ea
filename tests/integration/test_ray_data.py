"""Topics as Ray Datasets on a real queue: placed beside replicas, continued, written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

pytest.importorskip("pandas", reason="Ray Data needs pandas: scripts/setup installs the extra 'spark'")

import rayqueue
from rayqueue.client.handle import RayQueue
from rayqueue.data import TopicSink, follow_topic, read_topic, source
from rayqueue.data.source import replica_nodes
from rayqueue.errors import DataLossError, InvalidInputError
from rayqueue.protocol.calls import GetBounds, GetPosition, Trim
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import GetTransactions
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(400)

ROWS = 2000


@pytest.fixture(scope="module")
def rq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayQueue]:
    with ray_cluster("b1", "b2"):
        ray.data.DataContext.get_current().enable_progress_bars = False
        queue = rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))
        queue.create_topic("orders", partitions=2, replication=1, lanes=2)
        with queue.producer() as producer:
            sent = producer.send_many(
                "orders",
                [b"value %d" % row for row in range(ROWS)],
                keys=[b"key %d" % (row % 50) for row in range(ROWS)],
                headers=[[("row", b"%d" % row)] for row in range(ROWS)],
                timestamps_ms=[1_700_000_000_000 + row for row in range(ROWS)],
            )
            sent.result(timeout_ms=60_000)
        yield queue
        queue.shutdown()


def ask(rq: RayQueue, topic: str, partition: int, call: Any) -> Any:
    async def asked() -> Any:
        return await (await rq.routes.partition(TopicPartition(topic, partition))).call(call)

    return rq.io.call(asked())


def values(rq: RayQueue, topic: str) -> Counter[bytes]:
    return Counter(row["value"] for row in read_topic(rq, topic, columns=["value"]).iter_rows())


def test_every_record_with_all_its_columns(rq: RayQueue) -> None:
    rows = read_topic(rq, "orders").take_all()
    assert sorted(int(row["value"].split()[1]) for row in rows) == list(range(ROWS))
    for row in rows:
        number = int(row["value"].split()[1])
        assert row["key"] == b"key %d" % (number % 50)
        assert [(h["name"], h["value"]) for h in row["headers"]] == [("row", b"%d" % number)]
        assert round(row["timestamp"].timestamp() * 1000) == 1_700_000_000_000 + number
    assert len({(row["partition"], row["offset"]) for row in rows}) == ROWS


def test_ranges_columns_and_nothing(rq: RayQueue) -> None:
    some = read_topic(rq, "orders", start={"orders": {0: 10, 1: "latest"}}, end={"orders": {0: 15}}, columns=["offset"])
    assert some.sort("offset").take_all() == [{"offset": number} for number in range(10, 15)]
    assert read_topic(rq, "orders", start="latest").count() == 0
    assert read_topic(rq, "orders", start=1_700_000_000_000 + ROWS - 5).count() >= 5
    with pytest.raises(InvalidInputError, match="no column"):
        read_topic(rq, "orders", columns=["price"])


def test_tasks_run_where_a_replica_is(rq: RayQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [TopicPartition("orders", number) for number in range(2)]
    homes = replica_nodes(rq, places)
    assert len({node for nodes in homes.values() for node in nodes}) == 2, "both replicas are on one node"
    original = source._reader

    def reader_that_tells_its_node(*arguments: Any) -> Any:
        def blocks() -> Iterator[pa.Table]:
            node = ray.get_runtime_context().get_node_id()
            for block in original(*arguments)():
                yield block.set_column(block.schema.get_field_index("topic"), "topic", pa.array([node] * len(block)))

        return blocks

    monkeypatch.setattr(source, "_reader", reader_that_tells_its_node)
    rows = read_topic(rq, "orders", columns=["partition", "topic"]).take_all()
    assert len(rows) == ROWS
    ran = {(row["partition"], row["topic"]) for row in rows}
    assert ran == {(place.partition, homes[place][0]) for place in places}


def test_a_run_goes_on_where_the_last_one_ended(rq: RayQueue) -> None:
    rq.create_topic("log", partitions=2, replication=1)

    def send(first: int, count: int) -> None:
        with rq.producer() as producer:
            fresh = [b"%d" % n for n in range(first, first + count)]
            producer.send_many("log", fresh, keys=fresh).result(timeout_ms=60_000)

    def run(*, commit: bool = True, **options: Any) -> list[list[int]]:
        seen = []
        for part in follow_topic(rq, "log", checkpoint="nightly", columns=["value"], **options):
            rows = [int(row["value"]) for row in part.dataset.iter_rows()]
            assert len(rows) == len(part)
            seen.append(rows)
            if commit:
                part.commit()
        return seen

    send(0, 100)
    parts = run(max_records=40, pin=True)
    assert [len(part) for part in parts] == [40, 40, 20]
    assert sorted(n for part in parts for n in part) == list(range(100))
    assert run() == []
    send(100, 50)
    rq.alter_topic("log", partitions=3)
    send(150, 30)
    (lost,) = run(commit=False)  # a run that dies before it commits
    (again,) = run()
    assert sorted(lost) == sorted(again) == list(range(100, 180))
    assert ask(rq, "log", 0, GetPosition(group="nightly")).pinned
    assert rq.group("nightly").lag == 0


def test_a_part_is_written_once_though_its_run_dies_and_the_topic_grows(rq: RayQueue) -> None:
    for name in ("grown", "grown-copies"):
        rq.create_topic(name, partitions=1, replication=1)

    def send(first: int, count: int) -> None:
        with rq.producer() as producer:
            producer.send_many("grown", [b"%d" % n for n in range(first, first + count)]).result(timeout_ms=60_000)

    def run(*, commit: bool = True) -> list[tuple[int, int]]:
        seen = []
        for part in follow_topic(rq, "grown", checkpoint="grown", columns=["value"]):
            part.dataset.write_datasink(TopicSink(rq, "grown-copies", part=part))
            seen.append((part.id, len(part)))
            if not commit:
                break
            part.commit()
        return seen

    send(0, 100)
    assert run(commit=False) == [(0, 100)]  # dies between the two
    send(100, 50)
    assert run() == [(0, 100), (1, 50)]
    assert run() == []
    assert values(rq, "grown-copies") == Counter(b"%d" % n for n in range(150))


def test_what_retention_took(rq: RayQueue) -> None:
    rq.create_topic("short", partitions=1, replication=1)
    with rq.producer() as producer:
        for n in range(20):
            producer.send("short", b"%d" % n).result(timeout_ms=30_000)
    next(follow_topic(rq, "short", checkpoint="slow", max_records=5)).commit()
    ask(rq, "short", 0, Trim(before=10))
    with pytest.raises(DataLossError, match="records 5 to 9 of short-0"):
        next(follow_topic(rq, "short", checkpoint="slow"))
    part = next(follow_topic(rq, "short", checkpoint="slow", fail_on_data_loss=False))
    assert part.dataset.count() == 10


def test_a_write_task_that_is_run_again_leaves_nothing(rq: RayQueue, tmp_path: Path) -> None:
    """Each block's task dies after it has written its rows, and is run again."""
    rq.create_topic("written", partitions=2, replication=1)
    marks = str(tmp_path)

    class StumblingSink(TopicSink):
        def write(self, blocks: Any, ctx: Any) -> Any:
            written = super().write(blocks, ctx)
            mark = Path(marks, f"task-{ctx.task_idx}")
            if not mark.exists():
                mark.touch()
                raise OSError("died after it wrote")
            return written

    table = pa.table({"value": [b"%06d %s" % (n, b"x" * 50) for n in range(6000)]})
    context = ray.data.DataContext.get_current()
    context.retried_io_errors = [*context.retried_io_errors, "died after it wrote"]
    dataset = ray.data.from_arrow([table.slice(0, 3000), table.slice(3000)])
    dataset.write_datasink(StumblingSink(rq, "written"), ray_remote_args={"max_retries": 3, "retry_exceptions": True})
    assert list(tmp_path.iterdir()), "no task died: this test tests nothing"
    assert values(rq, "written") == Counter(table.column("value").to_pylist())
    ends = [ask(rq, "written", number, GetBounds()).end for number in (0, 1)]
    assert sum(ends) > 6000, "no task had written anything when it died: this test tests nothing"

    class FailingSink(TopicSink):
        def write(self, blocks: Any, ctx: Any) -> Any:
            super().write(blocks, ctx)
            raise ValueError("failed after it wrote")

    with pytest.raises(Exception, match="failed after it wrote"):
        dataset.write_datasink(FailingSink(rq, "written"))
    assert [ask(rq, "written", number, GetTransactions()) for number in (0, 1)] == [(), ()], "readers would wait"
    assert values(rq, "written") == Counter(table.column("value").to_pylist())


def test_transactions_that_are_open_or_aborted(rq: RayQueue) -> None:
    rq.create_topic("isolated", partitions=1, replication=1)

    def followed() -> list[bytes]:
        found = []
        for part in follow_topic(rq, "isolated", checkpoint="isolated", columns=["value"]):
            found += [row["value"] for row in part.dataset.iter_rows()]
            part.commit()
        return found

    with rq.producer(transactional_id="data-a") as first, rq.producer(transactional_id="data-b") as second:
        aborted = first.transaction()
        aborted.begin()
        aborted.send("isolated", b"aborted").result()
        aborted.abort()
        with first.transaction() as tx:
            tx.send("isolated", b"committed")
        still_open = second.transaction()
        still_open.begin()
        still_open.send("isolated", b"open").result()
        with first.transaction() as tx:
            tx.send("isolated", b"behind")
        assert values(rq, "isolated") == Counter([b"committed"])
        assert followed() == [b"committed"]
        assert read_topic(rq, "isolated", isolation="read_uncommitted").count() == 4
        still_open.abort()
        assert values(rq, "isolated") == Counter([b"committed", b"behind"])
        assert followed() == [b"behind"]


def test_the_same_batch_is_written_once(rq: RayQueue) -> None:
    rq.create_topic("named", partitions=2, replication=1)
    for run in range(2):
        rows = ray.data.from_items([{"value": f"run {run} row {n}", "key": str(n), "junk": n} for n in range(50)])
        rows.write_datasink(TopicSink(rq, "named", columns=["value", "key"], writer="job", batch_id=7))
    assert Counter(value.split()[1] for value in values(rq, "named").elements()) == {b"0": 50}
    with pytest.raises(InvalidInputError):
        TopicSink(rq, "named", writer="job")
