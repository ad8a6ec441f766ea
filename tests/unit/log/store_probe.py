"""Runs apart from the tests, because what it does may kill the process: it damages a store's file and reads it.

``python -m tests.unit.log.store_probe flips DIRECTORY SEED COUNT`` flips one random
bit at a time, ``cuts DIRECTORY`` cuts the file off at many lengths; ``wal_flips``
and ``wal_cuts`` do the same to the write-ahead file of a store that was killed
before its last small writes reached LMDB. Each case
is tried in a process of its own. The last line printed is JSON: how often the
data was right, refused (a typed error), how often LMDB ended the process, and
the cases in which something was wrong.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from random import Random

from rayqueue.errors import RayQueueError
from rayqueue.ids import Index, Term
from rayqueue.log.lmdb_file import DATA_FILE, check_data_file
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, HardState, LogStore, Snapshot, Table
from rayqueue.log.wal_file import WAL_FILE
from rayqueue.partition.tables import GROUPS, LANES, META, OFFSETS, PARTITION, PRODUCERS
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry

RIGHT, REFUSED, WRONG = 0, 10, 20
_BASE, _LAST = 40, 400
_OFFSETS = 300


class WrongError(Exception):
    """Something came back that was never written."""


@cache
def _payload(index: int) -> bytes:
    size = (20, 300, 1500, 2100, 9000)[index % 5]
    return Random(index).randbytes(size)


@cache
def _expected_entry(index: int) -> Entry:
    return entry(index, 1 + index // 100, _payload(index))


def _offset_row(number: int) -> tuple[bytes, bytes]:
    return (number * 10).to_bytes(8, "big"), b"%d of ten" % number


EXPECTED_ROWS: dict[Table, dict[bytes, bytes]] = {
    PRODUCERS: {b"producer %d" % number: b"epoch and sequence %d" % number for number in range(150)},
    GROUPS: {b"group %d" % number: b"committed %d" % (number * 7) for number in range(80)},
    MEMBERS: {(1).to_bytes(8, "big"): b"a,b,c"},
    META: {b"end": b"offset 3000", b"large": b"L" * 5000},
    OFFSETS: dict(map(_offset_row, range(_OFFSETS))),
    LANES: {},
}
EXPECTED_HARD = HardState(Term(7), NODE, Index(399))
EXPECTED_CHECKPOINT = Checkpoint(Index(_BASE), Term(1), b"a,b,c", b"s" * 3000)


_PERSISTED = 12


def build(path: Path) -> None:
    """A store with a history: many transactions, rewritten rows, a trimmed prefix, a replaced tail."""
    store = LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION)
    for table, rows in EXPECTED_ROWS.items():
        for key in rows:
            if table is not OFFSETS:
                store.put(table, key, b"an older value")
    for first in range(1, _LAST, 20):
        store.append([_expected_entry(index) for index in range(first, first + 20)])
        for number, (key, value) in enumerate(EXPECTED_ROWS[OFFSETS].items()):
            if number % 20 == first // 20:
                store.put(OFFSETS, key, value)
        store.put(META, b"end", b"at %d" % first)
        store.sync()
    for table, rows in EXPECTED_ROWS.items():
        for key, value in rows.items():
            store.put(table, key, value)
        store.sync()
    store.append([entry(_LAST + 1, 5, b"conflict" * 400)])
    store.sync()
    store.truncate_from(Index(_LAST + 1))
    store.set_applied(Index(300))
    store.save_checkpoint(EXPECTED_CHECKPOINT)
    store.trim_to(Index(_BASE), 1000)
    store.set_hard(EXPECTED_HARD)
    store.sync()
    store.close()


def persist_more(path: Path) -> None:
    """Small writes that are only in the write-ahead file when the process ends."""
    store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    for _ in range(_PERSISTED):
        index = store.last_index + 1
        store.append([entry(index, 9, _small(index))])
        store.put(META, b"end", b"offset 3000")
        store.persist()
        assert store.dirty
    store.close()


def _small(index: int) -> bytes:
    return Random(index).randbytes(1 + index * 37 % 900)


def read_everything(store: LogStore, every: int = 1) -> bool:
    """True if all of it was right, False if something was refused; ``WrongError`` if something was wrong."""
    checks: list[Callable[[], None]] = [lambda: _check_single_values(store)]
    checks += [lambda index=index: _check_entry(store, index) for index in range(_BASE + 1, _LAST + 1, every)]  # type: ignore[misc]
    checks += [lambda table=table: _check_table(store, table) for table in PARTITION.tables]  # type: ignore[misc]
    checks.append(lambda: _check_snapshot(store))
    refused = 0
    for check in checks:
        try:
            check()
        except RayQueueError:
            refused += 1
    return refused == 0


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise WrongError(f"{what}: {found!r:.200} instead of {expected!r:.200}")


def _check_single_values(store: LogStore) -> None:
    _same(store.hard, EXPECTED_HARD, "hard state")
    _same((store.base_index, store.base_term, store.applied), (_BASE, 1, 300), "base, applied")
    _same(store.checkpoint, EXPECTED_CHECKPOINT, "checkpoint")


def _check_entry(store: LogStore, index: int) -> None:
    expected = _expected_entry(index)
    _same(store.term_at(Index(index)), expected.term, f"term at {index}")
    _same(store.entry(Index(index)), expected, f"entry {index}")
    _same(store.entries(Index(index), 3000)[0], expected, f"entries from {index}")


def _check_table(store: LogStore | Snapshot, table: Table) -> None:
    expected = EXPECTED_ROWS.get(table, {})
    in_order = sorted(expected.items())
    for reverse in (False, True):
        rows = in_order[::-1] if reverse else in_order
        found = 0
        for row in store.scan(table, reverse=reverse):
            if table is OFFSETS and found < len(rows) and row in rows[found:]:
                if row != rows[found]:
                    return  # a gap, which the reader of a dense table sees
            elif found >= len(rows) or row != rows[found]:
                raise WrongError(f"{table.name} scan: {row!r:.100}")
            found += 1
        if found < len(rows) and table is not OFFSETS:
            raise WrongError(f"{table.name} scan ends after {found} of {len(rows)} rows")
    for key, value in in_order:
        stored = store.get(table, key)
        if stored is None and table is OFFSETS:
            continue  # as above
        _same(stored, value, f"{table.name} {key!r}")


def _check_snapshot(store: LogStore) -> None:
    with store.snapshot() as snapshot:
        for index in range(_BASE + 1, _LAST + 1, 7):
            try:
                _same(snapshot.entry(Index(index)), _expected_entry(index), f"snapshot's entry {index}")
            except RayQueueError:
                continue
        for table in PARTITION.tables:
            _check_table(snapshot, table)


def _go_on_writing(store: LogStore) -> None:
    """Pages that damage made look free are overwritten now."""
    for _ in range(15):
        store.append([entry(store.last_index + 1, 9, _payload(store.last_index + 1))])
        store.sync()


def attempt(path: Path, persisted: bool = False) -> int:
    try:
        store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
        if persisted:
            _check_persisted(store)
            store.truncate_from(Index(_LAST + 1))
            store.sync()
        right = read_everything(store)
        try:
            _go_on_writing(store)
        except RayQueueError:
            right = False
        right = read_everything(store, every=5) and right
        written = store.last_index if not store.dirty else 0
        store.close()
        store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
        right = read_everything(store, every=5) and right
        for index in range(_LAST + 1, written + 1):
            _same(store.entry(Index(index)).payload, _payload(index), f"new entry {index}")
        store.close()
    except RayQueueError:
        return REFUSED
    except WrongError as error:
        print(f"WRONG {path.name}: {error}", flush=True)
        return WRONG
    except BaseException:  # noqa: BLE001 - anything that is not a typed error is a finding
        traceback.print_exc(file=sys.stdout)
        return WRONG
    return RIGHT if right else REFUSED


def _check_persisted(store: LogStore) -> None:
    _same(store.last_index, _LAST + _PERSISTED, "last persisted entry")
    for index in range(_LAST + 1, _LAST + _PERSISTED + 1):
        _same(store.entry(Index(index)).payload, _small(index), f"persisted entry {index}")


def in_own_process(path: Path, persisted: bool) -> str:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(attempt(path, persisted))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return {RIGHT: "right", REFUSED: "refused"}.get(os.WEXITSTATUS(status), "wrong")


def run(directory: Path, damages: Iterable[tuple[str, Callable[[bytearray], bytearray]]], file: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    origin, image = directory / "sized", directory / "image"
    data = (origin / file).read_bytes()
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for name, damage in damages:
        shutil.rmtree(image, ignore_errors=True)
        image.mkdir()
        for other in (DATA_FILE, WAL_FILE):
            shutil.copy(origin / other, image / other)
        (image / file).write_bytes(damage(bytearray(data)))
        outcome = in_own_process(image, file == WAL_FILE)
        outcomes[outcome] += 1
        if outcome == "wrong":
            wrong.append(name)
    print(json.dumps({"file_bytes": len(data), "outcomes": outcomes, "wrong": wrong}))


def flips(size: int, seed: int, count: int) -> Iterable[tuple[str, Callable[[bytearray], bytearray]]]:
    rng = Random(seed)
    for number in range(count):
        # A quarter goes where it hurts most: into the meta pages, or among the records.
        position = rng.randrange(8 * 8192) if number % 4 == 0 else rng.randrange(8 * size)

        def damage(data: bytearray, position: int = position) -> bytearray:
            data[position // 8] ^= 1 << position % 8
            return data

        yield f"bit {position}", damage


def cuts(size: int) -> Iterable[tuple[str, Callable[[bytearray], bytearray]]]:
    for length in (
        0,
        1,
        100,
        4095,
        4096,
        4200,
        8191,
        8192,
        12288,
        size // 3,
        size // 2,
        size - 9000,
        size - 4096,
        size - 1,
    ):
        yield f"cut at {length}", lambda data, length=length: data[:length]  # type: ignore[misc]


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    build(directory / "sized")
    file = DATA_FILE
    if kind.startswith("wal_"):
        file = WAL_FILE
        persist_more(directory / "sized")
    path = directory / "sized" / file
    size = check_data_file(path) if file == DATA_FILE else path.stat().st_size  # what is behind it is allocated only
    if kind.endswith("flips"):
        run(directory, flips(size, int(sys.argv[3]), int(sys.argv[4])), file)
    else:
        run(directory, cuts(size), file)


if __name__ == "__main__":
    main()
