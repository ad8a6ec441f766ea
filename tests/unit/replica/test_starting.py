"""A store whose processes end again and again: it is tried beside, and given up if it is what ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayqueue.errors import DamagedLogError, StorageError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_file import DAMAGED_FILE, DATA_FILE
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.starts import Start, note_failure, note_start, read_starts, starts_path
from rayqueue.partition.tables import LANES, PARTITION
from rayqueue.replica import starting
from rayqueue.replica.starting import FEW, MANY, WINDOW_MS, look_at_starts, try_to_read
from tests.unit.log.store_disks import GROUP, NODE, SMALL, fill

ROOT = Path(__file__).parents[3]
_PAGE = 4096
ROW = b"a row of a table, in 32 bytes... "[:32]

_WORKER = """
import sys, time
from pathlib import Path
from rayqueue.config import Settings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.replica.start import start_replica
settings = Settings(data_dir=sys.argv[1], log={"scrub_every_ms": 100}, transport={"secret": "only for this test"})
start_replica(Path(sys.argv[1]), GroupId(sys.argv[2]), ReplicaId(sys.argv[3]), settings, on_fatal=print)
time.sleep(30)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "r1"
    store = LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION)
    fill(store, 400)
    for number in range(2000):
        store.put(LANES, b"\0" + number.to_bytes(8, "big"), ROW)
    store.sync()
    store.close()
    return path


def zero_a_leaf(path: Path) -> None:
    """A page in the middle of a table."""
    data = (path / DATA_FILE).read_bytes()
    pages = [at for at in range(0, len(data), _PAGE) if ROW in data[at : at + _PAGE]]
    with (path / DATA_FILE).open("r+b") as file:
        file.seek(pages[len(pages) // 2])
        file.write(bytes(_PAGE))


@pytest.mark.slow
def test_a_page_that_ends_every_process_is_found_out_and_the_store_is_opened_no_more(path: Path) -> None:
    zero_a_leaf(path)
    ends: list[int] = []
    for _ in range(FEW + 1):
        command = [sys.executable, "-c", _WORKER, str(path), GROUP, NODE]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        ends.append(done.returncode)
    assert ends == [-signal.SIGABRT] * FEW + [1]
    assert "DamagedLogError: whoever reads the store is ended by it: SIGABRT" in done.stderr
    assert "Assertion" in (path / DAMAGED_FILE).read_text()
    for _ in range(2):
        with pytest.raises(DamagedLogError, match="SIGABRT"):
            LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    assert not starts_path(path).exists()


def test_a_store_whose_processes_were_killed_by_others_is_opened_as_before(path: Path) -> None:
    for number in range(FEW):
        look_at_starts(path, 1000 + number)
    assert len(read_starts(path)) == FEW
    look_at_starts(path, 2000)
    assert read_starts(path) == [Start(2000)], "tried, and found to be readable"
    LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION).close()


@pytest.mark.parametrize(
    ("ended", "damaged"),
    [(signal.SIGABRT, True), (signal.SIGSEGV, True), (signal.SIGBUS, True), (signal.SIGKILL, False), (0, False)],
)
def test_only_what_lmdb_or_the_disk_did_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, damaged: bool
) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -ended, b"", b"why\n")

    monkeypatch.setattr(subprocess, "run", run)
    for number in range(FEW):
        note_start(path, 1000 + number)
    if damaged:
        with pytest.raises(DamagedLogError, match=f"{signal.Signals(ended).name}: why"):
            look_at_starts(path, 2000)
        with pytest.raises(DamagedLogError):
            LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    else:
        look_at_starts(path, 2000)


def test_a_trial_takes_no_longer_than_it_may(path: Path) -> None:
    assert try_to_read(path, timeout_s=0.001) is None


def tried(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    tries: list[Path] = []
    monkeypatch.setattr(starting, "try_to_read", tries.append)
    return tries


def test_starts_that_are_far_apart_are_tried_only_when_they_are_many(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrub may need hours to come to the page that ends the process."""
    tries = tried(path, monkeypatch)
    for number in range(MANY):
        look_at_starts(path, number * WINDOW_MS)
    assert tries == []
    look_at_starts(path, MANY * WINDOW_MS)
    assert tries == [path]


def test_a_disk_that_refused_every_process_is_not_tried_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = tried(path, monkeypatch)
    for number in range(FEW):
        look_at_starts(path, 1000 + number)
        note_failure(path, "the log cannot be written: Input/output error")
    for _ in range(5):
        with pytest.raises(StorageError, match="ended within 10 minutes") as caught:
            look_at_starts(path, 2000)
        assert "Input/output error" in str(caught.value)
        assert caught.value.details["reason"] == "disk"
    look_at_starts(path, 2000 + WINDOW_MS)
    assert tries == []


def test_names_are_checked_as_before(path: Path) -> None:
    with pytest.raises(StorageError, match="belongs to"):
        LmdbStore.open(path, GroupId("x-1"), ReplicaId("r9"), SMALL, schema=PARTITION)
