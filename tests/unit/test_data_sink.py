"""Ray Data's bridge as far as it needs no cluster."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pandas", reason="Ray Data needs pandas: scripts/setup installs the extra 'spark'")

from rayqueue.bridge.frame import SCHEMA
from rayqueue.bridge.places import EARLIEST, Places
from rayqueue.bridge.ranges import Range
from rayqueue.bridge.scan import ScanSettings
from rayqueue.data.follow import _Follower
from rayqueue.data.source import TopicDatasource, _by_node
from rayqueue.protocol.topics import TopicPartition
from tests.unit.queue_in_memory import MemoryQueue


def test_tasks_are_ranges() -> None:
    ranges = [Range("t", 1, 0, 0, 100), Range("t", 1, 1, 0, 50)]
    source = TopicDatasource(None, ranges, SCHEMA, ScanSettings())  # type: ignore[arg-type]
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


def test_following(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: Any = MemoryQueue()
    queue.create_topic("t", partitions=2)
    queue.append("t", 0, *[b"x"] * 10)

    def follower() -> _Follower:
        return _Follower(queue, ["t"], "g", Places(EARLIEST), True)

    def told(ranges: list[Range]) -> list[tuple[int, int, int]]:
        return [(each.partition, each.start, each.end) for each in ranges]

    first = follower()
    assert told(first.wait(4, 0)) == [(0, 0, 4)]
    assert told(first.wait(None, 0)) == [(0, 4, 10)]
    assert first.wait(None, 0) == []
    first._lookup.commit("g", {TopicPartition("t", 0): 4}, {"t": 1})
    queue.add_partition("t")
    queue.append("t", 2, b"new")
    assert told(first.wait(None, 0)) == [(2, 0, 1)]
    assert told(follower().wait(None, 0)) == [(0, 4, 10), (2, 0, 1)]
