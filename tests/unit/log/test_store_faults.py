"""The LMDB store on a disk that flips bits, is cut off, is full, or loses its process.

Bit flips: LMDB believes its file. Where the damage is in a tree's page, LMDB
may end the process by an assertion or a signal; that is a stop, not a wrong
answer, and counts as one here. Nothing wrong may ever come back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    ReplicaClosedError,
    StorageError,
    StoreIdentityError,
    StoreMissingError,
)
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_file import DATA_FILE, LOCK_FILE
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.store import Checkpoint
from rayqueue.partition.tables import META, OFFSETS, PARTITION
from tests.unit.log import store_worker
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry, fill

ROOT = Path(__file__).parents[3]


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """In memory where possible: these tests are about bytes, not about fsync."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None))
    yield directory
    shutil.rmtree(directory)


# -- damage ---------------------------------------------------------------------------


def probe(*arguments: str) -> dict[str, int]:
    process = start("tests.unit.log.store_probe", *arguments)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    report = json.loads(output.splitlines()[-1])
    assert report["wrong"] == [], output
    outcomes: dict[str, int] = report["outcomes"]
    return outcomes


@pytest.mark.slow
def test_no_flipped_bit_is_ever_served(fast_directory: Path) -> None:
    outcomes = probe("flips", str(fast_directory), "1", "200")
    assert sum(outcomes.values()) == 200
    assert outcomes["refused"] > 40
    assert outcomes["right"] > 20  # a flip in a free page is nobody's business


@pytest.mark.slow
def test_a_file_that_was_cut_off_is_never_believed(fast_directory: Path) -> None:
    outcomes = probe("cuts", str(fast_directory))
    assert outcomes["refused"] >= 8


@pytest.mark.slow
def test_no_flipped_bit_in_the_write_ahead_file_is_served_or_taken_for_a_torn_write(fast_directory: Path) -> None:
    """Each flip is in what was promised, or in what was never written. Both are noticed, and nothing is forgotten."""
    outcomes = probe("wal_flips", str(fast_directory), "2", "150")
    assert outcomes == {"refused": 150}


@pytest.mark.slow
def test_a_write_ahead_file_that_was_cut_off_is_never_believed(fast_directory: Path) -> None:
    outcomes = probe("wal_cuts", str(fast_directory))
    assert set(outcomes) == {"refused"}


@pytest.mark.parametrize("length", [0, 1, 100, 4096, 8191])
def test_a_file_without_both_meta_pages_is_damaged(tmp_path: Path, length: int) -> None:
    LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION).close()
    os.truncate(tmp_path / "r" / DATA_FILE, length)
    with pytest.raises(DamagedLogError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def test_a_meta_page_that_went_back_is_damage_and_not_the_past(tmp_path: Path) -> None:
    """LMDB alone would take the other page and silently forget the last synced transaction."""
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    for index in range(1, 6):
        fill(store, index)
        store.sync()
    store.close()
    data = bytearray((tmp_path / "r" / DATA_FILE).read_bytes())
    ids = [int.from_bytes(data[at : at + 8], "little") for at in (144, 4096 + 144)]
    assert abs(ids[0] - ids[1]) == 1, "offset of mm_txnid"
    data[144 if ids[0] > ids[1] else 4096 + 144] = 0
    (tmp_path / "r" / DATA_FILE).write_bytes(data)
    with pytest.raises(DamagedLogError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def test_one_damaged_entry_leaves_the_others_readable(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    store.append([entry(index, payload=b"needle %d " % index * 500) for index in range(1, 11)])
    store.sync()
    store.close()
    file = tmp_path / "r" / DATA_FILE
    data = file.read_bytes()
    at = data.rindex(b"needle 4 ")
    file.write_bytes(data[:at] + b"noodle" + data[at + 6 :])
    store = LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    for index in range(1, 11):
        assert store.term_at(Index(index)) == 1
        if index == 4:
            with pytest.raises(DamagedLogError):
                store.entry(Index(index))
            with pytest.raises(DamagedLogError), store.snapshot() as snapshot:
                snapshot.entry(Index(index))
        else:
            assert store.entry(Index(index)).payload.startswith(b"needle %d " % index)
    assert store.damaged is None, "it is the caller who decides"
    store.close()


# -- a full disk ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_is_survived_under_a_file_size_limit(tmp_path: Path) -> None:
    process = start("tests.unit.log.store_worker", "full", str(tmp_path / "r"), str(3 << 20))
    output, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0, output
    assert "nothing lost" in output


@contextmanager
def small_file_system(directory: Path, kind: str) -> Iterator[Path]:
    """8 MB, really mounted. Needs root; without it the test above is the one that counts."""
    mount_point = directory / "small"
    mount_point.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mount_point)]
    else:
        image = directory / "image"
        with image.open("wb") as file:
            file.truncate(8 << 20)
        if not shutil.which("mkfs.ext4") or subprocess.run(["mkfs.ext4", "-q", image], check=False).returncode:
            pytest.skip("no ext4 here; a full disk is tested under a file size limit")
        command = ["mount", "-o", "loop", str(image), str(mount_point)]
    if not shutil.which("mount") or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here; a full disk is tested under a file size limit")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system_is_survived_and_left_when_space_is_back(tmp_path: Path, kind: str) -> None:
    with small_file_system(tmp_path, kind) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"b" * (2 << 20))
        process = start("tests.unit.log.store_worker", "full", str(disk / "r"), "0")
        assert process.stdout is not None
        first = process.stdout.readline()
        ballast.unlink()
        output, _ = process.communicate("go on\n", timeout=60)
        assert first.startswith("full "), first + output
        assert "nothing lost" in output, output


def append_for_ever(store: LmdbStore) -> None:
    while True:
        store.append([entry(store.last_index + 1, payload=b"x" * 70_000)])
        store.sync()


@pytest.mark.slow
def test_a_log_at_its_limit_is_full_until_it_is_trimmed(tmp_path: Path) -> None:
    options = LmdbOptions(cache_bytes=0, map_bytes=1 << 20, max_bytes=4 << 20, reserve_bytes=512 << 10)
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, options, schema=PARTITION)
    for _ in range(5):  # full again and again, and never stuck
        with pytest.raises(DiskFullError):
            append_for_ever(store)
        assert store.size_bytes() <= 5 << 20
        store.truncate_from(Index(store.last_index))  # what did not fit and was promised to nobody
        assert not store.dirty
        point = Index(store.last_index - 10)
        store.set_applied(store.last_index)
        store.save_checkpoint(Checkpoint(point, Term(1), b"", b""))
        while not store.trim_to(point, 20):
            store.sync()
        store.sync()
        store.put(META, b"a", b"b")
        store.sync()  # pages freed by one transaction are reused by the one after the next
    assert store.last_index > 5 * 35
    store.close()


# -- the process ------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_sync_that_returned_survives_kill_9(tmp_path: Path) -> None:
    for round_number, lines in enumerate((1, 30, 90)):
        path = tmp_path / str(round_number)
        process = start("tests.unit.log.store_worker", "write", str(path))
        assert process.stdout is not None
        reported = ""
        for _ in range(lines + 1):
            reported = process.stdout.readline()
        process.kill()
        rest = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        process.wait()
        last = int(rest[-1] if rest else reported)
        store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)  # the lock went with the process
        # A truncation is buffered, so the log may be as long as before it, and one entry longer than reported.
        assert last <= store.last_index <= last + 5
        assert store.damaged is None
        for index in range(1, last + 1):
            assert store.entry(Index(index)).payload == store_worker.payload(index)
            assert store.get(OFFSETS, index.to_bytes(8, "big")) == b"here"
        store.close()


def test_one_store_at_a_time(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    with pytest.raises(StorageError) as caught:
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    assert caught.value.details["reason"] == "locked"
    script = (
        "import sys; from tests.unit.log.store_disks import *\n"
        "from rayqueue.log.lmdb_store import LmdbStore\n"
        "try: LmdbStore.open(sys.argv[1], GROUP, NODE)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "r")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "StorageError\n"
    store.close()
    LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION).close()


def test_the_right_store_or_none(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    assert not (tmp_path / "r").exists(), "asking makes nothing"
    LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION).close()
    for group, node in ((GroupId("orders-4"), NODE), (GROUP, ReplicaId("orders-3-b"))):
        with pytest.raises(StoreIdentityError):
            LmdbStore.open(tmp_path / "r", group, node, SMALL, schema=PARTITION)
    with pytest.raises(StoreIdentityError):
        LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION).close()


def test_a_creation_that_died_half_way_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "r.new").mkdir()
    (tmp_path / "r.new" / LOCK_FILE).touch()
    (tmp_path / "r.new" / DATA_FILE).write_bytes(b"half a page")
    with pytest.raises(StoreMissingError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    (tmp_path / "r").mkdir()  # an empty directory is no obstacle
    LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION).close()
    assert not (tmp_path / "r.new").exists()


# -- readers --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_map_grows_under_running_snapshots(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    fill(store, 1)
    store.sync()
    stop = threading.Event()
    problems: list[BaseException] = []
    reads = [0] * 4

    def read(which: int) -> None:
        try:
            while not stop.is_set():
                with store.snapshot() as snapshot:
                    last = int(snapshot.get(META, b"end") or b"1")
                    for index in {1, last, (last + 1) // 2}:
                        assert snapshot.entry(Index(index)).index == index
                    assert sum(1 for _ in snapshot.scan(OFFSETS)) == last - 1
                reads[which] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=read, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):  # 9 MB through a map that starts with 1 MB
            store_worker.append_one(store)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert min(reads) > 3
    store.close()


def test_a_reader_that_does_not_end_cannot_block_the_writer_for_good(tmp_path: Path) -> None:
    options = LmdbOptions(map_bytes=1 << 20, growth_wait_ms=50)
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, options, schema=PARTITION)
    store.append([entry(1, payload=b"x" * (8 << 20))])
    with store.snapshot(), pytest.raises(DiskFullError):
        store.sync()
    store.sync()
    assert store.entry(Index(1)).payload == b"x" * (8 << 20)
    store.close()


def test_closing_waits_for_a_snapshot_or_leaves_the_closing_to_it(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, LmdbOptions(close_wait_ms=50), schema=PARTITION)
    fill(store, 3)
    store.sync()
    with store.snapshot() as snapshot:
        store.close()
        assert snapshot.entry(Index(3)) == entry(3)
        with pytest.raises(ReplicaClosedError), store.snapshot():
            pass
        with pytest.raises(StorageError):
            LmdbStore.open(tmp_path / "r", GROUP, NODE, schema=PARTITION)
    LmdbStore.open(tmp_path / "r", GROUP, NODE, schema=PARTITION).close()


def test_more_readers_than_allowed_wait_for_their_turn(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, LmdbOptions(max_snapshots=2), schema=PARTITION)
    fill(store, 1)
    store.sync()
    inside = threading.Semaphore(0)
    leave = threading.Event()

    def read() -> None:
        with store.snapshot() as snapshot:
            snapshot.entry(Index(1))
            inside.release()
            leave.wait()

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=10)
    assert inside.acquire(timeout=10)
    assert not inside.acquire(timeout=0.05)
    leave.set()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    store.close()
