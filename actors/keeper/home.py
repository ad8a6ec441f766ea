"""A node's home: what its data directory holds besides logs, that is who it is, its cluster, and the cluster's secret.

- ``broker_id``: the broker's name. Ray node ids change with every start of Ray;
  this does not. Which of the nodes that share a data directory has it, and what
  the others are, is ``rayqueue.actors.keeper.claims``', unless the Ray node's label
  ``rayqueue.broker`` says another name.
- ``secret``: what the replicas of a cluster share, readable by its owner only.
- ``cluster.json``: the cluster that this node belongs to, and on which brokers
  the coordinator's replicas live. It is on every node of the cluster, so that
  after a start of everything any one of them tells what to wait for, and so
  that nobody makes a second cluster over existing data.

Each file is there completely or not at all. Nodes that share a data directory
share the secret and the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rayqueue.actors.keeper.claims import BROKER_LABEL, BROKERS, Claimant, Neighbours, claim, named_place
from rayqueue.actors.keeper.files import replace, write_once
from rayqueue.actors.names import check_id
from rayqueue.config import Settings
from rayqueue.errors import StorageError, StoreIdentityError
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId
from rayqueue.log.lmdb_file import Holder, half_made, holder
from rayqueue.log.private import make_directory
from rayqueue.log.starts import forget_starts
from rayqueue.log.waymark import waymark_path

ABANDONED = "abandoned"
"""Below a broker's directory: data of replicas that were given up by an unsafe recovery and came back."""

_SECRET_FILE = "secret"  # noqa: S105  # a file's name
CLUSTER_FILE = "cluster.json"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterManifest:
    """The cluster that a node belongs to."""

    cluster_id: str
    coordinators: dict[ReplicaId, str]
    """The coordinator's replicas, and the broker that each lives on."""
    complete: bool
    """All of them have been made. Before that, nothing was promised to anybody."""
    version: int = 0
    """The entry of the coordinator's log that made them so: the highest is the newest."""
    epoch: int = 0
    """How often the coordinator went on without a majority (``rayqueue.raft.recovery``). Of two, the later is right."""


@dataclass(frozen=True, slots=True)
class Home:
    """One Ray node as a place for data."""

    broker: str
    host: str
    ray_node: str
    free_bytes: int
    cluster: ClusterManifest | None
    secret: SecretStr | None
    memory_bytes: int = 0
    """What processes may use on this host; 0 if that is not known."""
    directory: str = ""
    """Of its replicas, below ``data_dir``; "" is ``data_dir`` itself."""


def look(
    data_dir: Path,
    *,
    label: str | None,
    host: str,
    ray_node: str,
    neighbours: Callable[[], Neighbours],
    cluster_id: str | None = None,
) -> Home:
    """What the data directory of this node says. The node becomes one of its brokers.

    ``StoreIdentityError`` if the directory belongs to another cluster than ``cluster_id``. It stays as it is.
    """
    try:
        make_directory(data_dir)
        cluster, secret = load_cluster(data_dir), load_secret(data_dir)
        if cluster is not None and cluster_id is not None and cluster.cluster_id != cluster_id:
            raise StoreIdentityError(
                f"{data_dir} on {host} belongs to cluster {cluster.cluster_id}, not {cluster_id}", path=str(data_dir)
            )
        if label is not None:
            place = named_place(data_dir, label)
        else:
            coordinators = set() if cluster is None else set(cluster.coordinators.values())
            place = claim(data_dir, Claimant.here(ray_node), neighbours, coordinators)
        free_bytes = shutil.disk_usage(data_dir).free
        return Home(place.broker, host, ray_node, free_bytes, cluster, secret, memory_bytes(), place.directory)
    except OSError as error:
        raise StorageError(f"the data directory {data_dir} on {host} cannot be used: {error}") from error


def memory_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What processes here may use: the machine's memory, or less if a container's limit says so."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (cgroups / "memory.max", cgroups / "memory" / "memory.limit_in_bytes"):
        try:
            told = limit.read_text().strip()
        except OSError:
            continue
        if told.isdigit():  # "max" is none
            most = min(most, int(told))
    return most


def same_broker(broker: str, used: str, idle: str) -> str:
    """What to say of two Ray nodes that are one broker."""
    return (
        f"Ray nodes {used} and {idle} are both broker {broker}, and the second is not used. To use it, start it with a "
        f"name of its own: ray start --labels {BROKER_LABEL}=NAME"
    )


def refuse_used(data_dir: Path, host: str) -> None:
    """``StorageError`` if a process has a replica of the coordinator open. There is none when a cluster may start."""
    replicas = [*data_dir.glob(f"{COORDINATOR}/*"), *data_dir.glob(f"{BROKERS}/*/{COORDINATOR}/*")]
    for each in sorted(replicas):
        found: Holder | None = holder(each)
        if found is not None:
            raise StorageError(
                f"the data directory {data_dir} on {host} is in use by {found}: a queue runs on it already, on another "
                "Ray or in another namespace. Connect with that one (address=, namespace=), end it first "
                "(rq.shutdown(), `rayqueue down`), or use another data_dir",
                path=str(data_dir),
                reason="locked",
                pid=found.pid,
            )


def settle(data_dir: Path, cluster: ClusterManifest, secret: SecretStr) -> None:
    """From now on this node belongs to ``cluster``. ``StorageError`` if it belongs to another one."""
    known = load_cluster(data_dir)
    if known is not None and known.cluster_id != cluster.cluster_id:
        raise StorageError(
            f"{data_dir} belongs to cluster {known.cluster_id}, not {cluster.cluster_id}", path=str(data_dir)
        )
    try:
        if load_secret(data_dir) is None:
            write_once(data_dir / _SECRET_FILE, secret.get_secret_value())
        if known is None or newness(cluster) > newness(known):
            replace(data_dir / CLUSTER_FILE, json.dumps(asdict(cluster)))
    except OSError as error:
        raise StorageError(f"the data directory {data_dir} cannot be written: {error}") from error


def newness(cluster: ClusterManifest) -> tuple[bool, int, int, int]:
    """Of two manifests of one cluster, the newer one's is greater.

    The number of coordinators is for files without a version: the group only grew then.
    """
    return cluster.complete, cluster.epoch, cluster.version, len(cluster.coordinators)


def erase(directory: Path, group_id: GroupId, replica_id: ReplicaId, *, keep: bool = False) -> None:
    """Delete a replica's data, and its group's directory once that is empty.

    ``keep``: it may have what no other replica has any more, and is set aside, below ``abandoned``, for its operator.
    """
    path = directory / check_id(group_id) / check_id(replica_id)
    if keep and path.exists():
        kept = directory / ABANDONED / f"{group_id}.{replica_id}"
        try:
            make_directory(kept.parent)
            path.rename(kept)
        except OSError as error:
            raise StorageError(f"{path} cannot be set aside as {kept}: {error}", path=str(path)) from error
    forget_starts(path)
    with suppress(OSError):
        waymark_path(path).unlink()
    for each in (path, half_made(path)):
        try:
            shutil.rmtree(each)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{each} cannot be deleted: {error}", path=str(each)) from error
    try:
        path.parent.rmdir()
    except OSError:
        return  # another replica of this group is here, or the directory never was


def load_cluster(data_dir: Path) -> ClusterManifest | None:
    path = data_dir / CLUSTER_FILE
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        coordinators = {ReplicaId(node): str(broker) for node, broker in fields["coordinators"].items()}
        version, epoch = int(fields.get("version", 0)), int(fields.get("epoch", 0))
        return ClusterManifest(str(fields["cluster_id"]), coordinators, bool(fields["complete"]), version, epoch)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} cannot be read: {error}", path=str(path)) from error


def load_secret(data_dir: Path) -> SecretStr | None:
    try:
        return SecretStr((data_dir / _SECRET_FILE).read_text())
    except FileNotFoundError:
        return None


def new_secret() -> SecretStr:
    return SecretStr(secrets.token_urlsafe(_SECRET_BYTES))


def using_secret(settings: Settings, secret: SecretStr | None) -> Settings:
    transport = settings.transport.model_copy(update={"secret": secret})
    return settings.model_copy(update={"transport": transport})
