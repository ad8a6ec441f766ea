"""Tending: which gateways a cluster should have, and one more for each node that joins later or comes back.

A gateway's name says on which node it is, and how many there are before it on
the node's host: its ports are so much higher. Ray starts a gateway again whose
process died, but not one whose node did. So where there is to be one on each
node, the first of them looks regularly, and starts what is missing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayqueue.actors.keeper.nodes import RayNode, alive_nodes, found_actors
from rayqueue.actors.names import GATEWAY_PREFIX
from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
_ID = 12
"""So much of a node's id is in a name."""


class Place(NamedTuple):
    """Where a gateway is to be."""

    node: RayNode
    of_host: int
    """How many others of its host have lower ports."""

    @property
    def name(self) -> str:
        return f"{GATEWAY_PREFIX}{self.node.node_id[:_ID]}-{self.of_host}"


def names(namespace: str) -> list[str]:
    return sorted(name for name in found_actors(namespace) if name.startswith(GATEWAY_PREFIX))


def there_on(nodes: Iterable[RayNode], taken: Collection[str]) -> list[Place]:
    """Those of these names that are on these nodes. One of a node that is gone is gone with it."""
    by_id = {node.node_id[:_ID]: node for node in nodes}
    found = []
    for name in sorted(taken):
        node_id, _, of_host = name.removeprefix(GATEWAY_PREFIX).rpartition("-")
        if node_id in by_id and of_host.isdigit():
            found.append(Place(by_id[node_id], int(of_host)))
    return found


def missing(nodes: Sequence[RayNode], taken: Collection[str], count: int | None) -> list[Place]:
    """What is to be started beside those that have these names: ``count`` in all, or one on each node (None)."""
    there = there_on(nodes, taken)
    on_node = Counter(place.node.node_id for place in there)
    of_host = {(place.node.host, place.of_host) for place in there}
    staying = sorted((node for node in nodes if not node.leaving), key=lambda node: node.node_id)
    if count is None:
        chosen = [node for node in staying if not on_node[node.node_id]]
    else:
        chosen = []
        for _ in range(count - len(there) if staying else 0):
            node = min(staying, key=lambda node: on_node[node.node_id])
            on_node[node.node_id] += 1
            chosen.append(node)
    places = []
    for node in chosen:
        free = next(each for each in range(len(of_host) + 1) if (node.host, each) not in of_host)
        of_host.add((node.host, free))
        places.append(Place(node, free))
    return places


def shifted(settings: GatewaySettings, of_host: int) -> GatewaySettings:
    ports = {key: getattr(settings, key) for key in ("rest_port", "grpc_port")}
    return settings.model_copy(update={key: port and port + 2 * of_host for key, port in ports.items()})


def start(rq: RayQueue, actor: type[Any], place: Place, settings: GatewaySettings, *, each_node: bool) -> None:
    """``ValueError`` if there is one of this name by now."""
    remote: Any = ray.remote(num_cpus=0)(actor)
    remote.options(
        name=place.name,
        namespace=rq.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.node.node_id, soft=False),
    ).remote(rq, settings, place.of_host, place.name if each_node else None)


class Tending:
    """In a thread of a gateway's actor, from ``start`` to ``stop``."""

    def __init__(self, rq: RayQueue, actor: type[Any], name: str, settings: GatewaySettings) -> None:
        """``settings``: as they were given, for whatever is started."""
        self._rq = rq
        self._actor = actor
        self._name = name
        self._settings = settings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rayqueue gateway tending", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Once this returns it starts nothing more."""
        self._stopping.set()
        self._thread.join(LOOK_EVERY_S)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  # whatever it is, the next look may go well
                _log.warning("gateways of other nodes cannot be looked after at the moment: %s", error)

    def _look(self) -> None:
        nodes, taken = alive_nodes(), names(self._rq.namespace)
        there = there_on(nodes, taken)
        if not there or there[0].name != self._name:
            return
        for place in missing(nodes, taken, None):
            if self._stopping.is_set():
                return
            try:
                start(self._rq, self._actor, place, self._settings, each_node=True)
            except (ValueError, RayError) as error:
                _log.info("no gateway was started on %s: %s", place.node.host, error)
            else:
                _log.info("node %s had no gateway: started %s", place.node.host, place.name)
