"""Protocol versions: both sides of a connection say the range they speak, and use the highest that is in both.

A release that changes what is said raises its highest version, and goes on
speaking the ones before for as long as docs/upgrades.md promises. No I/O.
"""

from __future__ import annotations

from typing import NamedTuple

from rayqueue.errors import IncompatibleVersionError


class Versions(NamedTuple):
    """All versions from ``lowest`` to ``highest``."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        if self.lowest == self.highest:
            return f"version {self.lowest}"
        return f"versions {self.lowest} to {self.highest}"


def agree(ours: Versions, theirs: Versions, *, us: str, them: str) -> int:
    """The version to use. ``IncompatibleVersionError`` without one; it says which side is to be upgraded.

    ``us`` and ``them`` name the two sides: "this client", "the replica".
    """
    version = min(ours.highest, theirs.highest)
    if version >= max(ours.lowest, theirs.lowest):
        return version
    older = us if ours.highest < theirs.lowest else them
    raise IncompatibleVersionError(
        f"{them} speaks {theirs} of the protocol, {us} {ours}; they have none in common: upgrade {older}",
        ours=tuple(ours),
        theirs=tuple(theirs),
        upgrade=older,
    )
