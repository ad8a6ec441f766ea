"""The note in a data directory of the Ray that serves it on this machine: who started it, and where it is.

`rayqueue up` leaves one for the Ray that it starts, and ``connect()`` for the
Ray that lives as long as its process. So the next program of this user that
wants the same data joins that Ray instead of starting a second one, which could
not have the data. Of several that find none at the same time, one starts a Ray
and the others wait for it (``starting``).

A note counts only while the process that it names runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rayqueue.errors import ClusterStartError, StorageError
from rayqueue.log.private import make_directory, opener

_log = logging.getLogger(__name__)

_NOTE = "ray.json"
_LOCK = "ray.lock"
_LOOK_AGAIN_S = 0.1
_SAY_AFTER_S = 2.0


class LocalRay(NamedTuple):
    pid: int
    started: str
    """When the process started, as the kernel counts: a pid alone may belong to another one by now."""
    address: str
    dashboard: str | None
    command: bool = True
    """Started by `rayqueue up`, and ended by `rayqueue down`. Otherwise it ends with the program that started it."""


def find(data_dir: Path) -> LocalRay | None:
    """The Ray that serves this directory, if it still runs."""
    path = data_dir / _NOTE
    try:
        if path.stat().st_uid != os.getuid():
            return None  # another user's, whose word we do not take
        found = LocalRay(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}", path=str(path)) from None
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}; delete it", path=str(path)) from None
    return found if process_started(found.pid) == found.started else None


def leave(data_dir: Path, found: LocalRay) -> None:
    """Whole or not at all."""
    path = data_dir / _NOTE
    new = path.with_name(f".{_NOTE}-{os.getpid()}")
    with open(new, "w", opener=opener) as file:
        json.dump(found._asdict(), file)
    new.replace(path)


def forget(data_dir: Path, pid: int) -> None:
    """The Ray that this process started is ended. Another one's note stays."""
    path = data_dir / _NOTE
    with contextlib.suppress(OSError, ValueError, TypeError):
        if LocalRay(**json.loads(path.read_text())).pid == pid:
            path.unlink()


@contextlib.contextmanager
def starting(data_dir: Path, timeout_ms: int) -> Iterator[None]:
    """One process at a time starts a Ray for this directory. The lock ends with the process that has it."""
    try:
        make_directory(data_dir)
        handle = opener(str(data_dir / _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"the data directory {data_dir} cannot be used: {error}", path=str(data_dir)) from error
    try:
        began_s, told = time.monotonic(), False
        while not _taken(handle):
            waited_s = time.monotonic() - began_s
            if waited_s > timeout_ms / 1000:
                raise ClusterStartError(
                    f"another process has been starting the queue in {data_dir} for {waited_s:.0f} s", missing=[]
                )
            if waited_s > _SAY_AFTER_S and not told:
                _log.warning("waiting for another process, which starts the queue in %s", data_dir)
                told = True
            time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def process_started(pid: int) -> str | None:
    """The start time of a process that runs; None if there is none, or only what is left of one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
