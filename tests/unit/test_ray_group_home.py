"""What is kept in the data directory besides logs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rayqueue.actors.names import actor_name, check_id
from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, StorageError
from rayqueue.ids import GroupId, NodeId
from rayqueue.testing.ray_group.home import Manifest, load_manifest, save_manifest, with_secret

GROUP = GroupId("orders-3")


def secret_of(settings: Settings) -> str:
    assert settings.transport.secret is not None
    return settings.transport.secret.get_secret_value()


def test_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    first = secret_of(with_secret(settings))
    assert len(first) >= 32
    assert secret_of(with_secret(settings)) == first
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["secret"]
    assert first not in repr(with_secret(settings))


def test_all_that_start_at_once_have_the_same_secret(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    barrier, found = threading.Barrier(8), list[str]()

    def start() -> None:
        barrier.wait()
        found.append(secret_of(with_secret(settings)))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_configured_secret_is_not_written(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, transport={"secret": "correct horse battery staple"})
    assert with_secret(settings) is settings
    assert list(tmp_path.iterdir()) == []


def test_manifest(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert load_manifest(settings, GROUP) is None
    for complete in (False, True):
        manifest = Manifest((NodeId("n1"), NodeId("n2")), complete)
        save_manifest(settings, GROUP, manifest)
        assert load_manifest(settings, GROUP) == manifest
    assert [path.name for path in (tmp_path / GROUP).iterdir()] == ["group.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"voters": 1, "complete": true}', '{"voters": []}'])
def test_manifest_that_cannot_be_read_is_no_new_group(tmp_path: Path, text: str) -> None:
    (tmp_path / GROUP).mkdir()
    (tmp_path / GROUP / "group.json").write_text(text)
    with pytest.raises(StorageError):
        load_manifest(Settings(data_dir=tmp_path), GROUP)


def test_ids_are_safe_as_names_of_directories() -> None:
    for good in ("orders-3", "a", "A.b_c-9", "x" * 200):
        assert check_id(good) == good
    for bad in ("", ".", "..", "a/b", "-x", ".x", "a b", "ä", "a\0", "a\n", "x" * 201):
        with pytest.raises(InvalidInputError):
            check_id(bad)
    assert actor_name(GROUP, NodeId("n1")) == "rayqueue/orders-3/n1"
