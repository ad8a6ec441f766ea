"""Every limit and time of the TCP transport, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from rayqueue.errors import ConfigError
from rayqueue.raft.handshake import MAX_HANDSHAKE_BYTES


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """Limits and times. ``max_frame_bytes`` must be the same, or larger, at whoever receives."""

    max_frame_bytes: int = 64 * 1024 * 1024
    send_queue_bytes: int = 16 * 1024 * 1024
    """Per peer. One message is taken whatever its size if nothing is queued: it could never be sent otherwise."""
    read_buffer_bytes: int = 512 * 1024
    read_budget_bytes: int = 8 * 1024 * 1024
    """Per peer and poll, so that one busy peer cannot hold up the others or fill the memory."""
    socket_buffer_bytes: int = 0
    """0 leaves it to the kernel, which starts small and adapts."""
    handshake_timeout_s: float = 3.0
    max_unauthenticated: int = 64
    """Accepted connections that have proven nothing yet. One more, and the oldest is closed."""
    max_unnamed_peers: int = 16
    """Connected peers that hold the secret but were not named by ``set_peers``."""
    redial_min_s: float = 0.05
    redial_max_s: float = 2.0
    stable_s: float = 1.0
    """A connection that stood this long resets the back-off; one that broke sooner does not."""
    peer_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for key in (
            "max_frame_bytes", "send_queue_bytes", "read_buffer_bytes", "read_budget_bytes", "handshake_timeout_s",
            "max_unauthenticated", "redial_min_s", "peer_timeout_s",
        ):  # fmt: skip
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be positive", key=key)
        for key in ("socket_buffer_bytes", "max_unnamed_peers", "stable_s"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} must not be negative", key=key)
        if self.redial_max_s < self.redial_min_s:
            raise ConfigError("redial_max_s must not be less than redial_min_s", key="redial_max_s")
        # The length field has 32 bits; and the handshake's last read may bring the first frames along.
        if self.max_frame_bytes >= 2**32 or self.read_buffer_bytes < MAX_HANDSHAKE_BYTES:
            raise ConfigError("max_frame_bytes is too large or read_buffer_bytes too small", key="max_frame_bytes")
