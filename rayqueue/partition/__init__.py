"""The partition state machine: append, dedupe, trim, group offsets; and how to read it.

``machine.py`` applies the log, ``admission.py`` guards its entrance on the
leader, ``reader.py`` reads it from snapshots. No clocks, no I/O but the store.
"""

from __future__ import annotations

from rayqueue.partition.admission import Admission, AdmissionLimits
from rayqueue.partition.answers import Appended, Committed, Configured, Deleted, Fenced, Trimmed
from rayqueue.partition.commands import (
    commit_command,
    configure_command,
    delete_group_command,
    fence_command,
    trim_command,
)
from rayqueue.partition.groups import Group
from rayqueue.partition.machine import Partition
from rayqueue.partition.reader import Bounds, Fetched, bounds, offset_for_time, read, retention_point
from rayqueue.partition.settings import PartitionSettings

__all__ = [
    "Admission",
    "AdmissionLimits",
    "Appended",
    "Bounds",
    "Committed",
    "Configured",
    "Deleted",
    "Fenced",
    "Fetched",
    "Group",
    "Partition",
    "PartitionSettings",
    "Trimmed",
    "bounds",
    "commit_command",
    "configure_command",
    "delete_group_command",
    "fence_command",
    "offset_for_time",
    "read",
    "retention_point",
    "trim_command",
]
