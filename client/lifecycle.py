"""Ending a cluster in good order.

First the gateways, then the coordinators, whose keeper would start again what ends; then every
partition's replicas. Each is closed, which answers all that waits, and only
then killed. Whatever is interrupted here may be done again, or undone by
connecting: the data is complete at every moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import COORDINATOR_PREFIX, GATEWAY_PREFIX, PREFIX, STARTER
from rayqueue.client.admin.readiness import Progress
from rayqueue.client.waiting import telling
from rayqueue.errors import RayQueueError

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 15.0
_ASK_TIMEOUT_S = 2.0
_LOOK_AGAIN_S = 0.02


def stop_cluster(namespace: str, on_progress: Progress | None = None) -> None:
    """Every actor of this namespace's RayQueue ends. The data stays. ``on_progress`` is told how many replicas are
    closed, of how many."""
    # The one that started the cluster has nothing to close, and may be there for some seconds yet, or not.
    names, closed = {name for name in _ours(namespace) if name != STARTER}, set[str]()

    def told(name: str) -> None:
        names.add(name)
        closed.add(name)
        if on_progress is not None:
            on_progress(len(closed), len(names))

    stop_gateways(namespace)  # while what they have under way can still be answered
    with telling(lambda: f"waiting for replicas to close: {len(closed)} of {len(names)} have"):
        _stop([name for name in _ours(namespace) if name.startswith(COORDINATOR_PREFIX)], namespace, told)
        # What the coordinators started in their last moments is found now.
        _stop(_ours(namespace), namespace, told)


def stop_gateways(namespace: str) -> None:
    """Every gateway of this namespace's RayQueue ends, drained: each within the time that its own settings say."""
    for _ in range(2):  # one that was started on a new node in the last moment is found now
        names = [name for name in found_actors(namespace) if name.startswith(GATEWAY_PREFIX)]
        if names:
            _stop(names, namespace, within_s=_longest_close_s(names, namespace))


def _longest_close_s(names: Iterable[str], namespace: str) -> float:
    asked = [ref for name in names if (ref := _closing_time(name, namespace)) is not None]
    told, _ = ray.wait(asked, num_returns=len(asked), timeout=_ASK_TIMEOUT_S) if asked else ([], [])
    longest_s = _CLOSE_TIMEOUT_S
    for ref in told:
        with suppress(RayError):
            longest_s = max(longest_s, ray.get(ref))
    return longest_s


def _closing_time(name: str, namespace: str) -> Any:
    handle = _find(name, namespace)
    asked = getattr(handle, "closes_within_s", None)  # a gateway of the release before cannot tell
    return None if asked is None else asked.remote()


def _ours(namespace: str) -> list[str]:
    return sorted(name for name in found_actors(namespace) if name.startswith(PREFIX))


def _stop(
    names: Iterable[str],
    namespace: str,
    told: Callable[[str], None] = lambda name: None,
    within_s: float = _CLOSE_TIMEOUT_S,
) -> None:
    """``told`` of each that is closed. Those that are not within so long are killed."""
    handles = {name: handle for name in names if (handle := _find(name, namespace)) is not None}
    closing: dict[Any, str] = {}
    for name, handle in handles.items():
        if name != STARTER:
            closing[handle.close.remote()] = name
    deadline_s = time.monotonic() + within_s
    while closing and time.monotonic() < deadline_s:
        for ref in ray.wait(list(closing), timeout=max(0.0, deadline_s - time.monotonic()))[0]:
            name = closing.pop(ref)
            try:
                ray.get(ref)
            except (RayError, RayQueueError) as error:
                _log.info("%s was not closed in good order: %s", name, error)
            told(name)
    for name in closing.values():
        _log.warning("%s was not closed in time", name)
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
