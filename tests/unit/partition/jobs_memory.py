"""The memory of a queue's leader, while millions of jobs pass.

    python -m tests.unit.partition.jobs_memory --acked 10000000 --delayed 1000000

Prints how much memory of its own the process has (``RssAnon``: without the pages of LMDB's file) after each tenth, as
JSON. The jobs are on disk (LMDB), leased in batches of 100, and acknowledged one by one in random order. Until 4096
leases have been settled it rises: so many are remembered (``leases.REMEMBERED``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.store import Checkpoint, Entry
from rayqueue.partition import Partition, PartitionSettings
from rayqueue.partition.jobs.commands import Request, Settle, lease_command, settle_command
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, encode_options
from rayqueue.records import RecordBatch
from rayqueue.records.checksum import entry_crc
from tests.unit.partition.partition_log import TERM

_BATCH = 100
_LEASED = 5_000
_SYNC_EVERY = 50


class DiskLog:
    """One replica on LMDB, which trims its log as a leader does."""

    def __init__(self, path: Path) -> None:
        options = LmdbOptions(cache_bytes=1 << 20)
        self.store = LmdbStore.create(path, GroupId("jobs-0"), ReplicaId("n1"), options, schema=PARTITION)
        self.partition = Partition(self.store, PartitionSettings(queue=True))
        self.index = 0

    def apply(self, payload: bytes) -> Any:
        self.index += 1
        index = Index(self.index)
        self.store.append([Entry(index, TERM, payload, entry_crc(index, TERM, payload))])
        answer = self.partition.apply(index, payload)
        self.store.set_applied(index)
        if not self.index % _SYNC_EVERY:
            self.store.sync()
        return answer

    def trim(self) -> None:
        command = self.partition.retention_command(0)
        if command is not None:
            self.apply(command)
        self.store.sync()
        self.store.save_checkpoint(Checkpoint(Index(self.index), TERM, b"", self.partition.checkpoint()))
        needed = self.partition.first_needed()
        trimmable = [index for index in self.store.checkpoints() if index < needed]
        if trimmable:
            while not self.store.trim_to(trimmable[-1], 10_000):
                self.store.sync()
        self.store.sync()


def ack_in_random_order(log: DiskLog, count: int) -> Iterator[int]:
    """Yields how many are done, ten times."""
    rng = Random(7)
    batch = RecordBatch.encode([b"v" * 50] * _BATCH, timestamps=1)
    held: list[tuple[int, int]] = []
    done = attempt = 0
    while done < count:
        log.apply(batch)
        attempt += 1
        (grant,) = log.apply(lease_command(1, [Request("w", attempt, _BATCH, 1, 0)]))
        held += [(grant.token, part.first + at) for part in grant.parts for at in range(part.count)]
        while len(held) > _LEASED:
            chosen = []
            for _ in range(_BATCH):
                at = rng.randrange(len(held))
                held[at], held[-1] = held[-1], held[at]
                chosen.append(held.pop())
            settles = [Settle("w", "ack", token, ((job, 1),), -1, 0, "", "", None) for token, job in chosen]
            log.apply(settle_command(1, settles))
            done += _BATCH
            if not done % max(_BATCH, count // 10 // _BATCH * _BATCH):
                log.trim()
                yield done


def delay(log: DiskLog, count: int) -> Iterator[int]:
    headers = [[(JOB_HEADER, encode_options(JobOptions(delay_ms=10**9)))]] * _BATCH
    batch = RecordBatch.encode([b"v" * 50] * _BATCH, headers=headers, timestamps=1)
    step = max(_BATCH, count // 10 // _BATCH * _BATCH)
    for put in range(_BATCH, count + 1, _BATCH):
        log.apply(batch)
        if not put % step:
            log.store.sync()
            yield put


def own_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def allocated_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acked", type=int, default=10_000_000)
    parser.add_argument("--delayed", type=int, default=1_000_000)
    arguments = parser.parse_args()
    for name, pass_through, count in (
        ("acked", ack_in_random_order, arguments.acked),
        ("delayed", delay, arguments.delayed),
    ):
        with tempfile.TemporaryDirectory() as folder:
            log = DiskLog(Path(folder) / "r")
            began_s = time.monotonic()
            figures = {done: own_kib() for done in pass_through(log, count)}
            took_s = round(time.monotonic() - began_s)
            print(json.dumps({"jobs": name, "own_kib": figures, "took_s": took_s}), flush=True)
            log.store.close()


if __name__ == "__main__":
    main()
