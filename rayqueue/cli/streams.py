"""The command's own standard streams, kept apart from Ray's.

Ray writes into whatever process is connected with it: Python's prints, C++
warnings, stacks at a signal. A command's standard output is data and its
standard error is the command's own words, so before it connects, ``claim``
moves the two real streams to descriptors that only this module knows, and
points 1 and 2 (and ``sys.stdout``, ``sys.stderr``) at a temporary file. What
Ray said is shown if the command fails in a way that nobody foresaw, and kept in
the file that _RAYQUEUE_RAY_LOG names, if it does: a process that crashed
shows nothing.

Nothing is claimed unless ``main`` has allowed it: in a test, or in somebody
else's program, the streams are not ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, TextIO, cast

KEPT_AT = "_RAYQUEUE_RAY_LOG"

_SHOWN_BYTES = 4000

_allowed = False
_own: tuple[TextIO, TextIO] | None = None
_said: IO[str] | None = None


def allow() -> None:
    """This process is the command."""
    global _allowed
    _allowed = True


def claim() -> None:
    """Take the streams. Once; later calls change nothing."""
    global _own, _said
    if not _allowed or _own is not None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    _own = (_copy(1), _copy(2))
    kept = os.environ.get(KEPT_AT)
    if kept:
        _said = Path(kept).open("w+", buffering=1, errors="replace")  # noqa: SIM115
    else:
        _said = tempfile.TemporaryFile("w+", buffering=1, errors="replace", prefix="rayqueue-ray-")  # noqa: SIM115
    for standard in (1, 2):
        os.dup2(_said.fileno(), standard)
    sys.stdout = sys.stderr = cast("TextIO", _said)
    warnings = logging.StreamHandler(_own[1])
    warnings.setFormatter(logging.Formatter("rayqueue: %(message)s"))
    logging.getLogger("rayqueue").addHandler(warnings)
    logging.getLogger("rayqueue").propagate = False


def stdout() -> TextIO:
    """The stream for data."""
    return sys.stdout if _own is None else _own[0]


def stderr() -> TextIO:
    """The stream for words to people that are not data."""
    return sys.stderr if _own is None else _own[1]


def flush() -> None:
    """Write out all that is buffered, unless nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr, stdout(), stderr()):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def last_words() -> str:
    """The end of what Ray said, for an error that nobody foresaw."""
    if _said is None:
        return ""
    _said.flush()
    size_bytes = os.fstat(_said.fileno()).st_size
    return os.pread(_said.fileno(), _SHOWN_BYTES, max(0, size_bytes - _SHOWN_BYTES)).decode(errors="replace")


def _copy(standard: int) -> TextIO:
    return os.fdopen(os.dup(standard), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
