"""The look at a store before it is opened: how its last starts have ended (``rayqueue.log.starts``).

- Several within ten minutes without a clean end, or many in a row however long each took (the scrub may need hours
  to come to a page that ends the process): the store is first read in a process of its own (``rayqueue.log.trial``).
  If LMDB or the disk ends that one, the store is marked as damaged and never opened again. That something else killed
  its processes, such as a lack of memory, says nothing of the store: the trial then ends well, and they are forgotten.
- Several that ended because the disk refused what had to be written: the store is not opened for a while. A
  disk that can be read and not written is of no use to a replica, and a process that starts and ends every second
  helps nobody.

The actor reports both (``rayqueue.actors.base``), so that the replica is replaced.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

from rayqueue.errors import DamagedLogError, StorageError
from rayqueue.log.lmdb_file import DATA_FILE, write_unreadable
from rayqueue.log.starts import forget_starts, note_start, read_starts

_log = logging.getLogger(__name__)

WINDOW_MS = 600_000
FEW, MANY = 3, 8
"""Starts without a clean end: within the window, and in all."""

_TRIAL_S, _TRIAL_BYTES_PER_S = 30.0, 50_000_000
_FATAL = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from rayqueue.log import trial; trial.main(trial.Path(sys.argv[1]))"


def look_at_starts(path: Path, now_ms: int) -> None:
    """While nobody else can open the store. ``StorageError`` with ``reason="disk"``, or ``DamagedLogError``, if it is
    not to be opened; else this start is noted."""
    known = read_starts(path)
    recent = [each for each in known if 0 <= now_ms - each.at_ms < WINDOW_MS]
    failures = [each.failure for each in recent if each.failure]
    if len(failures) >= FEW:
        raise StorageError(
            f"{len(failures)} processes ended within {WINDOW_MS // 60_000} minutes, because the disk refused to be "
            f"written: {failures[-1]}",
            path=str(path),
            reason="disk",
        )
    if len(recent) >= FEW or len(known) >= MANY:
        _log.warning("%s: its last %d starts had no clean end; all of it is read, beside, at first", path, len(known))
        why = try_to_read(path)
        if why is not None:
            _mark(path, f"whoever reads the store is ended by it: {why}")
        forget_starts(path)
    note_start(path, now_ms)


def try_to_read(path: Path, timeout_s: float | None = None) -> str | None:
    """How LMDB or the disk ended a process that read all of the store; None if they did not. Takes 30 s and the time in
    which a slow disk is read, at most: then nothing is known."""
    file = path / DATA_FILE
    if timeout_s is None:
        timeout_s = _TRIAL_S + file.stat().st_size / _TRIAL_BYTES_PER_S
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(file), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        _log.warning("%s could not be tried: %s", path, error)
        return None
    if -done.returncode not in _FATAL:
        return None
    told = done.stderr.decode(errors="replace").strip().splitlines()
    return ": ".join([signal.Signals(-done.returncode).name, *told[-1:]])


def _mark(path: Path, why: str) -> None:
    _log.critical("%s is damaged and must be rebuilt: %s", path, why)
    try:
        write_unreadable(path, why)
    except StorageError as error:
        _log.error("%s could not be marked, and will be tried again: %s", path, error)
    else:
        forget_starts(path)
    raise DamagedLogError(why, path=str(path))
