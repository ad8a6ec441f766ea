"""Settings of a partition that decide how it applies its log.

Every replica must apply with the same ones, or they diverge. So they are part
of the replicated state: what the constructor is given counts for a new
partition only, and is changed by ``configure_command``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from struct import Struct

from rayqueue.errors import ConfigError

_LAYOUT = Struct("<HIII")
SETTINGS_BYTES = _LAYOUT.size

_RANGES = {
    "lanes": (1, 256),
    "max_producers": (1, 1_000_000),
    "dedupe_window": (1, 1024),
    "max_groups": (1, 1_000_000),
}


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    lanes: int = 1
    """Priority levels. A batch belongs to one of them."""
    max_producers: int = 1024
    """Idempotent producers that are remembered; the one unused for longest is forgotten first."""
    dedupe_window: int = 32
    """Batches per producer whose answers are remembered: more than it ever has in flight."""
    max_groups: int = 1000
    """Consumer groups that may have offsets here."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            number = getattr(self, name)
            if not least <= number <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, not {number}", key=name)

    def encode(self) -> bytes:
        return _LAYOUT.pack(*astuple(self))

    @staticmethod
    def decode(encoded: bytes) -> PartitionSettings:
        return PartitionSettings(*_LAYOUT.unpack(encoded))
