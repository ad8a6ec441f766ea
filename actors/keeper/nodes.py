"""The nodes of this Ray cluster as places for data.

Owns how a Ray node becomes a broker: a small task that runs on that very node
reads its data directory, and claims a broker of it (``rayqueue.actors.keeper.claims``).
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from pydantic import SecretStr
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayqueue.actors._ray import draining_nodes
from rayqueue.actors.keeper import home
from rayqueue.actors.keeper.claims import BROKER_LABEL, Standing
from rayqueue.actors.keeper.home import ClusterManifest, Home
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, ReplicaId

RACK_LABELS = ("rayqueue.rack", "ray.io/availability-zone")
"""Labels of a Ray node that say with which others it fails, the first one first."""

_DIAL_S = 1.0


class RayNode(NamedTuple):
    node_id: str
    host: str
    port: int
    """The raylet's."""
    label: str | None
    """The broker's name, if the node was started with the label ``rayqueue.broker``."""
    rack: str = ""
    """What fails together: the label ``rayqueue.rack``, or Ray's own for the availability zone."""
    leaving: bool = False
    """Ray drains it: it will be gone soon."""


def alive_nodes() -> list[RayNode]:
    """As far as Ray has noticed. A node that died may be among them for some seconds."""
    found: list[RayNode] = []
    leaving = draining_nodes()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            labels = node.get("Labels", {})
            rack = next((labels[each] for each in RACK_LABELS if labels.get(each)), "")
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            found.append(RayNode(node["NodeID"], *address, labels.get(BROKER_LABEL), rack, node["NodeID"] in leaving))
    return found


def answers(node: RayNode) -> bool:
    """Whether its raylet really is there. Takes a second at most."""
    try:
        with socket.create_connection((node.host, node.port), _DIAL_S):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The other nodes of this Ray, for one that claims a broker."""

    node: RayNode
    alive: Mapping[str, RayNode]

    @property
    def labels(self) -> Collection[str]:
        return {each.label for each in self.alive.values() if each.label is not None}

    def standing(self, ray_node: str) -> Standing:
        """Ray notices a dead node late; a dial that is refused says it at once. Takes a second at most."""
        other = self.alive.get(ray_node)
        if other is None or (other.host, other.port) == (self.node.host, self.node.port):  # this one listens there now
            return Standing.GONE
        try:
            with socket.create_connection((other.host, other.port), _DIAL_S):
                return Standing.LIVES
        except ConnectionRefusedError:
            return Standing.GONE
        except OSError:
            return Standing.UNKNOWN


def look_at(node: RayNode, data_dir: Path, *, starting: bool) -> Any:
    """A reference to its ``Home``, or to the error that says why it cannot be one: if nothing of the cluster runs yet
    (``starting``), also that somebody else uses the data.
    """
    return _pinned(_look, node.node_id).remote(data_dir, node, starting)


def settle_at(ray_node: str, data_dir: Path, cluster: ClusterManifest, secret: SecretStr) -> Any:
    """A reference to None, or to an error: the node belongs to the cluster now."""
    return _pinned(_settle, ray_node).remote(data_dir, cluster, secret)


def join_at(node: RayNode, data_dir: Path, cluster: ClusterManifest, secret: SecretStr) -> Any:
    """Both at once: a reference to its ``Home``, which belongs to the cluster now. ``StoreIdentityError`` if it belongs
    to another one."""
    return _pinned(_join, node.node_id).remote(data_dir, node, cluster, secret)


def erase_at(ray_node: str, directory: Path, group_id: GroupId, replica_id: ReplicaId, *, keep: bool = False) -> Any:
    """A reference to None, or to an error: the replica's data in its broker's ``directory`` is gone, or set aside."""
    return _pinned(_erase, ray_node).remote(directory, group_id, replica_id, keep)


def disk_at(ray_node: str, data_dir: Path) -> Any:
    """A reference to the bytes of the file system of its data directory, and those that are free."""
    return _pinned(_disk, ray_node).remote(data_dir)


def found_actors(namespace: str) -> set[str]:
    """The names that are taken in this namespace."""
    named: Sequence[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return {each["name"] for each in named if each["namespace"] == namespace}


def _pinned(task: Any, ray_node: str) -> Any:
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node, soft=False))


# An error of ours is returned, not raised: Ray's wrapping would only have to be taken off again.


@ray.remote(num_cpus=0, max_retries=1)
def _look(data_dir: Path, node: RayNode, starting: bool) -> Home | RayQueueError:
    try:
        if starting:
            home.refuse_used(data_dir, node.host)
        return _home(data_dir, node)
    except RayQueueError as error:
        return error


@ray.remote(num_cpus=0, max_retries=1)
def _settle(data_dir: Path, cluster: ClusterManifest, secret: SecretStr) -> RayQueueError | None:
    try:
        home.settle(data_dir, cluster, secret)
    except RayQueueError as error:
        return error
    return None


@ray.remote(num_cpus=0, max_retries=1)
def _join(data_dir: Path, node: RayNode, cluster: ClusterManifest, secret: SecretStr) -> Home | RayQueueError:
    try:
        found = _home(data_dir, node, cluster.cluster_id)
        home.settle(data_dir, cluster, secret)
    except RayQueueError as error:
        return error
    return found


def _home(data_dir: Path, node: RayNode, cluster_id: str | None = None) -> Home:
    def neighbours() -> Neighbours:
        return Neighbours(node, {each.node_id: each for each in alive_nodes()})

    return home.look(
        data_dir,
        label=node.label,
        host=node.host,
        ray_node=node.node_id,
        neighbours=neighbours,
        cluster_id=cluster_id,
    )


@ray.remote(num_cpus=0, max_retries=1)
def _disk(data_dir: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(data_dir)
    return usage.total, usage.free


@ray.remote(num_cpus=0, max_retries=1)
def _erase(directory: Path, group_id: GroupId, replica_id: ReplicaId, keep: bool) -> RayQueueError | None:
    try:
        home.erase(directory, group_id, replica_id, keep=keep)
    except RayQueueError as error:
        return error
    return None
