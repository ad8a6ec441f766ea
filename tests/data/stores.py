"""The stores of one on-disk format: written by the code that first has it, opened by every later one.

    python -m tests.data.stores        writes tests/data/format-N, for the format of this code

Run it once for each format, with the commit that is released, and never again: what it wrote then is what
``tests/unit/test_store_formats.py`` opens for ever. ``contents.json`` says what was found in the stores when they were
written, by ``partition_contents`` and ``cluster_contents``; these may have to be told how to ask a later release, but
not to expect something else.

There are three replicas: ``partition`` led, so its log was trimmed to a checkpoint, ``follower`` began with the
leader's checkpoint, and ``coordinator`` led too. The last thing each of them did was to persist: their write-ahead
files end with entries, applied ones too, that LMDB has not seen.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from rayqueue.cluster.commands import (
    AlterTopic,
    AnyCommand,
    ChangeGroup,
    CreateCluster,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    ExpireGroups,
    Join,
    Leave,
    PlaceCoordinator,
    PutBroker,
    Release,
    ReplicasMade,
    TakeProducerIds,
    encode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.config import RaftSettings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_codec import FORMAT_VERSION
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.store import Schema
from rayqueue.partition import (
    Partition,
    PartitionSettings,
    commit_command,
    configure_command,
    expire_groups_command,
    fence_command,
    forget_group_command,
    pass_time_command,
    pin_command,
    read,
    trim_command,
)
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.topics import TopicPartition, TopicSettings
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import RecordBatch

HERE = Path(__file__).parent
ARCHIVE = "stores.tar.xz"
CONTENTS = "contents.json"

PARTITION_ID = GroupId("orders-0")
COORDINATOR_ID = GroupId("coordinator")
LEADER, FOLLOWER, FIRST = ReplicaId("r0"), ReplicaId("r1"), ReplicaId("c1")

SMALL = LmdbOptions(map_bytes=256 << 10, map_step_bytes=64 << 10, reserve_bytes=32 << 10, wal_bytes=32 << 10)
"""The write-ahead file's size is part of a store, so the stores that were written need this one."""

SETTINGS = PartitionSettings(lanes=3, dedupe_window=4, version=2, retention_bytes=1 << 30, max_record_bytes=1_000)
NOW_MS = 1_700_000_000_000


# -- what is in them -------------------------------------------------------------------------


def partition_contents(store: LmdbStore) -> dict[str, Any]:
    """Everything that a reader, a producer or a consumer group can find out. Syncs the store."""
    partition = Partition(store, PartitionSettings())
    store.sync()
    with store.snapshot() as snapshot:
        fetched = read(snapshot, partition.readable_from, 1 << 30)
    records = [
        (record.offset, record.lane, record.timestamp, record.key, record.value)
        for each in fetched
        for record in RecordBatch.decode(each.payload, base_offset=each.base_offset).records()
    ]
    producers = {
        number: (known.epoch, known.next_sequence, known.used_at, known.used_ms, known.window.hex())
        for number in range(10)
        if (known := partition.producers.get(number)) is not None
    }
    groups = {
        name: (group.generation, sorted(group.offsets.items()), group.metadata, group.pinned, group.used_ms)
        for name, group in partition.groups.items()
    }
    return _plain(
        {
            "raft": _raft_contents(store),
            "settings": msgspec.structs.asdict(partition.settings),
            "bounds": (partition.start_offset, partition.readable_from, partition.next_offset),
            "size": (partition.total_bytes, partition.max_timestamp),
            "lags": partition.lags(),
            "lane_ends": sorted(partition.lane_ends().items()),
            "times": tuple(partition.clock.times),
            "floor": (partition.groups.floor, partition.groups.held_at),
            "records": records,
            "producers": producers,
            "groups": groups,
        }
    )


def cluster_contents(store: LmdbStore) -> dict[str, Any]:
    """Everything that the coordinator's state machine answers. Syncs the store."""
    machine = ClusterMachine(store)
    store.sync()
    groups = {
        name: {
            "generation": (group.generation, group.born, group.empty_ms, group.assignor),
            "members": {
                member.member: (member.wish, member.grants(), member.target) for member in group.members.values()
            },
            "owners": {str(each): owner for each, owner in group.owners.items()},
        }
        for name, group in machine.groups.items()
    }
    return _plain(
        {
            "raft": _raft_contents(store),
            "cluster_id": machine.cluster_id,
            "version": machine.version,
            "topics": machine.topics,
            "brokers": machine.brokers,
            "groups": groups,
            "deleted_generation": machine.deleted_generation,
            "unmade": list(machine.unmade.values()),
            "doomed": list(machine.doomed.values()),
            "coordinators": machine.coordinators,
            "expired": machine.expired,
        }
    )


def _raft_contents(store: LmdbStore) -> dict[str, Any]:
    engine = RaftEngine(store, _Idle(), RaftSettings(), Random(1), 0.0)
    entries = store.entries(type(store.base_index)(store.base_index + 1), 1 << 30)
    return {
        "hard": store.hard,
        "log": (store.base_index, store.base_term, store.last_index, store.last_term, store.applied),
        "checkpoints": store.checkpoints(),
        "base_state_bytes": None if store.checkpoint is None else len(store.checkpoint.state),
        "entries": [(entry.index, entry.term, entry.crc, len(entry.payload)) for entry in entries],
        "voters": sorted(engine.replica_set.voters),
        "learners": sorted(engine.replica_set.learners),
    }


def _plain(contents: dict[str, Any]) -> dict[str, Any]:
    """As it is after a way through a file."""
    plain: dict[str, Any] = json.loads(msgspec.json.encode(_named(contents)))
    return plain


def _named(value: Any) -> Any:
    """With its fields' names, so that one that a later release adds can be told from a value."""
    if isinstance(value, msgspec.Struct):
        named = {name: _named(getattr(value, name)) for name in value.__struct_fields__}
        if "replica_id" in named:
            named["node"] = named["replica_id"]  # as it was called when the first ones were written
        return named
    if isinstance(value, Mapping):
        return {str(key): _named(each) for key, each in value.items()}
    return [_named(each) for each in value] if isinstance(value, list | tuple) else value


def has_all(found: Any, written: Any) -> bool:
    """Whether everything that was written is found. What has fields may have more of them by now."""
    if isinstance(written, dict):
        return isinstance(found, dict) and all(
            name in found and has_all(found[name], written[name]) for name in written
        )
    if isinstance(written, list):
        return isinstance(found, list) and len(found) == len(written) and all(map(has_all, found, written))
    return bool(found == written)


def read_contents(folder: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text())
    return contents


def unpack_stores(folder: Path, into: Path) -> None:
    with tarfile.open(folder / ARCHIVE) as archive:
        archive.extractall(into, filter="data")


class _Idle:
    """A state machine that is not asked anything."""

    def apply(self, index: int, payload: bytes) -> None:
        raise NotImplementedError

    def first_needed(self) -> Any:
        raise NotImplementedError

    def checkpoint(self) -> bytes:
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        raise NotImplementedError


# -- writing them ----------------------------------------------------------------------------


class Leader:
    """A group with one voter, in virtual time."""

    def __init__(self, store: LmdbStore, machine: StateMachine) -> None:
        self.store = store
        self.engine = RaftEngine(store, machine, RaftSettings(), Random(1), 0.0)
        self._now = 0.0
        while not self.engine.is_leader:
            self._step()

    def write(self, *payloads: bytes) -> list[Any]:
        """Propose, and persist as the replica's thread does. Nothing of it is known to LMDB yet, if it fits."""
        answers: list[Any] = []
        for payload in payloads:
            self.engine.propose(payload, len(answers))
            answers += self._step_until(1)
        return answers

    def change_members(self, members: ReplicaSet) -> None:
        self.engine.change_replicas(members, "members")
        self._step_until(1)

    def checkpoint_and_trim(self) -> None:
        while self.engine.maintain(1, 1_000):
            self.store.sync()
        self.store.sync()

    def _step_until(self, answers: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(200):
            found += [done.result for done in self._step()]
            if len(found) == answers:
                break
        refused = [each for each in found if isinstance(each, RayQueueError)]
        assert (len(found), refused) == (answers, [])
        return found

    def _step(self) -> Sequence[Any]:
        self._now += 0.01
        ready = self.engine.step(self._now)
        if self.store.must_sync:
            self.store.persist()
        self.engine.synced()
        return ready.done


def _batch(first: int, count: int, **fields: Any) -> bytes:
    numbers = range(first, first + count)
    return RecordBatch.encode(
        [b"order %d" % number for number in numbers],
        keys=[b"key %d" % (number % 7) for number in numbers],
        timestamps=[NOW_MS + number for number in numbers],
        **fields,
    )


def write_partition(path: Path) -> None:
    store = LmdbStore.create(path / "partition", PARTITION_ID, LEADER, SMALL, PARTITION)
    RaftEngine.bootstrap(store, ReplicaSet.of([LEADER]))
    leader = Leader(store, Partition(store, PartitionSettings(lanes=3)))
    leader.change_members(ReplicaSet.of([LEADER], [FOLLOWER]))
    leader.write(
        configure_command(SETTINGS),
        pass_time_command(NOW_MS),
        _batch(0, 10, producer_id=1),
        _batch(10, 5, lane=2, producer_id=2, epoch=3),
        _batch(15, 5, lane=1),
        commit_command("billing", 0, {0: 8, 1: 17, 2: 15}, metadata=b"where it was"),
        commit_command("shipping", 4, {0: 10, 1: 20, 2: 15}),
        commit_command("gone", 5, {0: 1}),
        pin_command("billing"),
        forget_group_command("gone", 5),
        fence_command(3, 7),
        *(_batch(first, 1, producer_id=1, sequence=first - 10) for first in range(20, 26)),
        trim_command(9),
        _batch(26, 4, lane=2, producer_id=2, epoch=3, sequence=5),
    )
    leader.checkpoint_and_trim()
    leader.write(_batch(30, 2, lane=1), trim_command(31))
    leader.checkpoint_and_trim()
    checkpoint = store.checkpoint
    assert checkpoint is not None
    later = [_batch(32, 6, compression="zstd", producer_id=4), commit_command("shipping", 6, {1: 32})]
    leader.write(*later)
    store.sync()
    last = [
        pass_time_command(NOW_MS + 90_000),
        _batch(38, 3, producer_id=4, sequence=6),
        expire_groups_command(["nobody"], 6),
        commit_command("late", 9, {0: 40}, metadata=b"only written ahead"),
        trim_command(33),
    ]
    leader.write(*last)
    assert store.dirty, "the write-ahead file should hold the end"

    follower = LmdbStore.create(path / "follower", PARTITION_ID, FOLLOWER, SMALL, PARTITION)
    partition = Partition(follower, PartitionSettings())
    follower.sync()
    follower.install(checkpoint)
    partition.restore(checkpoint.state)
    follower.sync()
    follower.append(store.entries(type(store.base_index)(checkpoint.index + 1), 1 << 20))
    follower.set_hard(msgspec.structs.replace(follower.hard, term=store.hard.term, commit=store.applied))
    for entry in follower.entries(type(store.base_index)(checkpoint.index + 1), 1 << 20):
        if entry.payload[0] > 3:
            partition.apply(entry.index, entry.payload)
        follower.set_applied(entry.index)
    follower.persist()
    assert follower.dirty
    store.close()
    follower.close()


def write_cluster(path: Path) -> None:
    store = LmdbStore.create(path / "coordinator", COORDINATOR_ID, FIRST, SMALL, COORDINATOR)
    RaftEngine.bootstrap(store, ReplicaSet.of([FIRST]))
    leader = Leader(store, ClusterMachine(store))

    def write(*commands: AnyCommand) -> None:
        leader.write(*map(encode_command, commands))

    def join(member: str, *topics: str, **fields: Any) -> Join:
        return Join(member, topics, fields.get("instance"), "a test", "sticky", 10_000)

    brokers = ("b0", "b1", "b2")
    write(
        CreateCluster("the cluster"),
        *(PutBroker(broker, f"10.0.0.{at}", f"ray node {at}", 8 << 30) for at, broker in enumerate(brokers)),
        CreateTopic(
            "orders", TopicSettings(partitions=2, lanes=3, retention_ms=60_000), (brokers, brokers), attempt="1"
        ),
        CreateTopic("gone", TopicSettings(replication=1), (("b1",),)),
        ReplicasMade((("orders-0.1", "r1"),)),
        PlaceCoordinator(COORDINATOR_ID, "c2", "b1"),
        TakeProducerIds(1_000),
        ChangeGroup("billing", (join("m1", "orders"), join("m2", "orders", instance="two")), True, NOW_MS),
        ChangeGroup("idle", (join("m3", "orders"),), True, NOW_MS),
        ChangeGroup("idle", (Leave("m3"),), True, NOW_MS + 5_000),
        ChangeGroup("deleted", (join("m4", "gone"),), True, NOW_MS),
        ChangeGroup("deleted", (Leave("m4"),), True, NOW_MS + 10_000),
        DeleteGroup("deleted"),
        DeleteTopic("gone"),
    )
    leader.checkpoint_and_trim()
    assert store.base_index > 5
    write(
        AlterTopic("orders", {"partitions": 3, "retention_ms": None}, (brokers,)),
        ChangeGroup("billing", (join("m5", "orders"),), True, NOW_MS + 20_000),
        CreateTopic("later", TopicSettings(), (brokers,)),
    )
    store.sync()
    write(
        ChangeGroup("billing", (Release("m1", 99, (TopicPartition("orders", 0),)),), True, NOW_MS + 30_000),
        ExpireGroups(NOW_MS + 100_000, 50_000),
        TakeProducerIds(5),
        CreateTopic("written-ahead", TopicSettings(max_backlog_records=10), (brokers,)),
    )
    assert store.dirty, "the write-ahead file should hold the end"
    store.close()


class Kept(NamedTuple):
    group_id: GroupId
    replica_id: ReplicaId
    schema: Schema
    contents: Callable[[LmdbStore], dict[str, Any]]

    def open(self, path: Path) -> LmdbStore:
        return LmdbStore.open(path, self.group_id, self.replica_id, SMALL, self.schema)


STORES = {
    "partition": Kept(PARTITION_ID, LEADER, PARTITION, partition_contents),
    "follower": Kept(PARTITION_ID, FOLLOWER, PARTITION, partition_contents),
    "coordinator": Kept(COORDINATOR_ID, FIRST, COORDINATOR, cluster_contents),
}


def main() -> None:
    folder = HERE / f"format-{FORMAT_VERSION}"
    folder.mkdir()
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        write_partition(path)
        write_cluster(path)
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=9) as archive:
            for name in STORES:
                for file in ("data.mdb", "WAL"):
                    archive.add(path / name / file, f"{name}/{file}")
        contents = {}
        for name, kept in STORES.items():
            store = kept.open(path / name)
            contents[name] = kept.contents(store)
            store.close()
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
