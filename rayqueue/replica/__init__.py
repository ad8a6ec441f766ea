"""A replica at work: the engine's thread, its clients, the tail, and what it tells about itself. No Ray in here."""

from __future__ import annotations

from rayqueue.replica.partition import PartitionReplica
from rayqueue.replica.replica import Answer, Deliver, Replica
from rayqueue.replica.service import Service
from rayqueue.replica.start import create_replica, open_replica, start_replica
from rayqueue.replica.status import Status

__all__ = [
    "Answer",
    "Deliver",
    "PartitionReplica",
    "Replica",
    "Service",
    "Status",
    "create_replica",
    "open_replica",
    "start_replica",
]
