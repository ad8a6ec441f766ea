"""The one connection that a process of Spark or Ray Data has with a cluster.

A worker process runs many tasks, so whoever asks for the same cluster again
gets the same connection. A forked child makes its own.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from rayqueue.client.connect import connect
from rayqueue.client.handle import RayQueue


@dataclass(frozen=True, slots=True)
class Where:
    """How to find a cluster from another process."""

    address: str | None
    """Of Ray's head. ``None``: the Ray that the process is in, or that ``ray.init()`` would find."""
    namespace: str | None = None


def where(rq: RayQueue) -> Where:
    """Where this connection's cluster is."""
    import ray

    rq.io  # noqa: B018  # connects, if it is a handle that came from elsewhere
    return Where(ray.get_runtime_context().gcs_address, rq.namespace)


_lock = threading.Lock()
_known: dict[Where, RayQueue] = {}


def connected(place: Where) -> RayQueue:
    """This process's connection with that cluster. ``ClusterNotFoundError`` if there is none."""
    with _lock:
        known = _known.get(place)
        if known is None:
            known = _known[place] = connect(place.address, namespace=place.namespace, create=False)
        return known


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_after_fork)
