"""The cluster's state: a function of its log, kept in the store, small on disk."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from rayqueue.cluster.commands import (
    AlterTopic,
    AnyCommand,
    ChangeGroup,
    CreateCluster,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    FenceGroup,
    Join,
    Leave,
    Nothing,
    PlaceCoordinator,
    PutBroker,
    Release,
    ReplicasMade,
    ReplicasRemoved,
    TakeProducerIds,
    decode_command,
    encode_command,
)
from rayqueue.cluster.machine import SEGMENT_BYTES, ClusterMachine
from rayqueue.cluster.tables import COORDINATOR, META
from rayqueue.config import RaftSettings
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    InvariantBrokenError,
    TopicExistsError,
    UnknownFormatError,
    UnknownGroupError,
    UnknownTopicError,
)
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.memory_store import MemoryStore
from rayqueue.protocol.calls import DeletedGroup
from rayqueue.protocol.topics import TopicPartition, TopicSettings
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records.checksum import crc32c
from tests.unit.cluster.cluster_state import ClusterLog


def topic(name: str = "orders", partitions: int = 2, replication: int = 1, **options: Any) -> CreateTopic:
    settings = TopicSettings(partitions=partitions, replication=replication)
    return CreateTopic(name, settings, ((("b0", "b1", "b2")[:replication]),) * partitions, **options)


def join(member: str, *topics: str, instance: str | None = None, assignor: str = "sticky") -> Join:
    return Join(member, topics or ("orders",), instance, "here", assignor, 2500)


def change(group: str, *changes: Any) -> ChangeGroup:
    return ChangeGroup(group, changes)


def tp(number: int, name: str = "orders") -> TopicPartition:
    return TopicPartition(name, number)


@pytest.fixture
def log() -> ClusterLog:
    return ClusterLog()


# -- commands ------------------------------------------------------------------------------------

COMMANDS: list[AnyCommand] = [
    Nothing(),
    CreateCluster("id"),
    PutBroker("b", "host", "node"),
    topic(attempt="x"),
    AlterTopic("orders", {"retention_ms": 5, "retention_consumed": True, "retention_bytes": None}),
    DeleteTopic("orders"),
    ReplicasMade((("orders-0.1", "r1"),)),
    ReplicasRemoved((("orders-0.1", "r1"),)),
    TakeProducerIds(3),
    change("g", join("m"), Release("m", 3, (tp(0),)), Leave("m")),
    DeleteGroup("g"),
    FenceGroup("g", 3, 1_000),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_comes_back_as_it_went(command: AnyCommand) -> None:
    payload = encode_command(command)
    assert payload[0] >= 0x20
    assert decode_command(payload) == command


@pytest.mark.parametrize("payload", [b"\x10x", b"\x20", b"\x20\x01", b"\x20" + msgspec.msgpack.encode(["Never", 1])])
def test_what_cannot_be_read_is_not_skipped(payload: bytes, log: ClusterLog) -> None:
    with pytest.raises(UnknownFormatError):
        log.machine.apply(Index(1), payload)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_field_of_a_newer_release_is_not_skipped(command: AnyCommand) -> None:
    """Replicas that apply it and replicas that do not would diverge."""
    fields = msgspec.msgpack.decode(encode_command(command)[1:])
    with pytest.raises(UnknownFormatError):
        decode_command(b"\x20" + msgspec.msgpack.encode([*fields, "new"]))
    if isinstance(command, ChangeGroup):
        fields[2][0].append("new")
        with pytest.raises(UnknownFormatError):
            decode_command(b"\x20" + msgspec.msgpack.encode(fields))


def test_a_field_that_an_earlier_release_did_not_have_has_its_default() -> None:
    written = b"\x20" + msgspec.msgpack.encode(["DeleteTopic", "orders"])
    assert decode_command(written) == DeleteTopic("orders", 0)


# -- topics ----------------------------------------------------------------------------------------


def test_topics_are_made_changed_and_deleted(log: ClusterLog) -> None:
    made = log.apply(topic(replication=2))
    assert [each.group_id for each in made.partitions] == ["orders-0.1", "orders-1.1"]
    assert [each.replica_id for each in made.partitions[0].replicas] == ["r1", "r2"]
    assert (log.machine.version, dict(log.machine.topics)) == (1, {"orders": made})

    grown = log.apply(AlterTopic("orders", {"partitions": 3, "retention_ms": 7}, (("b2", "b0"),)))
    assert (grown.settings.partitions, grown.settings.retention_ms, len(grown.partitions)) == (3, 7, 3)
    assert grown.partitions[2].group_id == "orders-2.1"
    assert log.machine.version == 2
    assert log.apply(AlterTopic("orders", {"retention_ms": 7})) == grown
    assert log.machine.version == 2

    assert log.apply(DeleteTopic("orders")) is True
    assert log.apply(DeleteTopic("orders")) is False
    assert (log.machine.version, len(log.machine.topics)) == (3, 0)
    again = log.apply(topic())
    assert again.topic_id == 2
    assert again.partitions[0].group_id == "orders-0.2"


def test_a_repeated_creation_is_answered_as_the_first(log: ClusterLog) -> None:
    made = log.apply(topic(attempt="a1"))
    assert log.apply(topic(attempt="a1")) == made
    assert isinstance(log.apply(topic(attempt="a2")), TopicExistsError)
    assert isinstance(log.apply(topic()), TopicExistsError)
    assert log.apply(topic(attempt="a2", if_missing=True)) == made
    log.restart()
    assert log.apply(topic(attempt="a1")) == made
    assert log.machine.version == 1


@pytest.mark.parametrize(
    "command",
    [
        CreateTopic("t", TopicSettings(partitions=0), ()),
        CreateTopic("t", TopicSettings(partitions=2, replication=1), (("b0",),)),
        CreateTopic("t", TopicSettings(partitions=1, replication=2), (("b0",),)),
        AlterTopic("orders", {"partitions": 1}),
        AlterTopic("orders", {"partitions": None}),
        AlterTopic("orders", {"lanes": 2}),
        AlterTopic("orders", {"colour": 2}),
        AlterTopic("orders", {"partitions": 5}, (("b0",),)),
    ],
)
def test_what_cannot_be_is_an_answer_and_changes_nothing(command: AnyCommand, log: ClusterLog) -> None:
    log.apply(topic())
    before = log.machine.checkpoint()
    assert isinstance(log.apply(command), InvalidInputError)
    assert log.machine.checkpoint() == before
    assert isinstance(log.apply(AlterTopic("nope", {})), UnknownTopicError)


def test_a_coordinator_that_was_added_has_one_place_for_good(log: ClusterLog) -> None:
    assert log.apply(PlaceCoordinator("coordinator", "c2", "b2")) is None
    log.apply(PlaceCoordinator("coordinator", "c2", "b3"))  # it has a place
    log.apply(PlaceCoordinator("coordinator", "c3", "b2"))  # so has that broker
    for _ in range(2):
        assert log.machine.coordinators == {"c2": "b2"}
        assert [tuple(key) for key in log.machine.unmade] == [("coordinator", "c2")]
        log.restart()
    log.apply(ReplicasMade((("coordinator", "c2"),)))
    log.restart()
    assert (dict(log.machine.coordinators), dict(log.machine.unmade)) == ({"c2": "b2"}, {})


def test_replicas_are_unmade_then_placed_then_doomed(log: ClusterLog) -> None:
    log.apply(topic(partitions=2, replication=2))
    assert [key.group_id for key in log.machine.replicas("b1")] == ["orders-0.1", "orders-1.1"]
    assert log.machine.replica_counts() == {"b0": 2, "b1": 2}
    assert log.machine.leader_counts() == {"b0": 2}
    assert len(log.machine.unmade) == 4
    log.apply(ReplicasMade((("orders-0.1", "r1"), ("orders-0.1", "r2"), ("unknown", "r1"))))
    log.restart()
    assert {key.group_id for key in log.machine.unmade} == {"orders-1.1"}
    log.apply(DeleteTopic("orders"))
    assert (len(log.machine.unmade), len(log.machine.doomed)) == (0, 4)
    assert not log.machine.replicas("b0")
    assert log.machine.leader_counts() == {"b0": 0}
    log.apply(ReplicasRemoved(tuple((each.group_id, each.replica_id) for each in log.machine.doomed.values())[:3]))
    log.restart()
    assert len(log.machine.doomed) == 1


def test_brokers_ids_and_the_cluster(log: ClusterLog) -> None:
    assert log.apply(CreateCluster("first")) == "first"
    assert log.apply(CreateCluster("second")) == "first"
    assert log.apply(PutBroker("b", "old", "n1")).host == "old"
    log.apply(PutBroker("b", "new", "n2"))
    assert log.apply(TakeProducerIds(5)) == 1
    assert log.apply(TakeProducerIds(1)) == 6
    log.restart()
    assert log.apply(TakeProducerIds(1)) == 7
    assert (log.machine.cluster_id, log.machine.brokers["b"].host) == ("first", "new")


# -- groups ------------------------------------------------------------------------------------------


def grants(log: ClusterLog, member: str, group: str = "g") -> dict[str, int]:
    held = log.machine.groups[group].members[member].grants()
    return {str(grant.topic_partition): grant.generation for grant in held}


def test_a_grant_names_the_topic_by_its_id(log: ClusterLog) -> None:
    log.apply(topic())
    log.apply(change("g", join("a")))
    group = log.machine.groups["g"]
    before = group.members["a"].grants()
    assert {grant.topic_id for grant in before} == {1}
    log.apply(DeleteTopic("orders"))
    assert group.assignment("a", log.machine.topics).missing == ("orders",)
    assert group.members["a"].grants() == ()
    log.apply(topic())
    again = group.members["a"].grants()
    assert {grant.topic_id for grant in again} == {2}
    assert min(grant.generation for grant in again) > max(grant.generation for grant in before)
    assert group.assignment("a", log.machine.topics).missing == ()
    log.restart()
    assert log.machine.groups["g"].members["a"].grants() == again


def test_what_is_owned_of_a_deleted_topic_is_not_owned_of_the_next_one(log: ClusterLog) -> None:
    """A member that has still to let go of a partition whose topic it does not want any more."""
    log.apply(topic())
    log.apply(topic("audit", partitions=1))
    log.apply(change("g", join("a")))
    log.apply(change("g", join("a", "audit")))
    group = log.machine.groups["g"]
    assert set(group.members["a"].surplus()) == {tp(0), tp(1)}
    log.apply(DeleteTopic("orders"))
    log.apply(topic())
    log.apply(change("g", join("b")))
    assert {grant.topic_id for grant in group.members["b"].grants()} == {3}, "nobody has to let go of these"


def test_rows_of_a_release_that_did_not_know_ids_are_read(log: ClusterLog) -> None:
    log.apply(topic())
    log.apply(change("g", join("a")))
    key, row = next(iter(log.store.scan(META, b"m", b"n")))
    fields = msgspec.msgpack.decode(row)
    fields[3] = [grant[:3] for grant in fields[3]]
    log.store.put(META, key, msgspec.msgpack.encode(fields))
    known = log.machine.groups["g"].members["a"].grants()
    log.restart()
    assert log.machine.groups["g"].members["a"].grants() == known


def test_a_partition_moves_only_after_its_owner_let_go(log: ClusterLog) -> None:
    log.apply(topic(partitions=4))
    log.apply(change("g", join("a")))
    assert grants(log, "a") == dict.fromkeys(["orders-0", "orders-1", "orders-2", "orders-3"], 1)
    log.apply(change("g", join("b")))
    group = log.machine.groups["g"]
    assert grants(log, "a") == {"orders-0": 1, "orders-1": 1}
    assert grants(log, "b") == {}
    assert (group.rebalancing, group.info().state) == (True, "rebalancing")
    log.apply(change("g", Release("a", 2, (tp(2),))))
    assert grants(log, "b") == {"orders-2": 3}
    log.apply(change("g", Release("a", 2, (tp(3), tp(0)))))  # it is meant to keep the first
    assert grants(log, "b") == {"orders-2": 3, "orders-3": 4}
    assert grants(log, "a") == {"orders-0": 1, "orders-1": 1}
    assert group.info().state == "stable"


def test_a_release_by_who_was_not_told_is_void(log: ClusterLog) -> None:
    log.apply(topic(partitions=2))
    log.apply(change("g", join("a")))
    log.apply(change("g", join("b")))
    before = log.machine.checkpoint()
    log.apply(change("g", Release("a", 1, (tp(1),))))
    assert log.machine.checkpoint() == before
    log.apply(change("g", Release("a", 2, (tp(1),))))
    assert grants(log, "b") == {"orders-1": 3}


def test_who_leaves_frees_at_once_and_a_group_keeps_its_generation(log: ClusterLog) -> None:
    log.apply(topic(partitions=2))
    log.apply(change("g", join("a"), join("b")))
    assert log.machine.groups["g"].generation == 1
    log.apply(change("g", Leave("a")))
    assert grants(log, "b") == {"orders-0": 2, "orders-1": 1}
    log.apply(change("g", Leave("b"), Leave("never")))
    assert log.machine.groups["g"].info().state == "empty"
    log.restart()
    log.apply(change("g", join("c")))
    assert grants(log, "c") == {"orders-0": 4, "orders-1": 4}


def test_a_group_that_is_made_again_goes_on_after_the_old_one(log: ClusterLog) -> None:
    log.apply(topic())
    log.apply(change("g", join("a")))
    assert isinstance(log.apply(DeleteGroup("g")), GroupNotEmptyError)
    log.apply(change("g", Leave("a")))
    assert log.apply(DeleteGroup("g")) == DeletedGroup(True, 2)
    assert log.apply(DeleteGroup("g")) == DeletedGroup(False, 2)
    log.restart()
    log.apply(change("g", join("b")))
    assert log.machine.groups["g"].generation == 3


def test_a_fence_is_above_all_before_it_and_below_whoever_joins_later(log: ClusterLog) -> None:
    log.apply(topic())
    log.apply(change("g", join("a")))
    for refused in (FenceGroup("g", log.machine.groups["g"].born), FenceGroup("g", 99), FenceGroup("never", 0)):
        before = log.machine.checkpoint()
        assert isinstance(log.apply(refused), GroupNotEmptyError | UnknownGroupError)
        assert log.machine.checkpoint() == before
    log.apply(change("g", Leave("a")))
    last, born = log.machine.groups["g"].generation, log.machine.groups["g"].born
    fence = log.apply(FenceGroup("g", born))
    assert fence == last + 1
    log.restart()
    assert log.apply(FenceGroup("g", born)) == fence + 1, "it is written down"
    log.apply(change("other", join("x")))
    log.apply(change("other", Leave("x")))
    for _ in range(9):
        high = log.apply(FenceGroup("other", log.machine.groups["other"].born))
    log.apply(DeleteGroup("other"))
    fence = log.apply(FenceGroup("g", born))
    assert fence > high, "also above what was deleted, or partitions that do not know the group refuse it"
    log.apply(change("g", join("b")))
    assert min(grants(log, "b").values()) > fence


def test_a_static_member_takes_its_predecessors_place_with_a_newer_generation(log: ClusterLog) -> None:
    log.apply(topic(partitions=6))
    for assignor, group in (("sticky", "s"), ("range", "r")):
        log.apply(change(group, *(join(f"m{n}", instance=f"i{n}", assignor=assignor) for n in range(3))))
        before = {n: grants(log, f"m{n}", group) for n in range(3)}
        log.apply(change(group, join("other", instance="i1", assignor=assignor)))
        assert set(grants(log, "other", group)) == set(before[1])
        assert set(grants(log, "other", group).values()) == {2}
        assert {n: grants(log, f"m{n}", group) for n in (0, 2)} == {0: before[0], 2: before[2]}
        assert "m1" not in log.machine.groups[group].members
        # Several in one step: the last one has it.
        log.apply(change(group, *(join(f"n{n}", instance="i1", assignor=assignor) for n in range(3))))
        assert set(grants(log, "n2", group)) == set(before[1])
        assert set(log.machine.groups[group].members) == {"m0", "m2", "n2"}


def test_groups_follow_their_topics(log: ClusterLog) -> None:
    log.apply(change("g", join("a", "orders", "later")))
    assert grants(log, "a") == {}
    log.apply(topic(partitions=1))
    assert grants(log, "a") == {"orders-0": 2}
    log.apply(AlterTopic("orders", {"partitions": 2}, (("b0",),)))
    assert grants(log, "a") == {"orders-0": 2, "orders-1": 3}
    log.apply(topic("unrelated"))
    assert log.machine.groups["g"].generation == 3
    log.apply(DeleteTopic("orders"))
    assert (grants(log, "a"), log.machine.groups["g"].owners) == ({}, {})
    log.apply(topic(partitions=1))
    assert grants(log, "a") == {"orders-0": 5}


def test_other_wishes_give_other_partitions(log: ClusterLog) -> None:
    log.apply(topic("x"))
    log.apply(topic("y"))
    log.apply(change("g", join("a", "x")))
    log.apply(change("g", join("a", "y")))
    assert grants(log, "a") == {"y-0": 2, "y-1": 2}
    assert log.machine.groups["g"].rebalancing
    log.apply(change("g", Release("a", 2, (tp(0, "x"), tp(1, "x")))))
    assert not log.machine.groups["g"].owners.keys() & {tp(0, "x"), tp(1, "x")}
    before = log.machine.checkpoint()
    log.apply(change("g", join("a", "y")))
    assert log.machine.checkpoint() == before


def test_the_first_member_decides_on_the_assignor(log: ClusterLog) -> None:
    log.apply(topic())
    log.apply(change("g", join("a", assignor="range")))
    (refused,) = log.apply(change("g", join("b", assignor="sticky")))
    assert isinstance(refused, InvalidInputError)
    (refused,) = log.apply(change("h", join("b", assignor="dice")))
    assert isinstance(refused, InvalidInputError)
    assert set(log.machine.groups) == {"g"}
    log.apply(change("g", Leave("a")))
    assert log.apply(change("g", join("b", assignor="sticky"))) == (None,)


def test_balanced_goes_along_in_a_group_that_began_with_sticky(log: ClusterLog) -> None:
    """Members of before an upgrade are still in the group when those of after it come."""
    log.apply(topic())
    log.apply(change("g", join("old", assignor="sticky")))
    assert log.apply(change("g", join("new", assignor="balanced"))) == (None,)
    assert log.machine.groups["g"].assignor == "sticky"
    log.apply(change("g", Leave("old"), Leave("new")))
    log.apply(change("g", join("new", assignor="balanced")))
    assert log.machine.groups["g"].assignor == "balanced"
    (refused,) = log.apply(change("g", join("old", assignor="sticky")))
    assert isinstance(refused, InvalidInputError)


# -- the store --------------------------------------------------------------------------------------------


def random_command(rng: Random, log: ClusterLog) -> AnyCommand:
    name, group, member = rng.choice("xyz"), rng.choice("gh"), f"m{rng.randrange(6)}"
    known = log.machine.topics.get(name)
    there = log.machine.groups.get(group)
    kind = rng.randrange(8)
    if kind == 0 or known is None:
        return topic(name, rng.randint(1, 5))
    if kind == 1:
        new = rng.randint(0, 2)
        return AlterTopic(name, {"partitions": len(known.partitions) + new}, (("b1",),) * new)
    if kind == 2 and rng.random() < 0.3:
        return DeleteTopic(name)
    if kind == 3:
        return TakeProducerIds(rng.randint(1, 5))
    if kind == 4 and there is not None and there.members:
        each = there.members[rng.choice(sorted(there.members))]
        return change(group, Release(each.member, there.generation, tuple(each.surplus())))
    if kind == 5:
        return change(group, Leave(member))
    if kind == 6 and rng.random() < 0.3:
        return DeleteGroup(group)
    if kind == 6 and there is not None:
        return FenceGroup(group, there.born)
    wishes = [each for each in "xyz" if rng.random() < 0.7]
    return change(group, Join(member, tuple(wishes), rng.choice((None, "i1", "i2")), "", "balanced", 1000))


def state_of(machine: ClusterMachine) -> Any:
    groups = {name: (each.info(), each.owners, each.instances) for name, each in sorted(machine.groups.items())}
    changed = {
        (name, member): (each.changed_at, each.owned)
        for name, group in machine.groups.items()
        for member, each in group.members.items()
    }
    return (dict(machine.topics), groups, changed, dict(machine.unmade), dict(machine.doomed), machine.version)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_restart_and_checkpoint_give_the_same_state(seed: int) -> None:
    rng = Random(seed)
    log, never_restarted = ClusterLog(), ClusterLog()
    for number in range(120):
        command = random_command(rng, log)
        answer = log.apply(command)
        other = never_restarted.apply(command)
        assert (type(answer), str(answer)) == (type(other), str(other))
        for group in log.machine.groups.values():
            for member in group.members.values():
                assert all(group.owners[each] == member.member for each in member.owned)
                assert all(each in group.owners for each in member.target)
            assert len(group.owners) == sum(len(member.owned) for member in group.members.values())
        if number % 10 == 0:
            log.restart()
        assert log.machine.checkpoint() == never_restarted.machine.checkpoint()
        assert state_of(log.machine) == state_of(never_restarted.machine)
    restored = ClusterMachine(MemoryStore(GroupId("coordinator"), ReplicaId("c2"), COORDINATOR))
    restored.restore(log.machine.checkpoint())
    assert state_of(restored) == state_of(log.machine)
    assert restored.checkpoint() == log.machine.checkpoint()


def test_a_damaged_checkpoint_is_refused(log: ClusterLog) -> None:
    log.apply(topic())
    state = bytearray(log.machine.checkpoint())
    state[-1] ^= 1
    with pytest.raises(InvariantBrokenError):
        log.machine.restore(bytes(state))


def test_a_newer_checkpoint_is_refused(log: ClusterLog) -> None:
    body = bytes([COORDINATOR.version + 1]) + log.machine.checkpoint()[5:]
    with pytest.raises(UnknownFormatError, match="version 4, this release reads up to 3"):
        log.machine.restore(crc32c(body).to_bytes(4, "little") + body)


@pytest.mark.slow
def test_ten_thousand_commands_stay_small_on_disk(tmp_path: Path) -> None:
    """No reader needs the coordinator's log, so what is applied goes with the next checkpoint."""
    store = LmdbStore.create(tmp_path / "c1", GroupId("coordinator"), ReplicaId("c1"), schema=COORDINATOR)
    RaftEngine.bootstrap(store, ReplicaSet.of(["c1"]))
    machine = ClusterMachine(store)
    engine = RaftEngine(store, machine, RaftSettings(), Random(1), 0.0)
    now, written, answered = 0.0, 0, 0
    payloads = [
        encode_command(topic(partitions=20)),
        encode_command(change("g", *(join(f"m{number}") for number in range(5)))),
        *(
            encode_command(change("g", Leave("m0") if number % 2 else join("m0", "orders", "x" * 100)))
            for number in range(10_000)
        ),
    ]
    biggest_log = 0
    for _ in range(100_000):
        now += 0.01
        if engine.is_leader:
            for payload in payloads[written : written + 100]:
                engine.propose(payload, object())
                written += 1
        ready = engine.step(now)
        answered += len(ready.done)
        if store.dirty:
            store.sync()
        engine.synced()
        engine.maintain(SEGMENT_BYTES // 4, 10_000)
        biggest_log = max(biggest_log, store.last_index - store.base_index)
        if answered == len(payloads):
            break
    assert answered == len(payloads)
    assert biggest_log < 5_000
    assert store.size_bytes() < 8 << 20
    before = machine.checkpoint()
    store.sync()
    store.close()
    reopened = LmdbStore.open(tmp_path / "c1", GroupId("coordinator"), ReplicaId("c1"), schema=COORDINATOR)
    assert ClusterMachine(reopened).checkpoint() == before
    assert set(ClusterMachine(reopened).groups["g"].members) == {f"m{number}" for number in range(1, 5)}
    reopened.close()
