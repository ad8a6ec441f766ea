"""The gateways of a cluster: started on its nodes, listed, and stopped in good order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayqueue.actors.keeper.nodes import RayNode, alive_nodes, found_actors
from rayqueue.actors.names import GATEWAY_PREFIX
from rayqueue.client.handle import RayQueue
from rayqueue.client.lifecycle import stop_gateways
from rayqueue.config import GatewaySettings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.gateway.actor import GatewayActor
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.server import check_bind, is_loopback

_log = logging.getLogger(__name__)

MAX_GATEWAYS = 256
_START_S = 60.0
_ANSWER_S = 5.0


def start(rq: RayQueue, settings: GatewaySettings, *, count: int | None = None) -> list[dict[str, Any]]:
    """So many gateways, spread over the nodes, or one on each; those that run already count. Where they all listen.

    The second one of a host listens two ports higher, and so on. ``ConfigError`` if one would be open to others.
    """
    if count is not None and not 0 < count <= MAX_GATEWAYS:
        raise InvalidInputError(f"1 to {MAX_GATEWAYS} gateways, not {count}")
    if not is_loopback(settings.host):
        check_bind(settings, keys=len(KeyStore(rq).ring()) > 0)
    there = set(_names(rq.namespace))
    started: list[str] = []
    try:
        for name, node, of_host in _places(alive_nodes(), count):
            if name not in there:
                _start(rq, name, node, _shifted(settings, of_host))
                started.append(name)
        return [_told(rq, name, _START_S) for name in sorted({*there, *started})]
    except RayQueueError:
        for name in started:  # those that cannot start would be started again for ever
            ray.kill(ray.get_actor(name, rq.namespace), no_restart=True)
        raise


def running(rq: RayQueue) -> list[dict[str, Any]]:
    """Those there are; ``problem`` says why one does not answer."""
    found = []
    for name in _names(rq.namespace):
        try:
            found.append(_told(rq, name, _ANSWER_S))
        except (RayQueueError, RayError, ValueError) as error:
            found.append({"name": name, "problem": str(error)})
    return found


def stop(rq: RayQueue) -> int:
    """All of them, drained. How many there were."""
    names = _names(rq.namespace)
    stop_gateways(rq.namespace)
    return len(names)


def _names(namespace: str) -> list[str]:
    return sorted(name for name in found_actors(namespace) if name.startswith(GATEWAY_PREFIX))


def _places(nodes: Sequence[RayNode], count: int | None) -> list[tuple[str, RayNode, int]]:
    """Name, node, and how many of its host there are before it."""
    ordered = sorted(nodes, key=lambda node: node.node_id)
    on_node: Counter[str] = Counter()
    on_host: Counter[str] = Counter()
    places = []
    for number in range(count or len(ordered)):
        node = ordered[number % len(ordered)]
        name = f"{GATEWAY_PREFIX}{node.node_id[:12]}-{on_node[node.node_id]}"
        places.append((name, node, on_host[node.host]))
        on_node[node.node_id] += 1
        on_host[node.host] += 1
    return places


def _shifted(settings: GatewaySettings, of_host: int) -> GatewaySettings:
    ports = {key: getattr(settings, key) for key in ("rest_port", "grpc_port")}
    return settings.model_copy(update={key: port and port + 2 * of_host for key, port in ports.items()})


def _start(rq: RayQueue, name: str, node: RayNode, settings: GatewaySettings) -> None:
    remote: Any = ray.remote(num_cpus=0)(GatewayActor)
    remote.options(
        name=name,
        namespace=rq.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
    ).remote(rq, settings)


def _told(rq: RayQueue, name: str, within_s: float) -> dict[str, Any]:
    handle: Any = ray.get_actor(name, rq.namespace)
    try:
        return {"name": name, **ray.get(handle.address.remote(), timeout=within_s)}
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RayQueueError) else error from None
