"""What a node keeps in its data directory besides logs: who it is, its cluster, and the cluster's secret.

- ``broker_id``: the broker's name, unless the Ray node's label ``rayqueue.broker``
  says another. Ray node ids change with every start of Ray; this does not.
- ``secret``: what the replicas of a cluster share, readable by its owner only.
- ``cluster.json``: the cluster that this node belongs to, and on which brokers
  the coordinator's replicas live. It is on every node of the cluster, so that
  after a start of everything any one of them tells what to wait for, and so
  that nobody makes a second cluster over existing data.

Each file is there completely or not at all. Nodes that share a data directory
share all three; only labels tell them apart.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rayqueue.actors.names import COORDINATOR, check_id
from rayqueue.config import Settings
from rayqueue.errors import StorageError
from rayqueue.ids import GroupId, NodeId
from rayqueue.log.lmdb_file import Holder, half_made, holder
from rayqueue.log.private import make_directory

BROKER_LABEL = "rayqueue.broker"

_BROKER_FILE = "broker_id"
_SECRET_FILE = "secret"  # noqa: S105  # a file's name
_CLUSTER_FILE = "cluster.json"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterManifest:
    """The cluster that a node belongs to."""

    cluster_id: str
    coordinators: dict[NodeId, str]
    """The coordinator's replicas, and the broker that each lives on."""
    complete: bool
    """All of them have been made. Before that, nothing was promised to anybody."""


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
    used_by: Holder | None = None
    """Who has a replica of the coordinator open here."""


def look(data_dir: Path, *, label: str | None, host: str, ray_node: str) -> Home:
    """What the data directory of this node says. Gives the node a broker id if it has none."""
    try:
        make_directory(data_dir)
        if label is None and not (data_dir / _BROKER_FILE).exists():
            write_once(data_dir / _BROKER_FILE, f"broker-{uuid.uuid4().hex[:12]}")
        broker = check_id(label if label is not None else (data_dir / _BROKER_FILE).read_text())
        free_bytes = shutil.disk_usage(data_dir).free
        cluster, secret = load_cluster(data_dir), load_secret(data_dir)
        return Home(broker, host, ray_node, free_bytes, cluster, secret, memory_bytes(), used_by(data_dir))
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


def shared_directory(broker: str, used: str, idle: str) -> str:
    """What to say of two Ray nodes with one data directory: they are one broker, unless their labels say otherwise."""
    return (
        f"Ray nodes {used} and {idle} share a data directory, so they are one broker, {broker}, and the second is not "
        f"used. To use it, start each with a name of its own: ray start --labels {BROKER_LABEL}=NAME"
    )


def used_by(data_dir: Path) -> Holder | None:
    """The process that has a replica of the coordinator open. There is none when a cluster may be started."""
    replicas = sorted((data_dir / COORDINATOR).glob("*"))
    return next((found for each in replicas if (found := holder(each)) is not None), None)


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
        if known != cluster and not _is_older(cluster, known):
            replace(data_dir / _CLUSTER_FILE, json.dumps(asdict(cluster)))
    except OSError as error:
        raise StorageError(f"the data directory {data_dir} cannot be written: {error}") from error


def _is_older(cluster: ClusterManifest, known: ClusterManifest | None) -> bool:
    """The coordinator's group only grows: one who knows fewer replicas of it has not heard of the others yet."""
    if known is None or (cluster.complete and not known.complete):
        return False
    return len(cluster.coordinators) < len(known.coordinators)


def erase(data_dir: Path, group_id: GroupId, node_id: NodeId) -> None:
    """Delete a replica's data, and its group's directory once that is empty."""
    path = data_dir / check_id(group_id) / check_id(node_id)
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
    path = data_dir / _CLUSTER_FILE
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        coordinators = {NodeId(node): str(broker) for node, broker in fields["coordinators"].items()}
        return ClusterManifest(str(fields["cluster_id"]), coordinators, bool(fields["complete"]))
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


def with_secret(settings: Settings) -> Settings:
    """The settings with what the replicas share: as configured, or kept in the data directory, or made now."""
    if settings.transport.secret is not None:
        return settings
    path = settings.data_dir / _SECRET_FILE
    if not path.exists():
        write_once(path, new_secret().get_secret_value())
    return using_secret(settings, SecretStr(path.read_text()))


def using_secret(settings: Settings, secret: SecretStr | None) -> Settings:
    transport = settings.transport.model_copy(update={"secret": secret})
    return settings.model_copy(update={"transport": transport})


def replace(path: Path, text: str) -> None:
    _synced_copy(path, text).rename(path)
    _sync_directory(path.parent)


def write_once(path: Path, text: str) -> None:
    """Only the first of several that try at the same time succeeds; the others keep what it wrote."""
    copy = _synced_copy(path, text)
    try:
        os.link(copy, path)
    except FileExistsError:
        pass
    finally:
        copy.unlink()
    _sync_directory(path.parent)


def _synced_copy(path: Path, text: str) -> Path:
    """Beside ``path``; mkstemp makes it readable by its owner only."""
    make_directory(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
