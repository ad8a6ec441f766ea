"""Observations: what the leading coordinator's keeper has seen of the cluster lately. Memory only, some seconds old."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Pace(NamedTuple):
    """How a move gets on."""

    size_bytes: int
    copied_bytes: int
    bytes_per_s: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.size_bytes - self.copied_bytes)

    @property
    def left_ms(self) -> int | None:
        return self.left_bytes * 1000 // self.bytes_per_s if self.bytes_per_s else None


@dataclass(frozen=True, slots=True)
class Seen:
    """It decides nothing by itself: it says what is worth trying, and what is refused before it is tried."""

    leaders: Mapping[str, str] | None = None
    """Brokers by the Raft group that each leads; None before the first look."""
    paces: Mapping[str, Pace] = field(default_factory=dict)
    """Of moves, by Raft group."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """By Raft group: what should be done, and what that waits for."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a replica, by Raft group. A group that is not named was not looked at yet."""
