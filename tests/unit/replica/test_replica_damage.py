"""Bits that rot under a running replica: whoever finds them, it stops leading, and a healthy replica takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rayqueue.errors import DamagedLogError, DiskFullError, LeadershipLostError, NotLeaderError, RayQueueError
from rayqueue.ids import Index, ReplicaId
from rayqueue.log.lmdb_codec import encode_row
from rayqueue.log.lmdb_file import DATA_FILE
from rayqueue.log.store import Table
from rayqueue.net.channel import Channel
from rayqueue.partition import PartitionSettings
from rayqueue.partition.tables import OFFSETS
from rayqueue.protocol import calls
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.messages import AppendEntries
from rayqueue.raft.transport import Received
from rayqueue.replica.start import start_replica
from rayqueue.testing import wait_for
from tests.unit.net.client_net import GROUP, SEALS, TIMEOUT_S, Cluster, at, batch
from tests.unit.raft.engines import Engines

# -- the engine, whoever finds it ---------------------------------------------------------

QUICK = {"election_timeout_min_ms": 700, "election_timeout_max_ms": 1200}


def rot(group: Engines, node: ReplicaId, index: int) -> None:
    """Lose an entry that only the disk has."""
    store = group.stores[node]
    del store.disk.entries[Index(index)]
    for recent in range(store._recent_first, index + 1):
        store._recent_bytes -= len(store._recent.pop(recent).payload)
    store._recent_first = max(store._recent_first, index + 1)


def written(count: int = 10) -> tuple[Engines, RaftEngine]:
    """A group with some entries that everybody has, and its leader."""
    group = Engines("a", "b", "c")
    leader = group.leader
    for number in range(count):
        leader.propose(b"\x20" + b"x" * 100, number)
        group.answer(number)
    group.run(1)
    return group, leader


def find_by_reading_beside(group: Engines, leader: RaftEngine) -> None:
    leader.damaged("a client's read met it")


def find_by_replication(group: Engines, leader: RaftEngine) -> None:
    rot(group, leader.replica_id, 5)
    peer = next(iter(leader._leading().progress))
    leader._leading().progress[peer].match = Index(3)
    leader._leading().progress[peer].lost()
    group.run(1, lambda: not leader.is_leader)


def find_by_a_checkpoint(group: Engines, leader: RaftEngine) -> None:
    rot(group, leader.replica_id, leader.applied)
    leader.store._last_index = Index(leader.store.last_index + 1)  # type: ignore[attr-defined]  # so that it is looked up
    assert leader.maintain(1, 10) is False
    leader.store._last_index = Index(leader.store.last_index - 1)  # type: ignore[attr-defined]


def find_in_apply(group: Engines, leader: RaftEngine) -> None:
    def apply(index: Index, payload: bytes) -> Any:
        raise DamagedLogError("a row that apply needs is not what was written")

    leader.machine.apply = apply  # type: ignore[method-assign]
    leader.propose(b"\x20more", "found")
    group.run(1, lambda: not leader.is_leader)


FINDERS = (find_by_reading_beside, find_by_replication, find_by_a_checkpoint, find_in_apply)


@pytest.mark.parametrize("find", FINDERS)
def test_a_leader_that_finds_damage_stops_leading_in_that_step(
    find: Callable[[Engines, RaftEngine], None],
) -> None:
    group, leader = written()
    leader.propose(b"\x20waits", "waits")
    leader.confirm_leadership("asks")
    find(group, leader)
    assert not leader.is_leader
    assert leader.store.damaged is not None
    ready = leader.step(group.now)
    assert not ready.early, "no heartbeat of a leader that is none"
    told = {done.context: done.result for done in ready.done} | group.answers
    assert isinstance(told["waits"], LeadershipLostError | NotLeaderError | int)
    assert told["asks"] is None or isinstance(told["asks"], LeadershipLostError)
    before = group.now
    group.run(10, lambda: any(engine.is_leader for engine in group.engines.values()))
    assert not leader.is_leader
    assert group.now - before < 6
    group.leader.propose(b"\x20after", "after")
    assert isinstance(group.answer("after"), int)


def test_a_damaged_replica_never_leads_again_not_even_after_a_restart_or_alone() -> None:
    group, leader = written()
    damaged = leader.replica_id
    leader.damaged("found")
    healthy = group.leader
    assert healthy.replica_id != damaged
    healthy.transfer_leadership(damaged, group.now, "moved")
    assert group.answer("moved") is not None, "it does not take over"
    group.restart(damaged)
    group.cut = {node for node in group.engines if node != damaged}
    group.run(30)
    assert not group.engines[damaged].is_leader
    assert group.engines[damaged].term <= healthy.term


def test_the_only_voter_stops_leading_too() -> None:
    group = Engines("a")
    leader = group.leader
    leader.damaged("found")
    group.run(30)
    assert not leader.is_leader


def test_damage_that_a_message_meets_does_not_end_the_replica() -> None:
    group, leader = written()
    follower = next(engine for engine in group.engines.values() if engine is not leader)
    rot(group, follower.replica_id, 7)
    question = AppendEntries(leader.term, Index(7), leader.term, Index(0), 1, ())
    follower.commit = Index(6)
    follower.receive(group.now, Received(leader.replica_id, question))
    assert follower.store.damaged is not None
    follower.receive(group.now, Received(leader.replica_id, question))
    assert follower.leader == leader.replica_id, "it still knows whom to follow"
    group.cut = {leader.replica_id}
    group.run(10)
    assert not follower.is_leader
    assert group.leader is not follower


def test_a_replica_that_cannot_note_its_damage_writes_nothing_any_more() -> None:
    """A restart would not know of it, and what met the damage may be half done in the buffer."""
    group, leader = written()

    def full(why: str) -> None:
        raise DiskFullError("no space to note it")

    leader.store._write_damaged = full  # type: ignore[attr-defined]
    leader.damaged("found")
    assert leader.halted
    assert not leader.is_leader
    group.run(5)
    assert not leader.is_leader
    assert group.leader is not leader


# -- the running replica ---------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = PartitionSettings(retention_bytes=10_000_000)
    cluster = Cluster(tmp_path, 3, raft=QUICK, log={"cache_bytes": 0, "scrub_bytes_per_second": 0}, partition=settings)
    yield cluster
    cluster.close()


def fill(cluster: Cluster) -> None:
    async def work() -> None:
        channel = await cluster.open()
        for number in range(20):
            await channel.append(batch(*(b"%d-%d" % (number, each) for each in range(7))))
        await channel.call(
            calls.Commit(group="billing", generation=1, offsets={0: 70}, seal=SEALS.grant("billing", GROUP, 1))
        )
        channel.close()

    cluster.run(work())
    answers: SimpleQueue[Any] = SimpleQueue()
    cluster.replica.run(lambda: cluster.replica.once_settled(lambda: answers.put(None)))
    answers.get(timeout=TIMEOUT_S)


def flip(tmp_path: Path, cluster: Cluster, table: Table | None, offset: int) -> None:
    """In the file, under the open store: a batch, or its row in a table."""
    file = tmp_path / cluster.leader / DATA_FILE
    data = file.read_bytes()
    if table is None:
        needle = b"%d-%d" % (offset // 7, 3)
    else:
        key = offset.to_bytes(8, "big")
        with cluster.replica._store.snapshot() as snapshot:
            row = snapshot.get(table, key)
        assert row is not None
        needle = encode_row(table.space, key, row)
    found = data.count(needle)
    assert found
    with file.open("r+b") as writing:
        at_byte = -1
        for _ in range(found):
            at_byte = data.index(needle, at_byte + 1)
            writing.seek(at_byte + len(needle) - 1)
            writing.write(bytes([data[at_byte + len(needle) - 1] ^ 1]))


async def by_a_fetch(channel: Channel) -> Any:
    return await channel.fetch(at(70))


async def by_a_lag(channel: Channel) -> Any:
    return await channel.call(calls.GetLag(group="billing"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "find"),
    [
        (None, by_a_fetch),
        (OFFSETS, by_a_fetch),
        (OFFSETS, by_a_lag),
        (OFFSETS, None),  # the measures look every second
    ],
)
def test_a_healthy_replica_takes_over_from_one_whose_disk_rots(
    tmp_path: Path, cluster: Cluster, table: Table | None, find: Callable[[Channel], Any] | None
) -> None:
    fill(cluster)
    damaged, replica = cluster.leader, cluster.replica
    flip(tmp_path, cluster, table, 70)

    async def look() -> None:
        channel = await cluster.open()
        if find is not None:
            with pytest.raises(DamagedLogError):
                await find(channel)
        with suppress(RayQueueError):
            await channel.append(batch(b"who leads?"))
        channel.close()

    cluster.run(look())
    wait_for(lambda: replica.status.damaged, "the damage to be noted", TIMEOUT_S)
    cluster.leader = wait_for(cluster._find_leader, "another leader", TIMEOUT_S)
    assert cluster.leader != damaged

    async def go_on() -> None:
        channel = await cluster.open()
        await channel.append(batch(b"it goes on"))
        answer = await channel.fetch(at(70))
        assert answer.batches[0].base_offset == 70
        channel.close()

    cluster.run(go_on())
    assert cluster.fatal == []
    replica.close()
    again = start_replica(
        tmp_path / damaged, GROUP, ReplicaId(damaged), cluster.settings, on_fatal=cluster.fatal.append
    )
    cluster.replicas[damaged] = again
    assert again.status.damaged, "it is known after a restart, before anybody meets it again"


@pytest.mark.slow
def test_damage_met_while_writing_ends_writing_and_not_the_process(cluster: Cluster) -> None:
    """What LMDB stumbles over when it writes is damage as any other; and nothing can be promised without writing."""
    damaged, replica = cluster.leader, cluster.replica

    def stumble(*_: Any) -> None:
        raise DamagedLogError("LMDB: page not found")

    replica._store._keep = replica._store._commit = stumble  # type: ignore[attr-defined]

    async def append() -> None:
        channel = await cluster.open()
        # Or it has met the damage before, by a write of its own.
        with pytest.raises((LeadershipLostError, NotLeaderError)):
            await channel.append(batch())

    cluster.run(append())
    cluster.leader = wait_for(cluster._find_leader, "another leader", TIMEOUT_S)
    assert cluster.leader != damaged
    assert replica.status.damaged
