"""Answers of applied entries that are not errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rayqueue.ids import Offset
from rayqueue.protocol.calls import Position


class Appended(NamedTuple):
    """The batch is in the log, from this offset on. A named tuple, for one is made per batch."""

    base_offset: Offset
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    duplicate: bool
    """It was written by an earlier attempt; this is that attempt's answer."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    start_offset: Offset


@dataclass(frozen=True, slots=True)
class Committed:
    """The group's position now, lane by lane."""

    generation: int
    offsets: Mapping[int, Offset]
    metadata: bytes = b""
    pinned: bool = False

    def position(self) -> Position:
        """The same, as a client is told."""
        return Position(self.generation, dict(self.offsets), self.metadata, self.pinned)


@dataclass(frozen=True, slots=True)
class Pinned:
    """Whether the group holds the log from now on."""

    pinned: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    existed: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """The producer's epoch from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The partition's time."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Expired:
    """Groups whose positions are gone."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Configured:
    """The settings are in force from the next entry on."""


@dataclass(frozen=True, slots=True)
class Staged:
    """It counts once its transaction is committed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A transaction is over here."""

    was_open: bool
