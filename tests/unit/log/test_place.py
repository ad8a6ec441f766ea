"""A store knows when it was copied, and does not take a restart for a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayqueue.log import place
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.partition.tables import PARTITION
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry


def opened(path: Path) -> LmdbStore:
    return LmdbStore.open(path, GROUP, NODE, SMALL, PARTITION)


def copied(path: Path) -> str | None:
    """What the next start finds."""
    store = opened(path)
    store.close()
    return store.copied


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION).close()
    store = opened(path)
    store.append([entry(1)])
    store.persist()
    store.close()
    return path


def test_a_restart_is_no_copy_and_neither_is_a_directory_with_another_name(path: Path) -> None:
    assert copied(path) is None
    assert copied(path) is None
    moved = path.rename(path.with_name("elsewhere"))
    assert copied(moved) is None
    assert len(list(moved.glob("HERE.*"))) == 1


def test_a_copy_says_so_at_every_start_until_it_is_settled(path: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(path, twin)
    assert copied(path) is None, "the original"
    for _ in range(2):
        assert "copied or restored" in (copied(twin) or "")
    store = opened(twin)
    store.settle_here()
    assert store.copied is None
    store.close()
    assert copied(twin) is None


def _replaced(path: Path, backup: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(backup, path)


def _written_over(path: Path, backup: Path) -> None:
    """In place, as ``cp -r backup/. path`` does: the files keep their inodes."""
    shutil.copytree(backup, path, dirs_exist_ok=True)


def _data_only(path: Path, backup: Path) -> None:
    Path(shutil.copy2(backup / "data.mdb", path / "restored")).replace(path / "data.mdb")


def _moved(path: Path, backup: Path) -> None:
    shutil.rmtree(path)
    backup.rename(path)


@pytest.mark.parametrize("restore", [_replaced, _written_over, _moved, _data_only])
def test_a_backup_that_is_restored_is_a_copy(path: Path, tmp_path: Path, restore: Callable[[Path, Path], None]) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(path, backup)
    assert copied(path) is None  # one more life, as the backup does not know it
    restore(path, backup)
    assert place.find_copy(path) is not None


def test_a_crash_while_the_place_is_written_down_leaves_the_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for survives in (0, 1):
        left = iter([None] * survives)

        def crash(directory: Path, left: Iterator[None] = left) -> None:
            if next(left, KeyboardInterrupt) is not None:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(place, "fsync_directory", crash)
            with pytest.raises(KeyboardInterrupt):
                place.settle(path)
        assert place.find_copy(path) is None
    place.settle(path)
    assert place.find_copy(path) is None
    assert len(list(path.glob("HERE.*"))) == 1


def test_a_record_that_cannot_be_read_is_a_reason_to_ask(path: Path) -> None:
    for content in (b"", b"1 2\n", b"x" * 100, b"9" * 400 + b" 1 1 1 1\n", b"\xff\xfe"):
        (path / "PLACE").write_bytes(content)
        assert "cannot be read" in (place.find_copy(path) or "")
    (path / "PLACE").write_bytes(b"77 1 1 1 1\n")
    assert "lacks the file" in (place.find_copy(path) or "")
