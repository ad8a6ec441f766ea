"""Stores of work queues of earlier schemas: each opens, everything in it is there, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data import queue_stores, stores
from tests.unit.log.store_disks import fill

SCHEMAS = sorted(stores.HERE.glob("queue-*"))
assert SCHEMAS, "a release keeps the store of its schema: python -m tests.data.queue_stores"


@pytest.mark.parametrize("folder", SCHEMAS, ids=lambda folder: folder.name)
def test_a_queue_of_a_released_schema_opens_and_goes_on(folder: Path, tmp_path: Path) -> None:
    stores.unpack_stores(folder, tmp_path)
    expected = stores.read_contents(folder)
    for _ in range(2):  # also after this release has written it
        store = queue_stores.open_queue(tmp_path / "queue")
        assert stores.has_all(queue_stores.queue_contents(store), expected)
        store.close()
    store = queue_stores.open_queue(tmp_path / "queue")
    last = store.last_index
    fill(store, last + 3, term=store.last_term)
    store.persist()
    store.close()
    store = queue_stores.open_queue(tmp_path / "queue")
    assert store.last_index == last + 3
    store.close()
