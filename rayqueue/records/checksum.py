"""crc32c, at hardware speed, and what exactly it covers in a log entry."""

from __future__ import annotations

from struct import Struct

from crc32c import crc32c

_POSITION = Struct("<QQ")


def entry_crc(index: int, term: int, payload: bytes | memoryview) -> int:
    """Checksum of a log entry. Covers its position too: the right bytes in the wrong place are wrong."""
    return crc32c(payload, crc32c(_POSITION.pack(index, term)))


__all__ = ["crc32c", "entry_crc"]
