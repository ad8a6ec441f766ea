"""The store of a work queue, as the release wrote that first had its schema; opened by every later one.

    python -m tests.data.queue_stores        writes tests/data/queue-N, for the partition's schema of this code

As with ``tests.data.stores``: run once, with the commit that is released, and never again.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rayqueue.ids import GroupId
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.partition import Partition, PartitionSettings, configure_command, pass_time_command
from rayqueue.partition.jobs.commands import (
    Request,
    Settle,
    change_command,
    end_workers_command,
    lease_command,
    settle_command,
)
from rayqueue.partition.jobs.rows import JobRow
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, encode_options
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import RecordBatch
from tests.data.stores import ARCHIVE, CONTENTS, HERE, LEADER, NOW_MS, SMALL, Leader, _plain

QUEUE_ID = GroupId("jobs-0")
SETTINGS = PartitionSettings(queue=True, lanes=2, max_deliveries=2, version=2, max_record_bytes=1_000)


def open_queue(path: Path) -> LmdbStore:
    return LmdbStore.open(path, QUEUE_ID, LEADER, SMALL, PARTITION)


def queue_contents(store: LmdbStore) -> dict[str, Any]:
    """Everything that a worker, a putter or an operator can find out. Syncs the store."""
    partition = Partition(store, PartitionSettings())
    store.sync()
    jobs = partition.jobs
    assert jobs is not None
    leases = [
        (each.token, each.worker, each.attempt, each.began_ms, each.until_ms, each.runs, sorted(each.ids.items()))
        for each in jobs.leases.holding()
    ]
    return _plain(
        {
            "settings": msgspec.structs.asdict(partition.settings),
            "bounds": (partition.start_offset, partition.next_offset),
            "times": tuple(partition.clock.times),
            "counts": {
                name: getattr(jobs.counts, name) for name in ("ready", "leased", "delayed", "dead", "next_token")
            },
            "leases": sorted(leases),
            "rows": [_told(row) for row in jobs.rows.scan()],
            "frontiers": {lane: sorted(front.runs()) for lane, front in jobs.frontiers.items()},
            "ready": {lane: list(jobs.ready.in_order(lane, 100)) for lane in range(2)},
            "dead": jobs.dead.ids(0, 100),
            "results": {number: jobs.results.get(number) for number in range(40)},
            "dedupes": {name: jobs.dedupes.first(name, NOW_MS) for name in ("one", "two", "none")},
            "next_event_ms": jobs.next_event_ms(),
            "first_place": jobs.first_place(partition.next_offset),
        }
    )


def _told(row: JobRow) -> Any:
    return [getattr(row, name) for name in JobRow.__struct_fields__]


def _put(count: int, lane: int = 0, **options: Any) -> bytes:
    headers: Any = [[(JOB_HEADER, encode_options(JobOptions(**options)))]] * count if options else None
    return RecordBatch.encode(
        [b"job %d" % at for at in range(count)], headers=headers, timestamps=[NOW_MS] * count, lane=lane
    )


def _lease(attempt: int, count: int, worker: str = "w1") -> bytes:
    return lease_command(NOW_MS + attempt, [Request(worker, attempt, count, 1, 60_000)])


def _settle(kind: str, token: int, first: int, count: int = 1, result: bytes | None = None) -> bytes:
    text = "" if kind == "ack" else f"{kind} it"
    told = Settle("w1", kind, token, ((first, count),), 5_000, 0, text, text, result)
    return settle_command(NOW_MS + 50, [told])


def write_queue(path: Path) -> None:
    store = LmdbStore.create(path, QUEUE_ID, LEADER, SMALL, PARTITION)
    RaftEngine.bootstrap(store, ReplicaSet.of([LEADER]))
    leader = Leader(store, Partition(store, SETTINGS))
    leader.write(
        configure_command(SETTINGS),
        pass_time_command(NOW_MS),
        _put(10),  # 0 to 9
        _put(2, lane=1, want_result=True),  # 10, 11
        _put(1, delay_ms=3_600_000, dedupe_id="one"),  # 12
        _put(1, ttl_ms=7_200_000, dedupe_id="two"),  # 13
        _put(1, dedupe_id="two"),  # 14, which is none
        _lease(1, 6),  # 10, 11, then 0 to 3
        _settle("ack", 1, 10, result=b"the result"),
        _settle("ack", 1, 0, 2),
        _settle("nack", 1, 2),
        _settle("reject", 1, 3),
    )
    leader.checkpoint_and_trim()
    leader.write(_lease(2, 2), _lease(3, 2, "w2"), end_workers_command(NOW_MS + 60, ["w2"]))
    store.sync()
    leader.write(_put(3), _lease(4, 1), _settle("ack", 2, 4), change_command(NOW_MS + 70, "cancel", [16]))
    assert store.dirty, "the write-ahead file should hold the end"
    store.close()


def main() -> None:
    folder = HERE / f"queue-{PARTITION.version}"
    folder.mkdir()
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "queue"
        write_queue(path)
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=9) as archive:
            for file in ("data.mdb", "WAL"):
                archive.add(path / file, f"queue/{file}")
        store = open_queue(path)
        contents = queue_contents(store)
        store.close()
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
