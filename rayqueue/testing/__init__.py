"""For tests of what is built on RayQueue: a queue in memory, and real replicas that can be killed and paused.

``memory.connect()`` is the queue, for unit tests. ``ProcessGroup`` runs the
replicas of one partition as processes of this machine; its ``client`` reaches
them as applications do. ``faults`` is for a queue that runs on Ray. Nothing in
here is used by RayQueue itself.
"""

from __future__ import annotations

from rayqueue.testing.group import ProcessGroup, wait_for
from rayqueue.testing.load import LoadReport
from rayqueue.testing.partition_client import PartitionClient
from rayqueue.testing.usage import Usage

__all__ = ["LoadReport", "PartitionClient", "ProcessGroup", "Usage", "wait_for"]
