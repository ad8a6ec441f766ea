"""The promise of ``rayqueue.log.store``, line by line, of both stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayqueue.errors import InvalidInputError, InvariantBrokenError, ReplicaClosedError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, HardState, LogStore
from rayqueue.partition.tables import GROUPS, META, OFFSETS, PARTITION
from tests.unit.log.store_disks import GROUP, NODE, LmdbTestDisk, MemoryTestDisk, TestDisk, entry, fill, indexes


@pytest.fixture(params=["memory", "lmdb"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestDisk]:
    made = MemoryTestDisk() if request.param == "memory" else LmdbTestDisk(tmp_path / "replica")
    yield made
    made.close()


@pytest.fixture
def store(disk: TestDisk) -> LogStore:
    return disk.store


def checkpoint(index: int, term: int = 1, state: bytes = b"state") -> Checkpoint:
    return Checkpoint(Index(index), Term(term), b"members at %d" % index, state)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def applied_log(store: LogStore, last: int) -> None:
    fill(store, last)
    store.set_applied(Index(last))


# -- a new store ------------------------------------------------------------------


def test_a_new_store_is_empty(store: LogStore) -> None:
    assert (store.group_id, store.replica_id) == (GROUP, NODE)
    assert (store.base_index, store.base_term, store.last_index, store.last_term) == (0, 0, 0, 0)
    assert store.hard == HardState(Term(0), None, Index(0))
    assert store.applied == 0
    assert store.checkpoint is None
    assert store.checkpoints() == []
    assert store.damaged is None
    assert not store.dirty
    assert not store.must_sync
    assert store.entries(Index(1), 1000) == []
    assert store.term_at(Index(0)) == 0
    assert list(store.scan(META)) == []


# -- the log ------------------------------------------------------------------------


def test_appended_entries_are_read_before_and_after_sync_and_restart(disk: TestDisk) -> None:
    fill(disk.store, 20)
    for _ in range(3):
        assert disk.store.entry(Index(7)) == entry(7)
        assert disk.store.entries(Index(1), 1 << 20) == [entry(index) for index in range(1, 21)]
        assert (disk.store.last_index, disk.store.last_term) == (20, 1)
        disk.store.sync()
        if not disk.store.dirty:
            disk.reopen()


def test_what_was_not_synced_is_gone_after_a_restart(disk: TestDisk) -> None:
    fill(disk.store, 3)
    disk.store.put(META, b"kept", b"1")
    disk.store.sync()
    fill(disk.store, 5)
    disk.store.put(META, b"lost", b"1")
    disk.store.set_hard(HardState(Term(9), NODE, Index(0)))
    disk.store.set_applied(Index(4))
    disk.store.save_checkpoint(checkpoint(2))
    store = disk.reopen()
    assert (store.last_index, store.applied, store.hard.term) == (3, 0, 0)
    assert store.get(META, b"kept") == b"1"
    assert store.get(META, b"lost") is None
    assert store.checkpoints() == []
    with pytest.raises(KeyError):
        store.entry(Index(4))


def test_entries_stop_at_max_bytes_but_give_at_least_one(store: LogStore) -> None:
    store.append([entry(index, payload=b"x" * 100) for index in range(1, 11)])
    for _ in range(2):  # from memory, then partly from disk
        assert indexes(store.entries(Index(1), 0)) == [1]
        assert indexes(store.entries(Index(1), 99)) == [1]
        assert indexes(store.entries(Index(1), 100)) == [1]
        assert indexes(store.entries(Index(4), 399)) == [4, 5, 6]
        assert indexes(store.entries(Index(4), 400)) == [4, 5, 6, 7]
        assert indexes(store.entries(Index(6), 400)) == [6, 7, 8, 9]  # from disk and from memory
        assert indexes(store.entries(Index(9), 10_000)) == [9, 10]
        assert store.entries(Index(11), 1000) == []
        store.sync()


def test_an_empty_payload_is_an_entry(disk: TestDisk) -> None:
    disk.store.append([entry(1, payload=b""), entry(2, payload=b"")])
    disk.store.sync()
    assert indexes(disk.reopen().entries(Index(1), 0)) == [1, 2]


def test_append_does_not_copy_payloads(store: LogStore) -> None:
    one = entry(1)
    store.append([one])
    assert store.entry(Index(1)).payload is one.payload


@pytest.mark.parametrize("wrong", [[entry(2)], [entry(5)], [entry(4), entry(6)], [entry(4, term=1)]])
def test_a_gap_or_an_older_term_is_refused_whole(store: LogStore, wrong: list[Entry]) -> None:
    fill(store, 2)
    store.append([entry(3, term=2)])
    with pytest.raises(InvariantBrokenError):
        store.append(wrong)
    assert store.last_index == 3


def test_term_at(disk: TestDisk) -> None:
    store = disk.store
    store.append([entry(index, term=index) for index in range(1, 21)])
    for _ in range(2):
        assert [store.term_at(Index(index)) for index in range(22)] == [*range(21), None]
        store.sync()
    store = disk.reopen()
    assert [store.term_at(Index(index)) for index in range(22)] == [*range(21), None]


def test_outside_the_log_is_a_key_error(store: LogStore) -> None:
    applied_log(store, 10)
    store.save_checkpoint(checkpoint(5))
    store.trim_to(Index(5), 100)
    for index in (0, 4, 5, 11):
        with pytest.raises(KeyError):
            store.entry(Index(index))
    with pytest.raises(KeyError):
        store.entries(Index(5), 100)
    assert store.term_at(Index(4)) is None


@pytest.mark.parametrize("synced", [True, False])
def test_truncate_drops_this_entry_and_all_after(disk: TestDisk, synced: bool) -> None:
    fill(disk.store, 10)
    if synced:
        disk.store.sync()
    disk.store.truncate_from(Index(4))
    assert (disk.store.last_index, disk.store.term_at(Index(4))) == (3, None)
    assert disk.store.must_sync
    disk.store.append([entry(4, term=2), entry(5, term=2)])
    for _ in range(2):
        assert disk.store.entries(Index(3), 10_000) == [entry(3), entry(4, term=2), entry(5, term=2)]
        disk.store.sync()
        disk.reopen()
    assert disk.store.last_term == 2


def test_truncating_what_was_never_synced_leaves_nothing_to_write(store: LogStore) -> None:
    fill(store, 2)
    store.sync()
    fill(store, 9)
    store.truncate_from(Index(3))
    assert not store.dirty
    assert store.last_index == 2


def test_truncate_past_the_end_does_nothing(store: LogStore) -> None:
    fill(store, 3)
    store.sync()
    store.truncate_from(Index(4))
    assert not store.dirty


def test_an_applied_or_trimmed_entry_cannot_be_truncated(store: LogStore) -> None:
    fill(store, 5)
    store.set_applied(Index(3))
    for index in (0, 1, 3):
        with pytest.raises(InvariantBrokenError):
            store.truncate_from(Index(index))
    store.truncate_from(Index(4))
    assert store.last_index == 3


# -- hard state -----------------------------------------------------------------------


def test_hard_state_survives(disk: TestDisk) -> None:
    hard = HardState(Term(7), ReplicaId("somebody else"), Index(3))
    disk.store.set_hard(hard)
    disk.store.sync()
    assert disk.reopen().hard == hard
    disk.store.set_hard(HardState(Term(8), None, Index(3)))
    disk.store.sync()
    assert disk.reopen().hard == HardState(Term(8), None, Index(3))


def test_a_term_never_goes_back_and_a_vote_never_changes(store: LogStore) -> None:
    store.set_hard(HardState(Term(5), NODE, Index(0)))
    for hard in (
        HardState(Term(4), None, Index(0)),
        HardState(Term(5), ReplicaId("b"), Index(0)),
        HardState(Term(5), None, Index(0)),
    ):
        with pytest.raises(InvariantBrokenError):
            store.set_hard(hard)
    store.set_hard(HardState(Term(5), NODE, Index(9)))
    store.set_hard(HardState(Term(6), ReplicaId("b"), Index(9)))


def test_applied_only_moves_forward_inside_the_log(store: LogStore) -> None:
    fill(store, 5)
    store.set_applied(Index(3))
    for index in (2, 6):
        with pytest.raises(InvariantBrokenError):
            store.set_applied(Index(index))
    assert store.applied == 3


def test_must_sync_is_about_log_term_and_vote_only(store: LogStore) -> None:
    def check(expected: bool) -> None:
        assert store.dirty
        assert store.must_sync is expected
        store.sync()
        assert not store.dirty
        assert not store.must_sync

    fill(store, 5)
    check(True)
    store.set_hard(HardState(Term(1), None, Index(0)))
    check(True)
    store.set_hard(HardState(Term(1), NODE, Index(0)))
    check(True)
    store.set_hard(HardState(Term(1), NODE, Index(4)))
    check(False)
    store.set_applied(Index(4))
    check(False)
    store.put(META, b"a", b"b")
    check(False)
    store.delete(META, b"a")
    check(False)
    store.save_checkpoint(checkpoint(3))
    check(False)
    store.truncate_from(Index(5))
    check(True)
    store.install(checkpoint(9))
    check(True)
    store.set_hard(store.hard)
    store.set_applied(store.applied)
    store.append([])
    assert not store.dirty


# -- tables -----------------------------------------------------------------------------


def test_rows_are_put_replaced_and_deleted(disk: TestDisk) -> None:
    for table in PARTITION.tables:
        disk.store.put(table, b"a", b"1")
        disk.store.put(table, b"b", b"")
        disk.store.put(table, b"c", b"3")
    disk.store.sync()
    for table in PARTITION.tables:
        disk.store.put(table, b"a", b"%s" % table.space)
        disk.store.delete(table, b"c")
        disk.store.delete(table, b"never there")
    for _ in range(3):
        for table in PARTITION.tables:
            assert disk.store.get(table, b"a") == table.space
            assert list(disk.store.scan(table)) == [(b"a", table.space), (b"b", b"")]
            assert disk.store.get(table, b"c") is None
        disk.store.sync()
        disk.reopen()


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_ordered_and_merges_the_buffer(store: LogStore, reverse: bool) -> None:
    for number in range(0, 300, 2):
        store.put(OFFSETS, key(number), b"disk")
    store.sync()
    for number in range(1, 300, 2):
        store.put(OFFSETS, key(number), b"buffer")
    for number in range(0, 300, 10):
        store.delete(OFFSETS, key(number))
    model = {n: b"buffer" if n % 2 else b"disk" for n in range(300) if n % 10}
    for start, stop in (
        (0, None),
        (5, 250),
        (100, 101),
        (100, 100),
        (17, 16),
        (299, None),
        (300, None),
        (0, 40),
        (7, 999),
    ):
        expected = [(key(n), v) for n, v in sorted(model.items()) if n >= start and (stop is None or n < stop)]
        limit = None if stop is None else key(stop)
        found = list(store.scan(OFFSETS, key(start), limit, reverse=reverse))
        assert found == (expected[::-1] if reverse else expected)


def test_rows_may_be_deleted_and_synced_while_they_are_scanned(store: LogStore) -> None:
    for number in range(500):
        store.put(OFFSETS, key(number), b"x")
    store.sync()
    seen = []
    for at, (row_key, _) in enumerate(store.scan(OFFSETS)):
        seen.append(row_key)
        store.delete(OFFSETS, row_key)
        if at % 100 == 50:
            store.sync()
    assert seen == [key(number) for number in range(500)]
    assert list(store.scan(OFFSETS)) == []


def test_keys_of_impossible_length(store: LogStore) -> None:
    for bad in (b"", b"k" * 512):
        with pytest.raises(InvalidInputError):
            store.put(GROUPS, bad, b"v")
        assert store.get(GROUPS, bad) is None
        store.delete(GROUPS, bad)
    assert not store.dirty
    store.put(GROUPS, b"k" * 511, b"v")
    store.sync()
    assert list(store.scan(GROUPS, b"k" * 510, b"k" * 600)) == [(b"k" * 511, b"v")]
    assert list(store.scan(GROUPS, b"", b"k" * 600, reverse=True)) == [(b"k" * 511, b"v")]
    assert list(store.scan(GROUPS, b"k" * 600)) == []
    with store.snapshot() as snapshot:
        assert snapshot.get(GROUPS, b"") is None
        assert snapshot.get(GROUPS, b"k" * 512) is None
        assert list(snapshot.scan(GROUPS, stop=b"", reverse=True)) == []


# -- checkpoints and trimming -------------------------------------------------------------


def test_trim_moves_the_base_at_once_and_frees_bit_by_bit(disk: TestDisk) -> None:
    applied_log(disk.store, 30)
    disk.store.save_checkpoint(checkpoint(10))
    disk.store.save_checkpoint(checkpoint(20))
    disk.store.save_checkpoint(checkpoint(25))
    disk.store.sync()
    assert disk.store.checkpoint is None
    assert disk.store.checkpoints() == [10, 20, 25]
    assert not disk.store.trim_to(Index(20), 8)
    assert (disk.store.base_index, disk.store.base_term) == (20, 1)
    assert disk.store.checkpoint == checkpoint(20)
    assert disk.store.checkpoints() == [20, 25]
    disk.store.sync()
    store = disk.reopen()  # goes on where it was
    assert (store.base_index, store.checkpoint, store.checkpoints()) == (20, checkpoint(20), [20, 25])
    assert not store.trim_to(Index(20), 8)
    assert store.trim_to(Index(20), 8)
    assert store.trim_to(Index(20), 8)
    store.sync()
    assert indexes(disk.reopen().entries(Index(21), 1 << 20)) == list(range(21, 31))


def test_trim_to_the_very_end_and_go_on(disk: TestDisk) -> None:
    applied_log(disk.store, 5)
    disk.store.save_checkpoint(checkpoint(5))
    assert disk.store.trim_to(Index(5), 100)  # nothing of this was synced before
    disk.store.sync()
    store = disk.reopen()
    assert (store.base_index, store.last_index, store.last_term) == (5, 5, 1)
    store.append([entry(6, term=2)])
    store.sync()
    assert disk.reopen().entries(Index(6), 100) == [entry(6, term=2)]


def test_only_a_saved_checkpoint_can_be_trimmed_to(store: LogStore) -> None:
    applied_log(store, 10)
    store.save_checkpoint(checkpoint(5))
    for index in (4, 6, 10):
        with pytest.raises(InvariantBrokenError):
            store.trim_to(Index(index), 10)
    store.trim_to(Index(5), 10)
    with pytest.raises(InvariantBrokenError):
        store.trim_to(Index(4), 10)


def test_a_checkpoint_is_of_an_applied_entry_and_its_term(store: LogStore) -> None:
    fill(store, 10)
    store.set_applied(Index(5))
    for wrong in (checkpoint(6), checkpoint(0), checkpoint(5, term=2)):
        with pytest.raises(InvariantBrokenError):
            store.save_checkpoint(wrong)
    store.save_checkpoint(checkpoint(5))
    store.save_checkpoint(checkpoint(3, state=b""))
    assert store.checkpoints() == [3, 5]


def test_install_replaces_log_and_tables(disk: TestDisk) -> None:
    store = disk.store
    applied_log(store, 30)
    for table in PARTITION.tables:
        store.put(table, b"old", b"row")
    store.save_checkpoint(checkpoint(10))
    store.set_hard(HardState(Term(4), NODE, Index(30)))
    store.sync()
    store.append([entry(31)])
    store.put(META, b"unsynced", b"row")
    store.set_hard(HardState(Term(5), NODE, Index(31)))

    new = Checkpoint(Index(100), Term(5), b"we", b"s" * 5000)
    store.install(new)
    store.put(META, b"restored", b"row")
    store.append([entry(101, term=5)])
    for _ in range(3):
        assert (store.base_index, store.base_term, store.last_index, store.applied) == (100, 5, 101, 100)
        assert (store.hard.term, store.hard.voted_for) == (5, NODE)
        assert store.checkpoint == new
        assert store.checkpoints() == [100]
        assert store.entries(Index(101), 100) == [entry(101, term=5)]
        rows = {table: list(store.scan(table)) for table in PARTITION.tables}
        assert rows.pop(MEMBERS) == [(key(100), b"we")]
        assert rows.pop(META) == [(b"restored", b"row")]
        assert not any(rows.values())
        with pytest.raises(KeyError):
            store.entry(Index(30))
        store.sync()
        store = disk.reopen()


def test_install_that_was_not_synced_changes_nothing(disk: TestDisk) -> None:
    applied_log(disk.store, 3)
    disk.store.put(META, b"a", b"b")
    disk.store.sync()
    disk.store.install(checkpoint(9))
    store = disk.reopen()
    assert (store.base_index, store.last_index, store.get(META, b"a")) == (0, 3, b"b")


# -- snapshots ------------------------------------------------------------------------------


def test_a_snapshot_sees_what_was_synced_and_nothing_later(store: LogStore) -> None:
    fill(store, 3)
    store.put(META, b"a", b"1")
    store.sync()
    fill(store, 4)
    store.put(META, b"a", b"2")
    store.put(META, b"b", b"2")
    with store.snapshot() as snapshot:
        store.sync()
        assert snapshot.entry(Index(3)) == entry(3)
        for index in (0, 4):
            with pytest.raises(KeyError):
                snapshot.entry(Index(index))
        assert snapshot.get(META, b"a") == b"1"
        assert snapshot.get(META, b"b") is None
        assert list(snapshot.scan(META)) == [(b"a", b"1")]
        with store.snapshot() as newer:
            assert newer.entry(Index(4)) == entry(4)
            assert list(newer.scan(META, reverse=True)) == [(b"b", b"2"), (b"a", b"2")]


def test_a_snapshot_does_not_see_what_was_trimmed(store: LogStore) -> None:
    applied_log(store, 10)
    store.save_checkpoint(checkpoint(5))
    store.trim_to(Index(5), 2)
    store.sync()
    with store.snapshot() as snapshot:
        assert snapshot.entry(Index(6)) == entry(6)
        for index in (2, 4, 5):
            with pytest.raises(KeyError):
                snapshot.entry(Index(index))


def test_a_snapshot_is_for_any_thread_and_ends_with_its_block(store: LogStore) -> None:
    for number in range(40):
        store.put(META, key(number), b"x")
    fill(store, 1)
    store.sync()
    found: list[int] = []

    def read() -> None:
        with store.snapshot() as snapshot:
            found.append(len(list(snapshot.scan(META))))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [40] * 4
    with store.snapshot() as snapshot:
        rows = snapshot.scan(META)
        next(rows)
    with pytest.raises(ReplicaClosedError):
        snapshot.entry(Index(1))
    with pytest.raises(ReplicaClosedError):
        snapshot.get(META, key(1))
    with pytest.raises(ReplicaClosedError):
        next(rows)


# -- the rest ---------------------------------------------------------------------------------


def test_damage_is_remembered_at_once_and_the_buffer_is_left_alone(disk: TestDisk) -> None:
    fill(disk.store, 1)
    disk.store.mark_damaged("entry 7 is wrong")
    disk.store.mark_damaged("a later reason")
    assert disk.store.dirty
    store = disk.reopen()
    assert store.damaged == "entry 7 is wrong"
    assert store.last_index == 0


def test_size_grows_with_what_was_written(store: LogStore) -> None:
    before = store.size_bytes()
    store.append([entry(1, payload=b"x" * 200_000)])
    store.sync()
    assert store.size_bytes() - before >= 200_000


def test_after_close_everything_is_refused(store: LogStore) -> None:
    fill(store, 3)
    store.sync()
    with store.snapshot():
        pass
    store.close()
    store.close()
    assert store.last_index == 3
    for use in (
        lambda: store.entry(Index(1)),
        lambda: store.entries(Index(1), 10),
        lambda: store.append([entry(4)]),
        lambda: store.truncate_from(Index(2)),
        lambda: store.set_hard(HardState(Term(1), None, Index(0))),
        lambda: store.set_applied(Index(1)),
        lambda: store.get(META, b"a"),
        lambda: next(store.scan(META)),
        lambda: store.put(META, b"a", b"b"),
        lambda: store.delete(META, b"a"),
        lambda: store.save_checkpoint(checkpoint(1)),
        lambda: store.trim_to(Index(0), 1),
        lambda: store.install(checkpoint(1)),
        lambda: store.sync(),
        lambda: store.snapshot().__enter__(),
        lambda: store.mark_damaged("why"),
        lambda: store.size_bytes(),
    ):
        with pytest.raises(ReplicaClosedError):
            use()
