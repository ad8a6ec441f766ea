"""The gateway's actor: a gateway in a process of the Ray cluster, kept alive by Ray.

It runs in a thread with an event loop of its own; Ray's calls only ask where it
listens, and end it. Restarted by Ray, it is another gateway at the same ports.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings
from rayqueue.errors import RayQueueError
from rayqueue.gateway.server import GatewayThread, stops_within_s

_log = logging.getLogger(__name__)


class GatewayActor:
    """``rayqueue.gateway.fleet`` makes actors of it."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings) -> None:
        self._settings = settings
        self._thread = GatewayThread(rq, settings)
        self._problem: RayQueueError | None = None
        try:
            self._gateway: Any = self._thread.start()
        except RayQueueError as error:
            _log.critical("cannot start: %s", error)
            self._problem = error

    def __repr__(self) -> str:
        return "gateway"

    def address(self) -> dict[str, Any]:
        """Where it listens. Raises what has kept it from that."""
        if self._problem is not None:
            raise self._problem
        return {**self._gateway.address, "pid": os.getpid()}

    def closes_within_s(self) -> float:
        """How long ``close`` takes at most, by this gateway's own settings."""
        return stops_within_s(self._settings)

    def close(self) -> None:
        """No new requests; those under way are answered, sessions leave their groups."""
        self._thread.stop()
