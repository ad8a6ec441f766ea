"""Starting a cluster where none runs: a new one, or the one whose data is there.

Only the coordinator is started here. Its keeper then starts everything else.

A new cluster is first written down on every node (``home.ClusterManifest``),
then made, then marked as complete. So whoever starts it again after everything
has stopped knows from any of its nodes where the coordinator's replicas live,
waits for a majority of them, and never makes a second cluster over the first.

``StarterActor`` has a name, so that of all who connect at the same time only one
starts the cluster.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from pydantic import SecretStr
from ray.exceptions import RayError

from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.keeper import home, nodes
from rayqueue.actors.keeper.home import ClusterManifest, Home
from rayqueue.actors.keeper.nodes import RayNode
from rayqueue.actors.names import COORDINATOR_PREFIX, actor_name
from rayqueue.actors.start import start_coordinator
from rayqueue.cluster.growth import coordinators_for
from rayqueue.config import Settings
from rayqueue.errors import ClusterStartError, RayQueueError, StorageError
from rayqueue.ids import COORDINATOR, ReplicaId

_log = logging.getLogger(__name__)

LOOK_S = 60.0
"""How long the nodes of a Ray that has just started may take to run their first task."""

_UNUSED_S = 60.0
_LINGER_S = 2.0
_SETTLE_S = 20.0
_LOOK_AGAIN_S = 0.2
_ENDING_S = 3.0
_ASK_S = 2.0
_ASK_AGAIN_S = 0.02


@ray.remote(num_cpus=0, max_restarts=0)
class StarterActor:
    """Detached, so that it outlives the one who made it, whom others may wait for; it ends when nobody wants it.

    Not by Ray's count of references: with two drivers that make and drop it at the same time, each new one was
    cancelled before it ran, again and again.
    """

    def __init__(self) -> None:
        self._end = self._end_after(_UNUSED_S)

    def start(self, settings: Settings) -> RayQueueError | None:
        self._end.cancel()
        try:
            start_cluster(settings)
        except RayQueueError as error:
            return error
        finally:
            self._end = self._end_after(_LINGER_S)
        return None

    @staticmethod
    def _end_after(seconds: float) -> threading.Timer:
        # Ray's own way to end an actor, after what waits for it: a process that just exits is reported as a failure.
        terminate = ray.get_runtime_context().current_actor.__ray_terminate__
        timer = threading.Timer(seconds, terminate.remote)
        timer.daemon = True
        timer.start()
        return timer


def start_cluster(settings: Settings) -> None:
    """Returns once a coordinator leads. ``ClusterStartError`` names what was missing for too long."""
    homes = _unused_homes(settings)
    deadline_s = time.monotonic() + settings.cluster.start_timeout_ms / 1000
    cluster = known_cluster(homes.values())
    secret = settings.transport.secret or next((each.secret for each in homes.values() if each.secret), None)
    settings = home.using_secret(settings, secret or home.new_secret())
    if cluster is None:
        cluster = new_cluster(list(homes.values()), settings.cluster.coordinators, f"cluster-{uuid.uuid4().hex[:12]}")
        _log.info("new cluster %s, coordinator on %s", cluster.cluster_id, ", ".join(cluster.coordinators.values()))
    if not cluster.complete:
        _settle(settings, homes.values(), cluster)
    homes = _wait_for_majority(settings, cluster, homes, deadline_s)
    started: dict[ReplicaId, Any] = {}
    found: dict[ReplicaId, Any] = {}
    try:
        _start_coordinators(settings, cluster, homes, started, found)
        _wait_until_led(started | found, cluster, deadline_s)
    except BaseException:
        for handle in started.values():  # nobody would use them, and whoever tries again starts his own
            ray.kill(handle, no_restart=True)
        raise
    if not cluster.complete:
        complete = ClusterManifest(cluster.cluster_id, cluster.coordinators, complete=True)
        _settle(settings, homes.values(), complete)


def known_cluster(homes: Iterable[Home]) -> ClusterManifest | None:
    """The one that these nodes belong to. ``StorageError`` if they belong to several."""
    found: dict[str, ClusterManifest] = {}
    where: dict[str, list[str]] = {}
    for each in sorted(homes, key=lambda each: each.broker):
        if each.cluster is not None:
            known = found.get(each.cluster.cluster_id)
            if known is None or home.newness(each.cluster) > home.newness(known):
                found[each.cluster.cluster_id] = each.cluster
            where.setdefault(each.cluster.cluster_id, []).append(each.broker)
    if len(found) > 1:
        told = "; ".join(f"{cluster_id} on {', '.join(brokers)}" for cluster_id, brokers in where.items())
        raise StorageError(f"the data directories belong to different clusters: {told}", clusters=where)
    return next(iter(found.values()), None)


def new_cluster(homes: Sequence[Home], coordinators: int, cluster_id: str) -> ClusterManifest:
    """The places of a new cluster's coordinators: on different hosts, as far as there are any."""
    count = coordinators_for(len(homes), coordinators)
    chosen: list[Home] = []
    left = sorted(homes, key=lambda each: (-each.free_bytes // (1 << 30), each.broker))
    while len(chosen) < count:
        hosts = [each.host for each in chosen]
        best = min(left, key=lambda each: hosts.count(each.host))
        left.remove(best)
        chosen.append(best)
    return ClusterManifest(
        cluster_id, {ReplicaId(f"c{number}"): each.broker for number, each in enumerate(chosen, 1)}, complete=False
    )


def _homes(settings: Settings, deadline_s: float) -> dict[str, Home]:
    """Every node of this Ray that answers, by broker. ``StorageError`` if somebody else has the data open."""
    starting = not any(name.startswith(COORDINATOR_PREFIX) for name in nodes.found_actors(settings.namespace))
    asked: dict[Any, RayNode] = {
        nodes.look_at(node, settings.data_dir, starting=starting): node for node in nodes.alive_nodes()
    }
    patience_s = max(0.1, deadline_s - time.monotonic())
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=patience_s / 2)
    if not ready:
        ready, late = ray.wait(list(asked), timeout=patience_s / 2)
    for ref in late:
        _log.warning("node %s at %s does not answer", asked[ref].node_id, asked[ref].host)
    homes: dict[str, Home] = {}
    errors: list[RayQueueError] = []
    for ref in ready:
        try:
            told: Home | RayQueueError = ray.get(ref)
        except RayError as error:
            _log.warning("node %s at %s cannot be asked: %s", asked[ref].node_id, asked[ref].host, error)
            continue
        if isinstance(told, RayQueueError):
            if told.details.get("reason") == "locked":
                raise told
            _log.error("%s", told)
            errors.append(told)
        elif told.broker in homes:
            _log.warning("%s", home.same_broker(told.broker, homes[told.broker].ray_node, told.ray_node))
        else:
            homes[told.broker] = told
    if not homes:
        raise errors[0] if errors else ClusterStartError("no node of this Ray answers", missing=[])
    return homes


def _unused_homes(settings: Settings) -> dict[str, Home]:
    """``StorageError`` if another Ray's replicas, or another namespace's, have the data open.

    Those of a Ray that was ended a moment ago may: they have a few seconds to be gone.
    """
    deadline_s: float | None = None
    while True:
        try:
            return _homes(settings, time.monotonic() + LOOK_S)
        except StorageError as error:
            if error.details.get("reason") != "locked":
                raise
            if deadline_s is None:
                _log.warning("waiting %.0f s for its end: %s", _ENDING_S, error)
                deadline_s = time.monotonic() + _ENDING_S
            elif time.monotonic() > deadline_s:
                raise
        time.sleep(_LOOK_AGAIN_S)


def _wait_for_majority(
    settings: Settings, cluster: ClusterManifest, homes: dict[str, Home], deadline_s: float
) -> dict[str, Home]:
    """Until enough nodes that have replicas of the coordinator are there; all of them, if they are to be made."""
    wanted = cluster.coordinators
    needed = len(wanted) // 2 + 1 if cluster.complete else len(wanted)
    while sum(broker in homes for broker in wanted.values()) < needed:
        if time.monotonic() > deadline_s:
            missing = sorted(broker for broker in wanted.values() if broker not in homes)
            raise ClusterStartError(
                f"cluster {cluster.cluster_id} needs {needed} of its {len(wanted)} coordinators; "
                f"these brokers are not in this Ray cluster: {', '.join(missing)}",
                missing=missing,
            )
        time.sleep(_LOOK_AGAIN_S)
        homes = _homes(settings, time.monotonic() + LOOK_S)
    return homes


def _start_coordinators(
    settings: Settings,
    cluster: ClusterManifest,
    homes: Mapping[str, Home],
    started: dict[ReplicaId, Any],
    found: dict[ReplicaId, Any],
) -> None:
    """Those whose nodes are there. ``found`` are those that run already."""
    for node, broker in cluster.coordinators.items():
        here = homes.get(broker)
        if here is not None:
            spec = CoordinatorSpec(
                COORDINATOR,
                node,
                settings,
                create=not cluster.complete,
                voters=tuple(cluster.coordinators),
                host=here.host,
                directory=here.directory,
                cluster=cluster,
            )
            try:
                started[node] = start_coordinator(spec, ray_node_id=here.ray_node)
            except ValueError:  # the name is taken: it runs already
                found[node] = ray.get_actor(actor_name(COORDINATOR, node), settings.namespace)


def _wait_until_led(started: Mapping[ReplicaId, Any], cluster: ClusterManifest, deadline_s: float) -> None:
    """Until one leads; and if the cluster is being made, until all of them run."""
    problems: dict[ReplicaId, str] = {}
    hopeless: dict[ReplicaId, RayQueueError] = {}
    running: set[ReplicaId] = set()
    led = False
    needed = len(cluster.coordinators) // 2 + 1 if cluster.complete else len(cluster.coordinators)
    while not led or not (cluster.complete or len(running) == len(cluster.coordinators)):
        if time.monotonic() > deadline_s:
            told = "; ".join(f"{node}: {problem}" for node, problem in sorted(problems.items()))
            raise ClusterStartError(f"no coordinator of {cluster.cluster_id} leads: {told or 'no answer'}", missing=[])
        asked = {node: handle.status.remote() for node, handle in started.items()}
        for node, ref in asked.items():
            try:
                status = ray.get(ref, timeout=max(0.1, min(_ASK_S, deadline_s - time.monotonic())))
            except (RayError, RayQueueError) as error:
                problems[node] = str(error).strip().splitlines()[-1]
                cause = getattr(error, "cause", error)  # without Ray's wrapping
                if isinstance(cause, StorageError) and not cause.retriable:
                    hopeless[node] = cause
                continue
            running.add(node)
            problems[node] = f"{status.role} of term {status.term}"
            led = led or status.role == "leader"
        if hopeless and len(cluster.coordinators) - len(hopeless) < needed:
            raise _cannot_start(cluster, hopeless)
        time.sleep(_ASK_AGAIN_S)


def _cannot_start(cluster: ClusterManifest, problems: Mapping[ReplicaId, RayQueueError]) -> RayQueueError:
    """Too few coordinators can ever run. The error is the first one's own, for it says what to do."""
    first = problems[min(problems)]
    told = "; ".join(f"{node}: {problem}" for node, problem in sorted(problems.items()))
    return type(first)(f"the coordinator of {cluster.cluster_id} cannot start: {told}", **first.details)


def _settle(settings: Settings, homes: Iterable[Home], cluster: ClusterManifest) -> None:
    """Write it down everywhere: on the coordinators' nodes it must succeed."""
    secret = settings.transport.secret or SecretStr("")
    asked = {each.broker: nodes.settle_at(each.ray_node, settings.data_dir, cluster, secret) for each in homes}
    for broker, ref in asked.items():
        try:
            problem: Exception | None = ray.get(ref, timeout=_SETTLE_S)
        except RayError as error:
            problem = error
        if problem is not None:
            if broker in cluster.coordinators.values():
                raise StorageError(f"broker {broker} cannot join cluster {cluster.cluster_id}: {problem}")
            _log.warning("broker %s does not join cluster %s: %s", broker, cluster.cluster_id, problem)
