"""Following a topic part by part: a part is the same whenever it comes, and is written once wherever its run dies."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pandas", reason="Ray Data needs pandas: scripts/setup installs the extra 'spark'")

from ray.data.datasource import WriteResult

from rayqueue.bridge.job import Job
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places
from rayqueue.bridge.scan import read
from rayqueue.data import follow, sink
from rayqueue.data.follow import _Follower, follow_topic
from rayqueue.data.plan import MAX_OPEN, PlannedPart
from rayqueue.data.sink import TopicSink, writer_of
from rayqueue.errors import (
    BatchConflictError,
    DataLossError,
    InvalidInputError,
    RayQueueError,
    StaleWriterError,
    TopicRecreatedError,
)
from rayqueue.net.scan import Range, ScanSettings
from rayqueue.protocol.calls import Commit, GetPosition, Trim, decode_partition_call
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.topics import MAX_NAME, TopicPartition, check_name
from rayqueue.records.table import schema_of
from tests.unit.client.queue_in_memory import Killed, MemoryQueue

RECIPE = Path(__file__).parents[3] / "docs" / "ray-data.md"


@pytest.fixture
def queue() -> Any:
    made = MemoryQueue()
    made.create_topic("t", partitions=2)
    return made


def follower(queue: Any, *topics: str, fail_on_data_loss: bool = True) -> _Follower:
    return _Follower(queue, list(topics or ("t",)), "g", Places(EARLIEST), fail_on_data_loss)


def told(part: PlannedPart | None) -> Any:
    if part is None:
        return None
    return part.number, [(each.topic, each.partition, each.start, each.end) for each in part.ranges]


def test_parts_follow_each_other(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    first = follower(queue)
    part = first.wait(4, 0)
    assert told(part) == (0, [("t", 0, 0, 4)])
    assert told(first.wait(None, 0)) == (1, [("t", 0, 4, 10)])
    assert first.wait(None, 0) is None
    assert part is not None
    first.plan.commit(part)
    queue.add_partition("t")
    queue.append("t", 2, b"new")
    assert told(first.wait(None, 0)) == (2, [("t", 2, 0, 1)])


LATEST_RUNS = [None, "nothing came", "one partition", "planned, not committed"]


@pytest.mark.parametrize("first_run", LATEST_RUNS)
@pytest.mark.parametrize("pinned", [False, True])
def test_from_the_latest_is_from_where_the_first_run_began(queue: Any, first_run: str | None, pinned: bool) -> None:
    def run() -> _Follower:
        made = _Follower(queue, ["t"], "g", Places(LATEST), True)
        if pinned:
            made.pin()
        return made

    for number in (0, 1):
        queue.append("t", number, *[b"before"] * 3)
    seen: list[Any] = []
    if first_run is not None:
        first = run()
        assert first.wait(None, 0) is None, "what was there before is not meant"
        if first_run != "nothing came":
            queue.append("t", 0, b"x", b"x")
            part = first.wait(None, 0)
            assert part is not None
            assert told(part) == (0, [("t", 0, 3, 5)])
            if first_run == "one partition":
                first.plan.commit(part)
                seen.append(part)
        queue.append("t", 0, b"between")
        queue.append("t", 1, b"between")
        queue.add_partition("t")
        queue.append("t", 2, b"new")
    second = run()
    while (part := second.wait(None, 0)) is not None:
        seen.append(part)
    ranges = sorted((each.partition, each.start, each.end) for part in seen for each in part.ranges)
    wanted = [] if first_run is None else [(0, 3, 4), (1, 3, 4), (2, 0, 1)]
    if first_run in ("one partition", "planned, not committed"):
        wanted = [(0, 3, 5), (0, 5, 6), (1, 3, 4), (2, 0, 1)]
    assert ranges == wanted


@pytest.mark.slow
def test_a_first_run_that_dies_while_it_begins_is_one_that_has_not_begun(queue: Any) -> None:
    """Wherever it dies, the next one reads what came since it began, and nothing of before its own beginning twice."""
    for at in range(1, 30):
        queue = MemoryQueue()
        queue.create_topic("t", partitions=3)
        for number in range(3):
            queue.append("t", number, *[b"before"] * 3)
        queue.kill_at = (at, True)
        try:
            _Follower(queue, ["t"], "g", Places(LATEST), True).wait(None, 0)
        except Killed:
            queue.revive()
        else:
            break
        again = _Follower(queue, ["t"], "g", Places(LATEST), True)
        assert again.wait(None, 0) is None, f"killed at {at}: nothing of before"
        for number in range(3):
            queue.append("t", number, b"since")
        assert told(_Follower(queue, ["t"], "g", Places(LATEST), True).wait(None, 0)) == (
            0,
            [("t", number, 3, 4) for number in range(3)],
        )
    assert at > 5


def test_a_plan_of_an_earlier_release_misses_nothing(queue: Any) -> None:
    """It has no place where nothing was committed: a part that was planned begins at its slice."""
    queue.append("t", 0, *[b"x"] * 4)
    lookup = Lookup(queue)
    old = _Follower(queue, ["t"], "g", Places(LATEST), True)
    old.plan.load(lookup, lookup.topics(["t"]), fail_on_data_loss=True)
    old.plan.add(lookup, [Range("t", 1, 0, 1, 3)])
    queue.append("t", 0, b"since")
    queue.append("t", 1, b"since")
    run = _Follower(queue, ["t"], "g", Places(LATEST), True)
    assert told(run.wait(None, 0)) == (0, [("t", 0, 1, 3)])
    assert told(run.wait(None, 0)) == (1, [("t", 0, 3, 5), ("t", 1, 0, 1)])


def test_a_topic_that_is_followed_later_begins_where_it_is_told(queue: Any) -> None:
    assert _Follower(queue, ["t"], "g", Places(LATEST), True).wait(None, 0) is None
    queue.create_topic("u")
    queue.append("u", 0, b"before")
    both = _Follower(queue, ["t", "u"], "g", Places(LATEST), True)
    assert both.wait(None, 0) is None
    queue.append("u", 0, b"since")
    assert told(both.wait(None, 0)) == (0, [("u", 0, 1, 2)])


def test_a_part_that_is_not_committed_comes_again_as_it_was(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 1000)
    lost = follower(queue).wait(None, 0)
    queue.append("t", 0, *[b"x"] * 500)
    queue.append("t", 1, *[b"x"] * 7)
    for _ in range(2):
        run = follower(queue)
        again = run.wait(10, 0)
        assert told(again) == told(lost) == (0, [("t", 0, 0, 1000)])
        assert again is not None
        assert lost is not None
        assert again.identity == lost.identity
        assert told(run.wait(None, 0)) == (1, [("t", 0, 1000, 1500), ("t", 1, 0, 7)])
    last = follower(queue)
    parts = [last.wait(None, 0), last.wait(None, 0)]
    assert [part.number for part in parts if part] == [0, 1]
    for part in parts:
        assert part is not None
        for _ in range(2):  # to commit again changes nothing
            last.plan.commit(part)
    assert follower(queue).wait(None, 0) is None


def test_parts_are_committed_in_order(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    run = follower(queue)
    first, second = run.wait(4, 0), run.wait(4, 0)
    assert first
    assert second
    with pytest.raises(InvalidInputError, match="part 0 of checkpoint 'g' is not committed yet"):
        run.plan.commit(second)
    run.plan.commit(first)
    run.plan.commit(second)
    assert told(follower(queue).wait(None, 0)) == (2, [("t", 0, 8, 10)])


def test_parts_that_nobody_commits(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 100)
    queue.append("t", 1, *[b"x"] * 100)
    run = follower(queue)
    for number in range(MAX_OPEN):
        assert told(run.wait(2, 0))[0] == number
    with pytest.raises(InvalidInputError, match="commit them first"):
        run.wait(2, 0)
    again = follower(queue)
    assert [told(again.wait(None, 0))[0] for _ in range(MAX_OPEN)] == list(range(MAX_OPEN))


def test_two_runs_of_one_checkpoint(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    first, second = follower(queue), follower(queue)
    assert told(first.wait(4, 0))[0] == 0
    assert told(second.wait(4, 0))[0] == 0  # the part that the first has not committed
    assert told(second.wait(4, 0))[0] == 1
    with pytest.raises(StaleWriterError, match="one run at a time"):
        first.wait(4, 0)


def test_a_checkpoint_that_was_deleted_under_a_part(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    run = follower(queue)
    part = run.wait(None, 0)
    assert part
    for number in range(2):
        queue.partitions[TopicPartition("t", number)].log.partition.groups._known.pop("g", None)
    with pytest.raises(StaleWriterError, match="deleted"):
        run.plan.commit(part)


def test_a_topic_that_is_made_again(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    run = follower(queue)
    part = run.wait(None, 0)
    assert part
    queue.delete_topic("t")
    queue.create_topic("t", partitions=2)
    queue.append("t", 0, *[b"y"] * 20)
    with pytest.raises(TopicRecreatedError):
        run.wait(None, 0)
    with pytest.raises(TopicRecreatedError):
        run.plan.commit(part)
    assert told(follower(queue).wait(None, 0)) == (0, [("t", 0, 0, 20)])


def test_one_of_several_topics_that_is_made_again(queue: Any) -> None:
    queue.create_topic("u", partitions=1)
    queue.append("t", 0, b"x")
    queue.append("u", 0, b"x")
    follower(queue, "t", "u").wait(None, 0)
    queue.delete_topic("u")
    queue.create_topic("u", partitions=1)
    with pytest.raises(DataLossError, match="2 ranges, and 1 of them"):
        follower(queue, "t", "u").wait(None, 0)
    assert told(follower(queue, "t", "u", fail_on_data_loss=False).wait(None, 0)) == (0, [("t", 0, 0, 1)])


def test_what_retention_took_of_a_part(queue: Any) -> None:
    queue.append("t", 0, *[b"x"] * 10)
    planned = follower(queue).wait(None, 0)
    assert planned
    for number in range(10, 12):
        queue.append("t", 0, b"%d" % number)
    queue.partitions[TopicPartition("t", 0)].call(Trim(before=11))
    run = follower(queue)
    again = run.wait(None, 0)
    assert again
    with pytest.raises(DataLossError):
        run.readable(again)
    lossy = follower(queue, fail_on_data_loss=False)
    part = lossy.wait(None, 0)
    assert part
    assert part.identity == planned.identity, "the id stands for what was planned"
    assert sum(map(len, lossy.readable(part))) == 0


def test_a_run_uses_all_positions_so_that_none_expires(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of partitions to which nothing comes, and also while it waits."""
    for number in range(2):
        queue.append("t", number, b"x")
    run = follower(queue)
    part = run.wait(None, 0)
    assert part
    run.plan.commit(part)
    idle = queue.partitions[TopicPartition("t", 1)]
    seen: list[Any] = []
    idle.listen(lambda frame: seen.append(decode_partition_call(frame.body)) if frame.kind == Kind.CALL else None)
    use = Commit(group="g", generation=0, offsets={})
    before = idle.call(GetPosition(group="g"))
    later = follower(queue)
    assert later.wait(None, 0) is None
    assert seen.count(use) == 1
    monkeypatch.setattr("time.monotonic", lambda clock=time.monotonic: clock() + 4000)
    assert later.wait(None, 0) is None
    assert seen.count(use) == 2
    assert idle.call(GetPosition(group="g")) == before


@pytest.mark.slow
def test_a_plan_dies_at_any_request() -> None:
    """A run dies at its n-th request. Parts that were handed out come again as they were; none is left out."""
    for at in range(1, 100):
        died = False
        for carried_out in (False, True):
            queue: Any = MemoryQueue()
            queue.create_topic("t", partitions=2)
            for number in range(2):
                queue.append("t", number, *[b"x"] * 3)
            seen: dict[int, Any] = {}
            queue.kill_at = (at, carried_out)
            try:
                _run(queue, seen)
            except Killed:
                died = True
            queue.revive()
            queue.append("t", 1, *[b"x"] * 3)
            _run(queue, seen)
            read = sorted((p, n) for _, ranges in seen.values() for _, p, a, b in ranges for n in range(a, b))
            assert read == [(p, n) for p, count in ((0, 3), (1, 6)) for n in range(count)], f"died at {at}"
            assert sorted(seen) == list(range(len(seen)))
        if not died:
            break
    assert 20 < at < 99


def _run(queue: Any, seen: dict[int, Any]) -> None:
    run = follower(queue)
    while (part := run.wait(4, 0)) is not None:
        assert seen.setdefault(part.number, told(part)) == told(part)
        run.plan.commit(part)


# -- the recipe of docs/ray-data.md ---------------------------------------------------------------


class MemoryDataset:
    """As much of a Dataset as the recipe uses: its ranges, read when it is written."""

    def __init__(self, rq: Any, ranges: Any, **_: Any) -> None:
        self._rq, self._ranges = rq, ranges

    def write_datasink(self, made: TopicSink) -> None:
        try:
            made.on_write_start()
            columns, settings = ("value", "key"), ScanSettings(follower=False)
            schema = schema_of(columns)
            blocks = [pa.Table.from_batches(read(self._rq, each, columns, settings), schema) for each in self._ranges]
            returned = [made.write([block], SimpleNamespace(task_idx=0)) for block in blocks]
            made.on_write_complete(WriteResult(num_rows=0, size_bytes=0, write_returns=returned))
        except Exception as error:
            made.on_write_failed(error)
            raise


def recipe() -> str:
    """The code of docs/ray-data.md that writes each part once."""
    blocks = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "part=part" in block]
    return str(found)


def run_recipe(queue: Any, **names: Any) -> None:
    data = SimpleNamespace(follow_topic=names.get("follow_topic", follow_topic), TopicSink=TopicSink)
    exec(compile(recipe(), str(RECIPE), "exec"), {"rq": queue, "rayqueue": SimpleNamespace(data=data)})


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data's part is done here."""
    monkeypatch.setattr(follow, "dataset_of", MemoryDataset)
    monkeypatch.setattr(sink, "where", lambda rq: rq)
    monkeypatch.setattr(sink, "connected", lambda place: place)
    monkeypatch.setattr(sink, "Job", partial(Job, inline_bytes=0))


def orders(count: int = 0) -> Any:
    queue: Any = MemoryQueue()
    queue.create_topic("orders", partitions=2)
    queue.create_topic("copies", partitions=2)
    more(queue, 0, count)
    return queue


def more(queue: Any, first: int, count: int) -> None:
    for number in range(first, first + count):
        queue.append("orders", number % 2, b"%d" % number)


def copied(queue: Any) -> Counter[bytes | None]:
    return Counter(record.value for record in queue.committed("copies"))


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_the_recipe_dies_between_any_two_requests() -> None:
    """Twice, and each time the topic has grown when it is run again: the next run would make larger parts of it."""
    died_again = 0
    for at in range(1, 200):
        queue = orders(10)
        died = []
        for kill_at in ((at, True), (at * 17 % 48 + 1, False)):
            queue.revive()
            queue.kill_at = kill_at
            try:
                run_recipe(queue)
            except Killed:
                died.append(kill_at)
            queue.revive()
            more(queue, sum(queue.ends("orders")), 5)
        run_recipe(queue)
        assert copied(queue) == Counter(b"%d" % number for number in range(20)), f"died at {at}"
        died_again += len(died) == 2
        if (at, True) not in died:
            break
    assert 30 < at < 199
    assert died_again > 20


@pytest.mark.usefixtures("beside")
def test_two_runs_of_the_recipe_at_once() -> None:
    """The second plans the same part with other ranges, as the first is about to plan it. One of them is refused."""
    queue = orders(20)

    def overtaken(*arguments: Any, **options: Any) -> Any:
        run = follow_topic(*arguments, **options)
        part = next(run)
        plan = part._plan
        at_home = plan._following
        more(queue, 20, 10)
        for number in range(2):  # as if this one's note had been overwritten by a run that had read before it
            queue.partitions[TopicPartition("orders", number)].log.partition.groups._known.pop("nightly", None)
        run_recipe(queue)
        assert at_home
        yield part

    with pytest.raises(BatchConflictError, match="other contents"):
        run_recipe(queue, follow_topic=overtaken)
    assert copied(queue) == Counter(b"%d" % number for number in range(30))


@pytest.mark.usefixtures("beside")
def test_two_sinks_of_one_part() -> None:
    queue = orders(20)
    queue.create_topic("others", partitions=1)
    for part in follow_topic(queue, "orders", checkpoint="nightly"):
        for topic, writer in (("copies", None), ("others", None), ("others", "again")):
            for _ in range(2):
                part.dataset.write_datasink(TopicSink(queue, topic, part=part, writer=writer))
        part.commit()
    assert set(copied(queue).values()) == {1}
    assert set(Counter(record.value for record in queue.committed("others")).values()) == {2}


def test_what_belongs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "where", lambda rq: rq)
    part: Any = SimpleNamespace(checkpoint="c", id=3, identity=b"i")
    with pytest.raises(InvalidInputError, match="not both"):
        TopicSink(MemoryQueue(), "t", part=part, batch_id=3)
    long = writer_of("c" * MAX_NAME, "t" * MAX_NAME)
    assert check_name("topic", f"data-staging.{long}")
    assert long != writer_of("c" * MAX_NAME, "t" * (MAX_NAME - 1) + "u")
    assert issubclass(BatchConflictError, RayQueueError)
