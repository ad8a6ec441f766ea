"""A trial: a process of its own reads all of a store's file, because whoever reads it may be ended by what is in it.

LMDB checks little of what it reads. On some pages it ends the process by an
assertion; one that the disk cannot read ends it by SIGBUS. The trial does
nothing that the store itself would not do, and changes nothing: it reads every
row of every database, and begins a write that it takes back, for the list of
free pages is read by nothing else. Whether rows are what was written is not its
question; the store and its scrub find that out, with a typed error.

``python -m rayqueue.log.trial FILE``: whoever starts it holds the directory's
lock, and looks at how it ended.
"""

from __future__ import annotations

import resource
import sys
from binascii import crc32
from contextlib import suppress
from pathlib import Path

import lmdb

from rayqueue.errors import StorageError
from rayqueue.log.lmdb_file import check_data_file

_MAX_SPACES = 64
_FREE_BYTES = 1 << 20


def main(file: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Errors have a type, and are found again by whoever opens the store.
    with suppress(OSError, StorageError, lmdb.Error):
        _read_all(file, check_data_file(file))


def _read_all(file: Path, used_bytes: int) -> None:
    env = lmdb.open(
        str(file.parent), map_size=used_bytes + 4 * _FREE_BYTES, max_dbs=_MAX_SPACES, create=False, lib_version=0
    )
    with env.begin(buffers=True) as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
    for name in names:
        with suppress(lmdb.Error):
            space = env.open_db(name, create=False)
            with env.begin(db=space, buffers=True) as txn:
                for key, row in txn.cursor():
                    crc32(row, crc32(key))
    writing = env.begin(write=True)
    try:
        # More than the free pages in a row: LMDB reads its list of them to its end.
        writing.put(b"\xfftrial", bytes(_FREE_BYTES))
    finally:
        writing.abort()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
