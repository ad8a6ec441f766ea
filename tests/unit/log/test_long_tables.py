"""Long tables: their sums are exact, though no checksum is kept in memory, and what is missing is noticed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import lmdb
import pytest

from rayqueue.errors import DamagedLogError
from rayqueue.log.lmdb_codec import HARD, TableSum, decode_row, decode_state, encode_row, encode_state
from rayqueue.log.lmdb_rows import STATE_KEY
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import Table
from rayqueue.partition.tables import DEDUPE, JOB_INDEX, META, PARTITION
from tests.unit.log.store_disks import GROUP, NODE, SMALL


def create(path: Path) -> LmdbStore:
    return LmdbStore.create(path, GROUP, NODE, SMALL, PARTITION)


def reopen(path: Path) -> LmdbStore:
    return LmdbStore.open(path, GROUP, NODE, SMALL, PARTITION)


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_sums_are_exact_whatever_is_put_replaced_and_deleted(tmp_path: Path) -> None:
    rng = Random(3)
    store = create(tmp_path / "r")
    expected: dict[bytes, bytes] = {}
    for turn in range(200):
        for _ in range(rng.randint(1, 5)):
            row = key(rng.randrange(60))
            if rng.random() < 0.4:
                store.delete(JOB_INDEX, row)
                expected.pop(row, None)
            else:
                expected[row] = bytes(rng.randrange(4))
                store.put(JOB_INDEX, row, expected[row])
        store.sync() if rng.random() < 0.5 else store.persist()
        if turn % 40 == 0:
            store.close()
            store = reopen(tmp_path / "r")  # raises if they are not
    assert dict(store.scan(JOB_INDEX)) == expected
    assert JOB_INDEX not in store._rows.crcs
    assert DEDUPE not in store._rows.crcs
    store.close()


@pytest.mark.parametrize("table", [JOB_INDEX, DEDUPE], ids=lambda table: table.name)
def test_a_missing_row_is_noticed_when_the_store_is_opened(tmp_path: Path, table: Table) -> None:
    store = create(tmp_path / "r")
    for number in range(50):
        store.put(table, key(number), b"row")
    store.sync()
    store.close()
    with lmdb.open(str(tmp_path / "r"), max_dbs=40) as env:  # as a page does that has lost its last rows
        space = env.open_db(table.space, create=False)
        with env.begin(write=True) as txn:
            assert txn.delete(key(49), db=space)
            # The state names the transaction that wrote it: it must be this one.
            _restamp(txn, env.open_db(HARD, create=False, txn=txn))
    with pytest.raises(DamagedLogError, match=f"{table.name} has 49 rows, and not the 50"):
        reopen(tmp_path / "r")


def _restamp(txn: lmdb.Transaction[bytes], hard: lmdb._Database) -> None:
    found = txn.get(STATE_KEY, db=hard)
    assert found is not None
    stored = decode_state(decode_row(HARD, STATE_KEY, memoryview(found)))
    sums = {PARTITION.by_number[number]: each for number, each in stored.sums.items()}
    state = encode_state(txn.id(), stored.state, sums)
    txn.put(STATE_KEY, encode_row(HARD, STATE_KEY, state), db=hard)


def test_a_table_that_was_not_summed_before_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JOB_INDEX, "summed", False)
    monkeypatch.setattr(JOB_INDEX, "long", False)
    store = create(tmp_path / "r")
    store.put(JOB_INDEX, b"row", b"1")
    store.put(META, b"other", b"2")
    store.sync()
    store.close()
    monkeypatch.undo()
    store = reopen(tmp_path / "r")
    assert store._rows.sums[JOB_INDEX].rows == 1
    store.put(JOB_INDEX, b"row 2", b"1")
    store.sync()
    store.close()
    store = reopen(tmp_path / "r")
    assert store._rows.sums[JOB_INDEX] != TableSum()
    assert [row for row, _ in store.scan(JOB_INDEX)] == [b"row", b"row 2"]
    store.close()
