"""Stores of released formats: each opens, everything in it is there, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayqueue.log.lmdb_store import LmdbStore
from tests.data import stores

FORMATS = sorted(stores.HERE.glob("format-*"))


@pytest.mark.parametrize("name", stores.STORES)
@pytest.mark.parametrize("folder", FORMATS, ids=[folder.name for folder in FORMATS])
def test_a_store_of_a_released_format_opens_and_everything_is_there(tmp_path: Path, folder: Path, name: str) -> None:
    stores.unpack_stores(folder, tmp_path)
    group_id, node_id, contents_of = stores.STORES[name]
    expected = stores.read_contents(folder)[name]
    for _ in range(2):  # also after this release has written it
        store = LmdbStore.open(tmp_path / name, group_id, node_id, stores.SMALL)
        assert contents_of(store) == expected
        store.close()
