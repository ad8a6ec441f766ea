"""Makes a replica again and again, and each time dies one step later: what is found then is used, or made anew.

A step is a call into C that may touch the file system. The child dies before it, as by kill -9, and its parent then
does what a process does that Ray has started again. Prints one line of JSON: how often each outcome was seen.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from rayqueue.config import Settings
from rayqueue.errors import StoreMissingError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log import store as log_store
from rayqueue.log.lmdb_file import is_half_made
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.start import create_replica

GROUP, NODE = GroupId("orders-0"), ReplicaId("r1")
MEMBERS = ReplicaSet.of(["r1", "r2", "r3"])
SETTINGS = Settings(transport={"secret": "only for this test"})
STEPS = {"open", "open_db", "mkdir", "chmod", "fchmod", "rename", "fsync", "posix_fallocate", "truncate", "unlink"} | {
    *("rmdir", "scandir", "flock", "write", "flush", "pwrite", "pread", "begin", "commit", "put", "putmulti", "close")
}
LEFT, DIED = 0, 9


def main(directory: Path) -> None:
    outcomes: Counter[str] = Counter()
    steps = 0
    finished = False
    while not finished:
        path = directory / str(steps) / "orders-0" / "r1"
        finished = _die_at(steps, path)
        outcomes[_start_again(path)] += 1
        shutil.rmtree(directory / str(steps))
        steps += 1
    sys.stdout.write(json.dumps({"steps": steps, **outcomes}) + "\n")


def _die_at(step: int, path: Path) -> bool:
    """True if the child was done before that step came."""
    child = os.fork()
    if child == 0:
        left = step

        def profile(frame: FrameType, event: str, called: Any) -> None:
            nonlocal left
            if event == "c_call" and getattr(called, "__name__", "") in STEPS:
                if left == 0:
                    os._exit(DIED)
                left -= 1

        sys.setprofile(profile)
        create_replica(path, GROUP, NODE, MEMBERS, SETTINGS)
        os._exit(LEFT)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == LEFT


def _start_again(path: Path) -> str:
    """What ``actors.member`` does in a restart, and then what the keeper does."""
    found = "complete"
    if not path.exists():
        found = "half made" if is_half_made(path) else "nothing"
        try:
            LmdbStore.open(path, GROUP, NODE)
            raise AssertionError("a store that has no name was opened")
        except StoreMissingError:
            create_replica(path, GROUP, NODE, MEMBERS, SETTINGS)
    store = LmdbStore.open(path, GROUP, NODE)
    rows = [ReplicaSet.decode(row) for _, row in store.scan(log_store.MEMBERS)]
    assert rows == [MEMBERS], f"{found}, with the members {rows}"
    store.close()
    assert not is_half_made(path)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
