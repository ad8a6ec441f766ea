"""Runs apart from the tests: a store on a disk with a limit, and a store that is killed while it writes.

``full PATH LIMIT``: the file may not grow past LIMIT bytes (RLIMIT_FSIZE); 0
means that the file system is small by itself, and the test makes room when it
is told so. ``write PATH``: appends and syncs for ever, and prints the last
index after each sync.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from rayqueue.errors import DiskFullError
from rayqueue.ids import Index
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.partition.tables import META, OFFSETS, PARTITION
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry, indexes


def payload(index: int) -> bytes:
    return b"%d " % index * (30_000 if index % 3 else 50)


def append_one(store: LmdbStore) -> None:
    index = store.last_index + 1
    store.append([entry(index, payload=payload(index))])
    store.put(OFFSETS, index.to_bytes(8, "big"), b"here")
    store.put(META, b"end", b"%d" % index)
    store.sync()


def full(path: Path, limit_bytes: int) -> None:
    store = LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    synced = 0
    try:
        while True:
            append_one(store)
            synced = store.last_index
    except DiskFullError:
        assert store.last_index == synced + 1, "the buffer is kept"
    for _ in range(3):
        try:
            store.sync()
            raise AssertionError("the disk is still full")
        except DiskFullError:
            assert store.dirty
            assert store.must_sync
    assert synced > 5
    assert indexes(store.entries(Index(1), 1 << 40)) == list(range(1, synced + 2)), "reads go on"
    with store.snapshot() as snapshot:
        assert snapshot.entry(Index(synced)).payload == payload(synced)
        assert snapshot.get(META, b"end") == b"%d" % synced
    print(f"full {synced}", flush=True)
    sys.stdin.readline()  # the test has made room, if that is its part
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.sync()
    append_one(store)
    store.close()
    store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    assert store.last_index == synced + 2
    for index in range(1, synced + 3):
        assert store.entry(Index(index)).payload == payload(index)
        assert store.get(OFFSETS, index.to_bytes(8, "big")) == b"here"
    store.close()
    print("nothing lost", flush=True)


def write(path: Path) -> None:
    store = LmdbStore.create(path, GROUP, NODE, schema=PARTITION)
    print("ready", flush=True)
    while True:
        append_one(store)
        if store.last_index % 40 == 0:
            store.truncate_from(Index(store.last_index - 3))
        os.write(1, b"%d\n" % store.last_index)


def main() -> None:
    path = Path(sys.argv[2])
    if sys.argv[1] == "full":
        full(path, int(sys.argv[3]))
    else:
        write(path)


if __name__ == "__main__":
    main()
