"""Bounded reads of topics as Datasets.

A Dataset has the records that were there when it was made: its ranges of
offsets are fixed then, and every run of it reads the same.

Ray Data places all tasks of one read alike. So there is one read per Ray node
that holds a replica, with the ranges of the partitions that were given to this
node, and the Dataset is their union. "Soft": where the node is gone or full, a
task runs elsewhere and reads over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

import pyarrow as pa
import ray
from ray.data import Dataset
from ray.data.block import Block, BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayqueue.actors._ray import pinned_to
from rayqueue.actors.names import actor_name
from rayqueue.bridge.connection import Where, connected, where
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, LATEST, Places, parse_places
from rayqueue.bridge.ranges import split
from rayqueue.bridge.scan import read
from rayqueue.client.handle import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.scan import OnCorrupt, Range, ScanSettings
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records.table import COLUMNS, schema_of

PlaceIn = str | int | datetime | dict[Any, Any] | Places
"""earliest, latest, a time, or offsets per partition: see ``rayqueue.bridge.places``."""

BLOCK_RECORDS = 1_000_000

Isolation = Literal["read_committed", "read_uncommitted"]


def reads_committed(isolation: str) -> bool:
    """``InvalidInputError`` if it is none."""
    if isolation not in get_args(Isolation):
        raise InvalidInputError(
            f"isolation is read_committed or read_uncommitted, not {isolation!r}", option="isolation"
        )
    return isolation == "read_committed"


def read_topic(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    start: PlaceIn = "earliest",
    end: PlaceIn = "latest",
    columns: Sequence[str] | None = None,
    partitions: Iterable[int] | None = None,
    max_records_per_task: int = BLOCK_RECORDS,
    fail_on_data_loss: bool = True,
    on_corrupt: OnCorrupt = "raise",
    isolation: Isolation = "read_committed",
    place: bool = True,
    override_num_blocks: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> Dataset:
    """The records of topics as a Dataset of all columns (``rayqueue.records.table``), or of ``columns``.

    ``place=False`` lets Ray choose where its tasks run. ``on_corrupt="skip"`` leaves out, and logs, batches that cannot
    be read. ``isolation="read_uncommitted"`` has also what transactions have not committed, or have aborted.
    """
    committed = reads_committed(isolation)
    topics = [topic] if isinstance(topic, str) else list(topic)
    wanted = None if partitions is None else frozenset(partitions)
    ranges = Lookup(rq, committed=committed).ranges(
        topics,
        parse_places("start", start, topics, EARLIEST),
        parse_places("end", end, topics, LATEST),
        fail_on_data_loss=fail_on_data_loss,
        wanted=None if wanted is None else lambda _, number: number in wanted,
    )
    return dataset_of(
        rq,
        ranges,
        columns=columns,
        max_records_per_task=max_records_per_task,
        scan=ScanSettings(fail_on_data_loss=fail_on_data_loss, committed=committed, on_corrupt=on_corrupt),
        place=place,
        override_num_blocks=override_num_blocks,
        ray_remote_args=ray_remote_args,
    )


def dataset_of(
    rq: RayQueue,
    ranges: Sequence[Range],
    *,
    columns: Sequence[str] | None = None,
    max_records_per_task: int = BLOCK_RECORDS,
    scan: ScanSettings | None = None,
    place: bool = True,
    override_num_blocks: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> Dataset:
    """These ranges, and no others."""
    scan = scan or ScanSettings()
    names = tuple(columns or COLUMNS)
    schema = schema_of(names)
    pieces = split(ranges, max_records=max_records_per_task)
    if not pieces:
        return ray.data.from_arrow(schema.empty_table())
    datasets: list[Dataset] = []
    for node, of_node in _by_node(rq, pieces, place=place).items():
        arguments = dict(ray_remote_args or {})
        if node is not None:
            arguments["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        source = TopicDatasource(where(rq), of_node, names, scan)
        blocks = override_num_blocks if override_num_blocks is not None else len(of_node)
        datasets.append(ray.data.read_datasource(source, override_num_blocks=blocks, ray_remote_args=arguments))
    first, *rest = datasets
    return first.union(*rest) if rest else first


class TopicDatasource(Datasource):
    """Ranges of offsets as Ray Data reads them. ``read_topic`` makes it."""

    def __init__(self, place: Where, ranges: Sequence[Range], columns: tuple[str, ...], scan: ScanSettings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = place
        self._ranges = list(ranges)
        self._columns = columns
        self._scan = scan

    def get_name(self) -> str:
        return "RayQueue"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        pieces = split(self._ranges, at_least=parallelism)
        return [self._task(each, per_task_row_limit) for each in pieces]

    def _task(self, piece: Range, row_limit: int | None) -> ReadTask:
        # What is left out is not known before it is read; ``count`` believes this.
        rows = None if self._scan.committed or self._scan.on_corrupt == "skip" else len(piece)
        metadata = BlockMetadata(num_rows=rows, size_bytes=None, exec_stats=None, input_files=None)
        read_fn = _reader(self._where, piece, self._columns, self._scan)
        return ReadTask(read_fn, metadata, schema=schema_of(self._columns), per_task_row_limit=row_limit)


def _reader(place: Where, piece: Range, columns: tuple[str, ...], scan: ScanSettings) -> Callable[[], Iterable[Block]]:
    def blocks() -> Iterable[Block]:
        for batch in read(connected(place), piece, columns, scan):
            yield pa.Table.from_batches([batch])

    return blocks


def _by_node(rq: RayQueue, pieces: Sequence[Range], *, place: bool) -> dict[str | None, list[Range]]:
    """Which Ray node reads what: one that has a replica, and of these the one with the least to read so far."""
    if not place:
        return {None: list(pieces)}
    homes = replica_nodes(rq, {piece.topic_partition for piece in pieces})
    load: dict[str, int] = {}
    chosen: dict[str | None, list[Range]] = {}
    for piece in pieces:
        nodes = homes[piece.topic_partition]
        node = min(nodes, key=lambda each: (load.get(each, 0), each)) if nodes else None
        if node is not None:
            load[node] = load.get(node, 0) + len(piece)
        chosen.setdefault(node, []).append(piece)
    return chosen


def replica_nodes(rq: RayQueue, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, list[str]]:
    """The Ray nodes that hold a replica of each."""
    infos = Lookup(rq).topics(sorted({each.topic for each in partitions}))
    found: dict[TopicPartition, list[str]] = {}
    for each in partitions:
        info = infos[each.topic].partitions[each.partition]
        nodes = [_node_of(rq, info.group_id, replica.replica_id) for replica in info.replicas]
        found[each] = sorted({node for node in nodes if node is not None})
    return found


def _node_of(rq: RayQueue, group_id: str, node: str) -> str | None:
    try:
        handle = ray.get_actor(actor_name(GroupId(group_id), ReplicaId(node)), namespace=rq.namespace)
    except ValueError:  # dead, or being moved
        return None
    return pinned_to(handle)
