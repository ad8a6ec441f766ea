"""A batch on its way into a partition: its bytes, and what the writer knows of it.

This one goes as it comes. It is never numbered again and never cut: a bridge's,
whose numbers follow from what it copies, or one without a producer at all. The
producer's (``rayqueue.client.producer.batch``) is numbered by its writer, and cut
where a partition has room for a part of it only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayqueue.protocol.data import Appended


@dataclass(eq=False, slots=True)
class Outgoing:
    """An encoded batch of ``count`` records."""

    payload: bytes | None = None
    """None until it is encoded."""
    count: int = 0
    """Of an encoded batch."""
    deadline_s: float = 0.0
    size_bytes: int = 0
    # The writer's.
    sequence: int = -1
    attempt: int = 0
    """The last one, unless it was given up."""
    maybe_written: bool = False
    """By an attempt whose outcome is unknown."""
    answer: Appended | None = None
    """Of a batch without a number that waits for those before it."""
    settled: bool = False
    """Acknowledged, or refused for good: it is not sent again."""
    reported: bool = False
    """Whoever waits for it was told."""

    def __post_init__(self) -> None:
        if self.payload is not None and not self.size_bytes:
            self.size_bytes = len(self.payload)

    def __len__(self) -> int:
        return self.count

    def stamp(self, producer_id: int, sequence: int, epoch: int) -> None:
        """Number it."""

    def least(self) -> tuple[int, int]:
        """The fewest records and bytes of it that can go alone."""
        return self.count, len(self.encoded)

    def cut(self, records: int, size_bytes: int) -> tuple[Outgoing, Outgoing] | None:
        """As much of it as fits into this, and the rest. None if nothing fits, or all does, or it cannot be cut."""
        return None

    @property
    def encoded(self) -> bytes:
        assert self.payload is not None  # noqa: S101  # stamped before
        return self.payload
