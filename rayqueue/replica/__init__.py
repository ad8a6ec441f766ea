"""A replica at work: the engine's thread, the tail, and what it tells about itself. No Ray in here."""

from __future__ import annotations

from rayqueue.replica.replica import Answer, Replica
from rayqueue.replica.start import create_replica, start_replica
from rayqueue.replica.status import Status

__all__ = ["Answer", "Replica", "Status", "create_replica", "start_replica"]
