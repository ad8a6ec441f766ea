"""Ending a cluster in good order.

First the coordinators, whose keeper would start again what ends; then every
partition's replicas. Each is closed, which answers all that waits, and only
then killed. Whatever is interrupted here may be done again, or undone by
connecting: the data is complete at every moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from rayqueue.actors.names import COORDINATOR_PREFIX, PREFIX
from rayqueue.actors.nodes import found_actors
from rayqueue.errors import RayQueueError

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 15.0
_LOOK_AGAIN_S = 0.02


def stop_cluster(namespace: str) -> None:
    """Every actor of this namespace's RayQueue ends. The data stays."""
    names = sorted(name for name in found_actors(namespace) if name.startswith(PREFIX))
    coordinators = [name for name in names if name.startswith(COORDINATOR_PREFIX)]
    _stop(coordinators, namespace)
    # What the coordinators started in their last moments is found now.
    _stop(sorted(name for name in found_actors(namespace) if name.startswith(PREFIX)), namespace)


def _stop(names: Iterable[str], namespace: str) -> None:
    handles = {name: handle for name in names if (handle := _find(name, namespace)) is not None}
    closing: dict[Any, str] = {}
    for name, handle in handles.items():
        if hasattr(handle, "close"):
            closing[handle.close.remote()] = name
    if closing:
        ended, late = ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for ref in late:
            _log.warning("%s was not closed in time", closing[ref])
        for ref in ended:
            try:
                ray.get(ref)
            except (RayError, RayQueueError) as error:
                _log.info("%s was not closed in good order: %s", closing[ref], error)
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
    deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
    # Ray forgets the names a little later, and until then refuses them to others.
    while handles.keys() & found_actors(namespace) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_AGAIN_S)


def _find(name: str, namespace: str) -> Any:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None
