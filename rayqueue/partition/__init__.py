"""The partition state machine: append, dedupe, trim, group offsets; and how to read it.

``machine.py`` applies the log, ``admission.py`` guards its entrance on the
leader, ``reader.py`` reads it from snapshots, ``retention.py`` says what of it
may go, ``backlog.py`` how much of it its groups have still to read, ``clock.py``
what time the log has told. No clock of its own, no I/O but the store.
"""

from __future__ import annotations

from rayqueue.partition.admission import Admission, AdmissionLimits
from rayqueue.partition.answers import (
    Appended,
    Committed,
    Configured,
    Deleted,
    Ended,
    Expired,
    Fenced,
    Pinned,
    Staged,
    TimePassed,
    Trimmed,
)
from rayqueue.partition.backlog import Backlog
from rayqueue.partition.commands import (
    commit_command,
    configure_command,
    delete_group_command,
    expire_groups_command,
    fence_command,
    forget_group_command,
    pass_time_command,
    pin_command,
    trim_command,
)
from rayqueue.partition.groups import Group
from rayqueue.partition.machine import Partition
from rayqueue.partition.reader import CommittedRead, Fetched, offset_for_time, read, read_committed, read_lanes
from rayqueue.partition.retention import retention_point
from rayqueue.partition.rows import Bounds, bounds
from rayqueue.partition.settings import PartitionSettings

__all__ = [
    "Admission",
    "AdmissionLimits",
    "Appended",
    "Backlog",
    "Bounds",
    "Committed",
    "CommittedRead",
    "Configured",
    "Deleted",
    "Ended",
    "Expired",
    "Fenced",
    "Fetched",
    "Group",
    "Partition",
    "PartitionSettings",
    "Pinned",
    "Staged",
    "TimePassed",
    "Trimmed",
    "bounds",
    "commit_command",
    "configure_command",
    "delete_group_command",
    "expire_groups_command",
    "fence_command",
    "forget_group_command",
    "offset_for_time",
    "pass_time_command",
    "pin_command",
    "read",
    "read_committed",
    "read_lanes",
    "retention_point",
    "trim_command",
]
