"""Rescue of the coordinator: the unsafe recovery of its own group, on the data directory, while nothing runs.

The coordinator has nobody above it who could remember that it went on without
a majority, so that is written into its own log: the membership of the
survivor alone, and behind it the audit record (``rayqueue.raft.recovery``). Then
``cluster.json`` says so; of two such files the one with the higher epoch is
right, wherever a node with an older one comes from. No Ray here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rayqueue.actors.keeper.claims import BROKERS
from rayqueue.actors.keeper.files import replace
from rayqueue.actors.keeper.home import CLUSTER_FILE, ClusterManifest, load_cluster
from rayqueue.cluster.commands import RecoverGroup, encode_command
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR as SCHEMA
from rayqueue.errors import RecoveryRefusedError, StorageError
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.raft.recovery import stand_alone, standing


@dataclass(frozen=True, slots=True)
class CoordinatorRecovery:
    """What an unsafe recovery of the coordinator does, or has done."""

    cluster_id: str
    survivor: ReplicaId
    broker: str
    epoch: int
    topics: int
    partitions: int
    brokers: int
    last_index: int
    open_entries: int
    """Entries at the end of its log of which it does not know whether they were committed. They are kept."""
    abandoned: tuple[tuple[str, str], ...]
    """The other coordinators, and the broker that each is on."""
    here: tuple[ReplicaId, ...]
    """All that could go on, the one that has most first."""
    said: str


def recover_coordinator(data_dir: Path, survivor: str | None, *, unsafe: bool) -> CoordinatorRecovery:
    """Without ``unsafe`` nothing is done but looked. One that was interrupted is finished by the next.

    ``StorageError`` with ``reason="locked"`` while a queue runs on it; ``RecoveryRefusedError`` if a majority is here,
    or nobody who could go on."""
    cluster = load_cluster(data_dir)
    if cluster is None or not cluster.complete:
        raise RecoveryRefusedError(f"{data_dir} has no cluster that could be recovered", path=str(data_dir))
    paths = dict(_directories(data_dir))
    found: list[tuple[tuple[int, int, str], ReplicaId]] = []
    problems: list[str] = []
    for node, path in sorted(paths.items()):
        try:
            with _opened(path, node) as store:
                known = standing(store)
                if node in known.replica_set.voters and store.damaged is None:
                    found.append(((known.last_term, known.last_index, node), node))
        except StorageError as error:
            if error.details.get("reason") == "locked":
                raise
            problems.append(f"{node}: {error}")
    here = tuple(node for _, node in sorted(found, reverse=True))
    if not here:
        why = "; ".join(problems) or f"there is none in {data_dir}"
        raise RecoveryRefusedError(f"no coordinator is left that could go on: {why}", path=str(data_dir))
    chosen = here[0] if survivor is None else ReplicaId(survivor)
    if chosen not in here:
        raise RecoveryRefusedError(f"{chosen} cannot go on; these can: {', '.join(here)}", path=str(data_dir))
    with _opened(paths[chosen], chosen) as store:
        own = standing(store).replica_set
        voters, begun = own.voters, own.epoch > cluster.epoch and own.voters == {chosen}
        older = store.waymark[:2] > (store.last_term, store.last_index)
        if 2 * len(voters.intersection(here)) > len(voters) and not (begun or older):
            raise RecoveryRefusedError(
                f"{', '.join(here)} are here, a majority of {', '.join(sorted(voters))}: start the queue instead",
                path=str(data_dir),
            )
        plan = _plan(store, cluster, chosen, here, own.epoch if begun else own.epoch + 1)
        if unsafe:
            at_ms = int(time.time() * 1000)
            record = RecoverGroup(COORDINATOR, chosen, plan.abandoned, at_ms, plan.said, plan.epoch)
            version = store.last_index if begun else stand_alone(store, plan.epoch, [encode_command(record)])
            manifest = ClusterManifest(cluster.cluster_id, {chosen: plan.broker}, True, version, plan.epoch)
            replace(data_dir / CLUSTER_FILE, json.dumps(asdict(manifest)))
    return plan


def _plan(
    store: LmdbStore, cluster: ClusterManifest, chosen: ReplicaId, here: tuple[ReplicaId, ...], epoch: int
) -> CoordinatorRecovery:
    known, machine = standing(store), ClusterMachine(store)
    brokers = dict(cluster.coordinators) | {ReplicaId(node): broker for node, broker in machine.coordinators.items()}
    broker = brokers.get(chosen, "")
    if not broker:
        raise RecoveryRefusedError(f"nobody knows on which broker {chosen} is", node=chosen)
    # Also those that were only being made: nobody of before has a place any more.
    abandoned = tuple(sorted((str(node), at) for node, at in brokers.items() if node != chosen and at))
    open_entries = known.last_index - known.commit
    behind = max(0, store.waymark.entry - known.last_index)
    lost = f"{behind} entries that it had acknowledged are lost, unless others have joined since and have them"
    older = f" It is an older copy: {lost}." if behind else ""
    partitions = sum(len(info.partitions) for info in machine.topics.values())
    said = (
        f"coordinator {chosen} on {broker} goes on alone for {cluster.cluster_id}: {len(machine.topics)} topics, "
        f"{partitions} partitions, {len(machine.brokers)} brokers, as of entry {known.commit} of its log, and "
        f"{open_entries} entries more that may not have been committed. Given up: "
        f"{', '.join(f'{node} on {at}' for node, at in abandoned) or 'nobody'}.{older} Topics, groups and producer "
        "ids that only they had are lost, and nobody here knows how many"
    )
    return CoordinatorRecovery(
        cluster.cluster_id,
        chosen,
        broker,
        epoch,
        len(machine.topics),
        partitions,
        len(machine.brokers),
        known.last_index,
        open_entries,
        abandoned,
        here,
        said,
    )


def _directories(data_dir: Path) -> Iterator[tuple[ReplicaId, Path]]:
    for base in (data_dir, *sorted((data_dir / BROKERS).glob("*"))):
        for path in sorted((base / COORDINATOR).glob("*")):
            if path.is_dir() and (path / "data.mdb").exists():
                yield ReplicaId(path.name), path


@contextmanager
def _opened(path: Path, node: ReplicaId) -> Iterator[LmdbStore]:
    store = LmdbStore.open(path, COORDINATOR, node, schema=SCHEMA)
    try:
        yield store
    finally:
        store.close()
