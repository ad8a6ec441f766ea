"""The gateways of a cluster: started on its nodes, listed, and stopped in good order."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rayqueue.actors.keeper.nodes import alive_nodes
from rayqueue.client.handle import RayQueue
from rayqueue.client.lifecycle import stop_gateways
from rayqueue.config import GatewaySettings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.gateway import tending
from rayqueue.gateway.actor import GatewayActor
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.server import check_bind, is_loopback

MAX_GATEWAYS = 256
_START_S = 60.0
_ANSWER_S = 5.0
_ASK_EVERY_S = 0.2


def start(rq: RayQueue, settings: GatewaySettings, *, count: int | None = None) -> list[dict[str, Any]]:
    """So many gateways, spread over the nodes, or one on each, also on those that join later; those that run already
    count. Where they all listen.

    The second one of a host listens two ports higher, and so on. ``ConfigError`` if one would be open to others.
    """
    if count is not None and not 0 < count <= MAX_GATEWAYS:
        raise InvalidInputError(f"1 to {MAX_GATEWAYS} gateways, not {count}")
    if not is_loopback(settings.host):
        check_bind(settings, keys=len(KeyStore(rq).ring()) > 0)
    nodes = alive_nodes()
    taken = tending.names(rq.namespace)
    there = [place.name for place in tending.there_on(nodes, taken)]
    started: list[str] = []
    try:
        for place in tending.missing(nodes, taken, count):
            with suppress(ValueError):  # another has just started it
                tending.start(rq, GatewayActor, place, settings, each_node=count is None)
                started.append(place.name)
            there.append(place.name)
        deadline_s = time.monotonic() + _START_S
        return [_started(rq, name, deadline_s) for name in sorted(there)]
    except RayQueueError:
        for name in started:  # those that cannot start would try it for ever
            ray.kill(ray.get_actor(name, rq.namespace), no_restart=True)
        raise


def _started(rq: RayQueue, name: str, deadline_s: float) -> dict[str, Any]:
    """Once it listens. What it cannot repeat, or has repeated until then, is raised."""
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return _told(rq, name, max(left_s, _ANSWER_S))
        except RayQueueError as error:
            if not error.retriable or left_s <= 0:
                raise
            time.sleep(_ASK_EVERY_S)


def running(rq: RayQueue) -> list[dict[str, Any]]:
    """Those there are; ``problem`` says why one does not answer."""
    found = []
    for name in tending.names(rq.namespace):
        try:
            found.append(_told(rq, name, _ANSWER_S))
        except (RayQueueError, RayError, ValueError) as error:
            found.append({"name": name, "problem": str(error)})
    return found


def stop(rq: RayQueue) -> int:
    """All of them, drained. How many there were."""
    names = tending.names(rq.namespace)
    stop_gateways(rq.namespace)
    return len(names)


def _told(rq: RayQueue, name: str, within_s: float) -> dict[str, Any]:
    handle: Any = ray.get_actor(name, rq.namespace)
    try:
        return {"name": name, **ray.get(handle.address.remote(), timeout=within_s)}
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RayQueueError) else error from None
