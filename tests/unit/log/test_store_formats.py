"""Stores of released formats: each opens, everything in it is there, and it goes on. What is newer is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from rayqueue.cluster.tables import COORDINATOR
from rayqueue.errors import DamagedLogError, DiskFullError, StoreFormatError, StoreIdentityError
from rayqueue.ids import GroupId
from rayqueue.log import lmdb_codec
from rayqueue.log.lmdb_codec import FORMAT_VERSION, HARD, Identity, encode_row
from rayqueue.log.lmdb_rows import IDENTITY_KEY
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import LOG_ONLY, MEMBERS, Schema, Table
from rayqueue.log.wal import SECTOR_BYTES
from rayqueue.log.wal_file import WAL_FILE
from rayqueue.partition.tables import META, OFFSETS, PARTITION
from tests.data import stores
from tests.unit.log.store_disks import GROUP, NODE, SMALL, fill

FORMATS = sorted(stores.HERE.glob("format-*"))
LEASES = Table("later-leases", 20)
STAMPS = Table("stamps", 21, summed=False)
LATER = Schema("partition", PARTITION.version + 1, *PARTITION.tables[:-1], LEASES, STAMPS)
"""What a later release declares."""


@pytest.fixture(params=FORMATS, ids=[folder.name for folder in FORMATS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    stores.unpack_stores(request.param, tmp_path)
    shutil.copy(request.param / stores.CONTENTS, tmp_path)
    return tmp_path


def image(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in ("data.mdb", WAL_FILE)}


def identity_of(path: Path) -> bytes:
    with lmdb.open(str(path), max_dbs=1) as env, env.begin(db=env.open_db(HARD, create=False)) as txn:
        row = txn.get(IDENTITY_KEY)
    assert row is not None
    return bytes(row)[lmdb_codec.ROW_HEADER.size :]


def set_identity(path: Path, identity: bytes) -> None:
    with lmdb.open(str(path), max_dbs=1) as env:
        space = env.open_db(HARD, create=False)
        with env.begin(write=True) as txn:
            txn.put(IDENTITY_KEY, encode_row(HARD, IDENTITY_KEY, identity), db=space)


# -- what earlier releases wrote -------------------------------------------------------------


def test_this_format_is_kept() -> None:
    """A new format? ``python -m tests.data.stores`` writes what every later release will have to open."""
    assert FORMATS[-1].name == f"format-{FORMAT_VERSION}"


@pytest.mark.parametrize("name", stores.STORES)
def test_a_store_of_a_released_format_opens_and_everything_is_there(folder: Path, name: str) -> None:
    expected, kept = stores.read_contents(folder)[name], stores.STORES[name]
    for _ in range(2):  # also after this release has written it
        store = kept.open(folder / name)
        assert stores.has_all(kept.contents(store), expected)
        store.close()
    assert Identity.decode(identity_of(folder / name)).format == FORMAT_VERSION


@pytest.mark.parametrize("name", stores.STORES)
def test_it_goes_on(folder: Path, name: str) -> None:
    kept = stores.STORES[name]
    store = kept.open(folder / name)
    last = store.last_index
    fill(store, last + 3, term=store.last_term)
    store.persist()
    store.close()
    store = kept.open(folder / name)
    assert store.last_index == last + 3
    store.close()


@pytest.mark.parametrize("name", stores.STORES)
def test_whoever_dies_on_the_way_to_this_format_has_lost_nothing(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write-ahead file follows LMDB's newest transaction: one that only changed the format would outdate it."""
    kept, expected = stores.STORES[name], stores.read_contents(folder)[name]
    before = image(folder / name)

    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    monkeypatch.setattr("rayqueue.log.lmdb_store.encode_state", die)  # the last thing before the commit
    with pytest.raises(Died):
        kept.open(folder / name)
    monkeypatch.undo()
    left = image(folder / name)[WAL_FILE]
    for at in range(0, len(left), SECTOR_BYTES):  # those that held nothing may have got their present form
        was = before[WAL_FILE][at : at + SECTOR_BYTES]
        assert left[at : at + SECTOR_BYTES] == was or was == bytes(SECTOR_BYTES)
    store = kept.open(folder / name)
    assert stores.has_all(kept.contents(store), expected)
    store.close()


@pytest.mark.parametrize("folder", FORMATS[:-1], ids=[folder.name for folder in FORMATS[:-1]], indirect=True)
def test_without_space_for_the_new_format_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, expected = stores.STORES["coordinator"], stores.read_contents(folder)["coordinator"]

    def full(*_: object) -> None:
        raise DiskFullError("for this test")

    monkeypatch.setattr(LmdbStore, "_write", full)
    with pytest.raises(DiskFullError):
        kept.open(folder / "coordinator")
    monkeypatch.undo()
    store = kept.open(folder / "coordinator")
    assert stores.has_all(kept.contents(store), expected)
    store.close()


# -- what a later release declares --------------------------------------------------------------


def make(path: Path, schema: Schema = PARTITION) -> None:
    """A store with rows in LMDB, and some that only the write-ahead file has."""
    store = LmdbStore.create(path, GROUP, NODE, SMALL, schema)
    fill(store, 3)
    store.put(META, b"synced", b"1")
    store.sync()
    fill(store, 5)
    store.put(META, b"persisted", b"2")
    store.put(OFFSETS, b"12345678", b"3")
    store.persist()
    assert store.dirty
    store.close()


def open_as(path: Path, schema: Schema) -> LmdbStore:
    return LmdbStore.open(path, GROUP, NODE, SMALL, schema)


def test_a_store_gets_the_tables_that_it_does_not_have(tmp_path: Path) -> None:
    make(tmp_path / "r")
    store = open_as(tmp_path / "r", LATER)
    assert (store.last_index, list(store.scan(LEASES)), list(store.scan(STAMPS))) == (5, [], [])
    assert list(store.scan(META)) == [(b"persisted", b"2"), (b"synced", b"1")]
    assert list(store.scan(OFFSETS)) == [(b"12345678", b"3")]
    store.put(LEASES, b"a", b"lease")
    store.put(STAMPS, b"b", b"stamp")
    store.persist()
    store.close()
    store = open_as(tmp_path / "r", LATER)
    assert (store.get(LEASES, b"a"), store.get(STAMPS, b"b")) == (b"lease", b"stamp")
    with store.snapshot() as snapshot:
        assert list(snapshot.scan(LEASES)) == [(b"a", b"lease")]
    store.close()


def test_a_release_that_knows_less_does_not_touch_it(tmp_path: Path) -> None:
    make(tmp_path / "r")
    open_as(tmp_path / "r", LATER).close()
    before = image(tmp_path / "r")
    with pytest.raises(
        StoreFormatError, match="version 4 of a partition's tables, this release reads up to 3"
    ) as refused:
        open_as(tmp_path / "r", PARTITION)
    assert refused.value.details == {"found": 4, "newest": 3}
    assert image(tmp_path / "r") == before


def test_a_table_that_is_not_known_is_refused_even_if_the_version_was_forgotten(tmp_path: Path) -> None:
    make(tmp_path / "r")
    open_as(tmp_path / "r", Schema("partition", PARTITION.version, *LATER.tables[:-1])).close()
    with pytest.raises(StoreFormatError, match="later-leases, stamps"):
        open_as(tmp_path / "r", PARTITION)


def test_a_newer_format_is_refused_before_anything_else_is_looked_at(tmp_path: Path) -> None:
    make(tmp_path / "r")
    future = (FORMAT_VERSION + 1).to_bytes(2, "little") + b"whatever it may mean"
    set_identity(tmp_path / "r", future)
    (tmp_path / "r" / WAL_FILE).unlink()  # it may have another name by then
    with pytest.raises(
        StoreFormatError, match=rf"format {FORMAT_VERSION + 1}, this release reads .* to {FORMAT_VERSION}"
    ):
        open_as(tmp_path / "r", PARTITION)


def test_a_format_that_is_too_old_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "r")
    set_identity(tmp_path / "r", (1).to_bytes(2, "little") + identity_of(tmp_path / "r")[2:])
    with pytest.raises(StoreFormatError, match=f"format 1, this release reads 2 to {FORMAT_VERSION}.*earlier release"):
        open_as(tmp_path / "r", PARTITION)


def test_a_table_that_should_be_there_is_damage_and_not_made_anew(tmp_path: Path) -> None:
    make(tmp_path / "r")
    with lmdb.open(str(tmp_path / "r"), max_dbs=1) as env:
        space = env.open_db(b"offsets", create=False)
        with env.begin(write=True) as txn:
            txn.drop(space, delete=True)
    with pytest.raises(DamagedLogError):
        open_as(tmp_path / "r", PARTITION)


def test_an_identity_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    make(tmp_path / "r")
    whole = identity_of(tmp_path / "r")
    for cut in range(len(whole)):
        with pytest.raises(DamagedLogError):
            Identity.decode(whole[:cut])
    assert {name for _, name in Identity.decode(whole).tables} == {table.name for table in PARTITION.tables}


def test_a_partition_is_no_coordinator(tmp_path: Path) -> None:
    make(tmp_path / "r")
    for schema in (COORDINATOR, LOG_ONLY):
        with pytest.raises(StoreIdentityError, match="store of a partition"):
            open_as(tmp_path / "r", schema)


def test_a_new_store_gets_its_tables_from_whoever_runs_it(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL)
    store.put(MEMBERS, b"0", b"we")
    store.sync()
    store.close()
    store = open_as(tmp_path / "r", PARTITION)
    assert (store.get(MEMBERS, b"0"), list(store.scan(META))) == (b"we", [])
    store.close()


def test_names_and_numbers_of_tables_are_used_once() -> None:
    for wrong in (Table("meta", 9), Table("other", 5), Table("members", 9), Table("other", 4)):
        with pytest.raises(Exception, match="same name or number"):
            Schema("partition", 2, META, wrong)


def test_another_replicas_store_is_refused_as_before(tmp_path: Path) -> None:
    make(tmp_path / "r")
    with pytest.raises(StoreIdentityError, match="belongs to"):
        LmdbStore.open(tmp_path / "r", GroupId("other"), NODE, SMALL, PARTITION)


def test_what_is_missing_or_other_than_it_was_would_be_noticed() -> None:
    written = {"groups": {"g": [1, {"owner": "m"}]}, "records": [[0, "a"], [1, "b"]]}
    assert stores.has_all(written | {"later": 1}, written)
    assert stores.has_all({**written, "groups": {"g": [1, {"owner": "m", "since": 0}]}}, written)
    for wrong in (
        {"records": written["records"]},
        {**written, "records": [[0, "a"]]},
        {**written, "records": [[0, "a"], [1, "b"], [2, "c"]]},
        {**written, "records": [[0, "a"], [1, "x"]]},
        {**written, "groups": {"g": [1, {"since": 0}]}},
        {**written, "groups": []},
    ):
        assert not stores.has_all(wrong, written)
