"""One partition's replicas as Ray actors, started and called by Ray alone: no coordinator, no client's sockets.

For tests and benchmarks of the actors themselves. Applications use
``rayqueue.connect()``, whose data goes over the sockets that these actors hand
out (``docs/adr/0011``).
"""

from rayqueue.testing.ray_group.group import ReplicaGroup

__all__ = ["ReplicaGroup"]
