"""For tests of what is built on RayQueue: real replicas that can be killed, paused and restarted.

``ProcessGroup`` runs the replicas of one partition as processes of this
machine. Nothing in here is used by RayQueue itself.
"""

from __future__ import annotations

from rayqueue.testing.group import ProcessGroup, wait_for
from rayqueue.testing.load import LoadReport, Usage

__all__ = ["LoadReport", "ProcessGroup", "Usage", "wait_for"]
