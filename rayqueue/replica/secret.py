"""The cluster's secret, as bytes, for those who cannot do without it."""

from __future__ import annotations

from rayqueue.config import Settings
from rayqueue.errors import ConfigError


def secret_of(settings: Settings) -> bytes:
    """``ConfigError`` if there is none."""
    secret = settings.transport.secret
    if secret is None:
        raise ConfigError("replicas share a secret: set transport.secret, the same for all of them")
    return secret.get_secret_value().encode()
