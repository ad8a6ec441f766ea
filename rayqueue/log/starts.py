"""The starts of a store that had no clean end, in a tiny file beside its directory.

A process that LMDB ends (an assertion on a damaged page, a page that cannot be
read) leaves no error, and neither does its successor, which meets the same page.
What is left is that starts without an end follow each other. And one that ends
because its disk refused a write says so here, before it ends: its successor may
well start.

A line per start, the newest last: when it was, by the clock of whoever
starts it, and the failure, if one was noted. A clean end takes the file away.
It is never synced: it is about processes that end, not about machines. If it cannot
be written or read, nothing is known of earlier starts.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rayqueue.log.private import opener

_SUFFIX = ".starts"
_KEPT = 16
_MAX_FAILURE = 500


class Start(NamedTuple):
    at_ms: int
    failure: str = ""
    """What its disk refused; "" if it is not known how it ended."""


def starts_path(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)


def read_starts(directory: Path) -> list[Start]:
    """The oldest first."""
    try:
        lines = starts_path(directory).read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = (line.partition(" ") for line in lines)
    return [Start(int(at), failure) for at, _, failure in found if at.isascii() and at.isdigit() and len(at) < 20]


def note_start(directory: Path, now_ms: int) -> None:
    _write(directory, [*read_starts(directory), Start(now_ms)])


def note_failure(directory: Path, why: str) -> None:
    """The start that is under way ends because of this."""
    known = read_starts(directory)
    if known:
        _write(directory, [*known[:-1], Start(known[-1].at_ms, " ".join(why.split())[:_MAX_FAILURE])])


def forget_starts(directory: Path) -> None:
    with suppress(OSError):
        starts_path(directory).unlink()


def _write(directory: Path, starts: list[Start]) -> None:
    text = "".join(f"{each.at_ms} {each.failure}\n" for each in starts[-_KEPT:])
    with suppress(OSError), open(starts_path(directory), "w", opener=opener) as file:
        file.write(text)
