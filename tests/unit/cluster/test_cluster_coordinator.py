"""The coordinator's service: sessions, parked heartbeats, joins in one step, failover."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rayqueue.cluster import commands, memberships
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    LeadershipLostError,
    NoBrokerError,
    NotLeaderError,
    QueueFullError,
    RayQueueError,
    TopicExistsError,
    TopicRecreatedError,
    UnknownGroupError,
    UnknownMemberError,
    UnknownTopicError,
)
from rayqueue.protocol.calls import (
    AlterTopic,
    Assignment,
    CoordinatorCall,
    CreateTopic,
    DeletedGroup,
    DeleteGroup,
    DeleteTopic,
    DescribeCluster,
    DescribeGroup,
    FenceGroup,
    GetStatus,
    GetTopics,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    NewProducerIds,
)
from rayqueue.protocol.topics import TopicPartition, TopicSettings
from tests.unit.cluster.cluster_state import SEALS, ClusterLog, Service


def create(name: str = "t", partitions: int = 4, **options: Any) -> CreateTopic:
    return CreateTopic(name=name, settings=TopicSettings(partitions=partitions), **options)


def tp(number: int) -> TopicPartition:
    return TopicPartition("t", number)


def partitions(assignment: Assignment) -> list[int]:
    return [grant.partition for grant in assignment.grants]


@pytest.fixture
def service() -> Service:
    service = Service()
    service.ask(create())
    return service


# -- topics --------------------------------------------------------------------------------------------


def test_topics_from_calls(service: Service) -> None:
    made = service.ask(create("u", 3, attempt="1")).answer
    assert len(made.partitions) == 3
    assert {replica.broker for replica in made.partitions[0].replicas} == {"b0", "b1", "b2"}
    assert service.ask(create("u", 3, attempt="1")).answer == made
    assert service.ask(create("u", 9, if_missing=True)).answer == made
    assert isinstance(service.ask(create("u", 3, attempt="2")).answer, TopicExistsError)
    assert (
        len(service.ask(AlterTopic(name="u", topic_id=made.topic_id, changes={"partitions": 5})).answer.partitions) == 5
    )
    assert isinstance(service.ask(AlterTopic(name="x", topic_id=1, changes={})).answer, UnknownTopicError)
    found = service.ask(GetTopics(names=("u", "nope"))).answer
    assert ([info.name for info in found.topics], found.version) == (["u"], 3)
    assert [info.name for info in service.ask(GetTopics()).answer.topics] == ["t", "u"]
    assert service.ask(DeleteTopic(name="u", topic_id=made.topic_id)).answer is True
    assert service.ask(DeleteTopic(name="u", topic_id=made.topic_id)).answer is False
    info = service.ask(DescribeCluster()).answer
    assert (info.coordinator, info.term, info.topics, info.partitions) == ("c1", 1, 1, 4)


def test_topics_made_at_the_same_time_are_placed_one_after_the_other(service: Service) -> None:
    service.held = True
    asked = [service.ask(CreateTopic(name=f"u{n}", settings=TopicSettings(replication=1))) for n in range(6)]
    service.commit()
    brokers = [each.answer.partitions[0].replicas[0].broker for each in asked]
    assert sorted(brokers) == ["b0", "b0", "b1", "b1", "b2", "b2"]


@pytest.mark.parametrize(
    "call",
    [
        create("no spaces"),
        create("x", 0),
        create("x", 2_000_000),
        create("x", attempt="a" * 1000),
        AlterTopic(name="t", topic_id=1, changes={"partitions": 1}),
        AlterTopic(name="t", topic_id=1, changes={"nope": 1}),
        AlterTopic(name="t", topic_id=1, changes={"partitions": None}),
        DeleteTopic(name="", topic_id=1),
        NewProducerIds(count=0),
        NewProducerIds(count=10**9),
        JoinGroup(group="no spaces", member="m", topics=()),
        JoinGroup(group="g", member="", topics=()),
        JoinGroup(group="g", member="m" * 300, topics=()),
        JoinGroup(group="g", member="m", topics=("bad name",)),
        JoinGroup(group="g", member="m", topics=("t",), instance=""),
        JoinGroup(group="g", member="m", topics=("t",), session_timeout_ms=1),
        JoinGroup(group="g", member="m", topics=("t",), assignor="dice"),
        JoinGroup(group="g", member="m", topics=tuple(f"t{n}" for n in range(2000))),
        DeleteGroup(group="", born=1),
        FenceGroup(group="", born=1),
        GetStatus(),
    ],
)
def test_what_cannot_be_is_refused(call: CoordinatorCall, service: Service) -> None:
    before = service.log.machine.checkpoint()
    asked = service.ask(call)
    service.pass_time(1)
    assert isinstance(asked.answer, InvalidInputError)
    assert service.log.machine.checkpoint() == before


def test_limits() -> None:
    service = Service(max_topics=1, max_partitions=5, max_groups=1, max_group_members=2)
    assert isinstance(service.ask(create("x", 6)).answer, InvalidInputError)
    service.ask(create("x", 5))
    assert isinstance(service.ask(create("y", 1)).answer, InvalidInputError)
    assert isinstance(
        service.ask(AlterTopic(name="x", topic_id=1, changes={"partitions": 6})).answer, InvalidInputError
    )
    service.join("a", "x")
    service.join("b", "x")
    assert isinstance(service.join("c", "x"), InvalidInputError)
    assert isinstance(service.join("c", "x", group="h"), InvalidInputError)
    assert isinstance(service.join("a"), Assignment)  # a member may wish for something else


def test_what_a_groups_members_want_is_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignor reads all wishes while the log is applied. Members that want the same cost nothing more."""
    monkeypatch.setattr(memberships, "MAX_WISHES", 10)
    service = Service(join_window_ms=60)
    many = tuple(f"t{n}" for n in range(6))
    together = [service.ask(JoinGroup(group="g", member=f"m{n}", topics=many)) for n in range(5)]
    other = service.ask(JoinGroup(group="g", member="other", topics=(*many, "more")))
    service.pass_time(0.1)
    assert all(isinstance(each.answer, Assignment) for each in together)
    assert isinstance(other.answer, InvalidInputError)
    later = Service(service.log)  # another leader, with the same bounds
    assert isinstance(later.join("other", "x", "y"), Assignment)
    assert isinstance(later.join("third", "x", "y", "z"), InvalidInputError)
    assert isinstance(later.join("third", "x", "y"), Assignment)
    later.ask(LeaveGroup(group="g", member="other"))
    later.ask(LeaveGroup(group="g", member="third"))
    assert isinstance(later.join("third", "x", "y", "z"), Assignment)


def test_sticky_is_for_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "MAX_STICKY_MEMBERS", 2)
    service = Service()
    assert isinstance(service.join("a", assignor="sticky"), Assignment)
    assert isinstance(service.join("b", assignor="sticky"), Assignment)
    refused = service.join("c", assignor="sticky")
    assert isinstance(refused, InvalidInputError)
    assert "balanced" in str(refused)
    assert isinstance(service.join("b", "x", assignor="sticky"), Assignment)


def test_without_a_broker_nothing_is_made(service: Service) -> None:
    service.coordinator.set_brokers(service.now, ())
    assert isinstance(service.ask(create("u")).answer, NoBrokerError)


@pytest.mark.slow
def test_a_topic_too_large_for_one_entry_is_refused(service: Service) -> None:
    service.coordinator.set_brokers(service.now, [each._replace(broker=each.broker * 60) for each in _alive()])
    settings = TopicSettings(partitions=4_000, replication=7)
    assert isinstance(service.ask(CreateTopic(name="u", settings=settings)).answer, InvalidInputError)


def _alive() -> Any:
    from tests.unit.cluster.cluster_state import BROKERS

    return BROKERS


def test_producer_ids_are_never_the_same(service: Service) -> None:
    first = service.ask(NewProducerIds(count=3)).answer
    assert service.ask(NewProducerIds()).answer == first + 3


# -- groups ----------------------------------------------------------------------------------------------


def test_a_rebalance_from_join_to_read(service: Service) -> None:
    a = service.join("a", "t")
    assert partitions(a) == [0, 1, 2, 3]
    waiting = service.beat("a", a.generation, *map(tp, range(4)), wait_ms=400)
    b = service.join("b", "t", client=2)
    assert partitions(b) == []
    assert b.rebalancing
    told = waiting.answer  # at once: it must let go of something
    assert partitions(told) == [0, 1]
    news = service.beat("b", b.generation, client=2, wait_ms=400)
    still = service.beat("a", told.generation, tp(0), tp(1), tp(2), tp(3)).answer
    assert partitions(still) == [0, 1]
    assert not news.given
    service.beat("a", told.generation, tp(0), tp(1), tp(3))
    assert partitions(news.answer) == [2]
    news = service.beat("b", news.answer.generation, tp(2), client=2, wait_ms=400)
    service.beat("a", told.generation, tp(0), tp(1))
    assert partitions(news.answer) == [2, 3]
    assert service.ask(DescribeGroup(group="g")).answer.state == "stable"


def test_heartbeats_write_nothing(service: Service) -> None:
    a = service.join("a", "t")
    before = service.proposals
    for _ in range(50):
        service.beat("a", a.generation, *map(tp, range(4)))
        service.pass_time(0.5)
    assert service.proposals == before
    assert service.join("a", "t") == a  # nor does a join that asks for nothing new
    assert service.proposals == before


def test_a_waiting_heartbeat_is_answered_in_time_for_the_next(service: Service) -> None:
    a = service.join("a", "t", session_timeout_ms=900)
    waiting = service.beat("a", a.generation, wait_ms=5000)
    service.pass_time(0.29)
    assert not waiting.given
    service.pass_time(0.02)
    assert waiting.answer == a
    older = service.beat("a", a.generation, wait_ms=5000)
    newer = service.beat("a", a.generation, wait_ms=5000)
    assert older.answer == a  # asking again makes the older question void
    assert not newer.given


def test_who_is_silent_is_out(service: Service) -> None:
    service.join("a", "t", session_timeout_ms=1000)
    b = service.join("b", "t", session_timeout_ms=5000, client=2)
    waiting = service.beat("b", b.generation, client=2, wait_ms=1600)
    service.pass_time(0.99)
    assert set(service.log.machine.groups["g"].members) == {"a", "b"}
    service.pass_time(0.02)
    assert set(service.log.machine.groups["g"].members) == {"b"}
    assert partitions(waiting.answer) == [0, 1, 2, 3]
    assert isinstance(service.beat("a", 1).answer, UnknownMemberError)


def test_time_in_which_the_coordinator_did_not_run_is_nobodys_silence(service: Service) -> None:
    a = service.join("a", "t", session_timeout_ms=1000)
    service.join("b", "t", session_timeout_ms=1000)
    service.now += 10
    service.coordinator.tick(service.now)  # before it has read what they sent meanwhile
    assert partitions(service.beat("a", a.generation, *map(tp, range(4))).answer) == [0, 1]
    service.pass_time(0.9)
    service.beat("a", a.generation)
    service.pass_time(0.2)
    assert set(service.log.machine.groups["g"].members) == {"a"}


def test_who_is_heard_of_in_time_is_not_thrown_out(service: Service) -> None:
    """The eviction waits for a step that is under way, and the member turns out to live."""
    a = service.join("a", "t", session_timeout_ms=1000)
    service.pass_time(0.95)
    service.held = True
    joining = service.ask(JoinGroup(group="g", member="b", topics=("t",)))
    service.pass_time(0.1)
    service.beat("a", a.generation, *map(tp, range(4)))
    service.held = False
    service.commit()
    service.pass_time(0.1)
    assert set(service.log.machine.groups["g"].members) == {"a", "b"}
    assert isinstance(joining.answer, Assignment)


def test_a_member_that_waits_for_its_join_is_not_silent(service: Service) -> None:
    a = service.join("a", "t", session_timeout_ms=1000)
    service.held = True
    joining = service.ask(JoinGroup(group="g", member="a", topics=(), generation=a.generation))
    service.pass_time(3)
    service.held = False
    service.commit()
    assert joining.answer.generation == a.generation + 1
    service.pass_time(0.9)
    assert "a" in service.log.machine.groups["g"].members


def test_only_a_member_may_wish_for_something_else(service: Service) -> None:
    a = service.join("a", "t", session_timeout_ms=1000)
    again = JoinGroup(group="g", member="a", topics=("t",), generation=a.generation)
    service.pass_time(2)
    assert isinstance(service.ask(again).answer, UnknownMemberError)
    service.join("b", "t", session_timeout_ms=1000)
    service.held = True
    asked = [service.ask(LeaveGroup(group="g", member="b")), service.ask(again)]
    service.commit()
    service.held = False
    service.pass_time(0.1)
    assert isinstance(asked[1].answer, UnknownMemberError)
    assert not service.log.machine.groups["g"].members


def test_a_broken_connection_ends_a_session_after_the_grace(service: Service) -> None:
    a = service.join("a", "t", client=7)
    b = service.join("b", "t", client=8)
    service.join("s", "t", client=7, instance="static")
    waiting = service.beat("a", a.generation, client=7, wait_ms=400)
    service.coordinator.disconnected(service.now, 7)
    service.coordinator.disconnected(service.now, 8)
    service.pass_time(0.2)
    service.beat("b", b.generation, client=9)  # it is back, on another connection
    service.pass_time(0.2)
    assert set(service.log.machine.groups["g"].members) == {"b", "s"}  # a static one may take its time
    assert not waiting.given or isinstance(waiting.answer, Assignment)
    service.coordinator.disconnected(service.now, 8)  # the old connection means nothing any more
    service.pass_time(1)
    assert "b" in service.log.machine.groups["g"].members


def test_a_member_that_is_gone_before_it_has_joined(service: Service) -> None:
    service.held = True
    service.ask(JoinGroup(group="g", member="a", topics=("t",)), client=5)
    service.pass_time(0)
    service.coordinator.disconnected(service.now, 5)
    service.commit()
    assert set(service.log.machine.groups["g"].members) == {"a"}
    service.held = False
    service.pass_time(0.5)
    assert not service.log.machine.groups["g"].members


def test_a_delete_that_is_repeated_does_not_meet_what_was_made_since(service: Service) -> None:
    """Its answer was lost, somebody made the topic, or the group, again, and the same call comes a second time."""
    first = service.ask(create("u", 3)).answer
    delete = DeleteTopic(name="u", topic_id=first.topic_id)
    assert service.ask(delete).answer is True
    second = service.ask(create("u", 3)).answer
    assert service.ask(delete).answer is False
    alter = AlterTopic(name="u", topic_id=first.topic_id, changes={"retention_ms": 1})
    assert isinstance(service.ask(alter).answer, TopicRecreatedError)
    assert service.ask(GetTopics(names=("u",))).answer.topics == (second,)

    service.join("a", "t")
    service.ask(LeaveGroup(group="g", member="a"))
    born = service.ask(DescribeGroup(group="g")).answer.born
    delete_group = DeleteGroup(group="g", born=born)
    assert service.ask(delete_group).answer.existed
    assert not service.ask(delete_group).answer.existed
    service.join("b", "t")
    service.ask(LeaveGroup(group="g", member="b"))
    again = service.ask(DescribeGroup(group="g")).answer
    assert again.born > born
    assert not service.ask(delete_group).answer.existed
    assert service.ask(DescribeGroup(group="g")).answer == again


def test_a_change_that_meets_another_topic_when_it_is_applied_changes_nothing(service: Service) -> None:
    """It was checked against the old topic, and the log has the new one before it."""
    service.ask(create("u", 3))
    info = service.log.machine.topics["u"]
    service.log.apply(commands.DeleteTopic("u", info.topic_id))
    service.log.apply(commands.CreateTopic("u", info.settings, (("b0", "b1", "b2"),) * 3))
    refused = service.log.apply(commands.AlterTopic("u", {"retention_ms": 1}, (), info.topic_id))
    assert isinstance(refused, TopicRecreatedError)
    assert service.log.apply(commands.DeleteTopic("u", info.topic_id)) is False


def test_generations_are_above_all_that_were_ever_deleted(service: Service) -> None:
    """Partitions keep one floor for all groups: whoever comes with a generation up to it is of a life that is over."""
    for number in range(6):
        service.join(f"m{number}", "t", group="long", client=number)
    kept = service.join("x", "t", group="kept")
    for number in range(6):
        service.ask(LeaveGroup(group="long", member=f"m{number}"))
    born = service.ask(DescribeGroup(group="long")).answer.born
    floor = service.ask(DeleteGroup(group="long", born=born)).answer.generation
    assert floor > kept.generation
    new = service.join("y", "t", group="new")
    later = service.join("z", "t", group="kept")
    assert min(new.generation, later.generation) > floor
    assert service.ask(DeleteGroup(group="never", born=None)).answer == DeletedGroup(False, floor, SEALS.floor(floor))


def test_leaving(service: Service) -> None:
    a = service.join("a", "t")
    service.join("b", "t", client=2)
    assert isinstance(service.ask(DeleteGroup(group="g", born=1)).answer, GroupNotEmptyError)
    waiting = service.beat("a", a.generation + 1, tp(0), tp(1), wait_ms=400)
    assert service.ask(LeaveGroup(group="g", member="b")).answer is None
    assert partitions(waiting.answer) == [0, 1, 2, 3]
    assert service.ask(LeaveGroup(group="g", member="b")).answer is None
    assert service.ask(LeaveGroup(group="never", member="b")).answer is None
    service.ask(LeaveGroup(group="g", member="a"))
    assert [group.state for group in service.ask(ListGroups()).answer] == ["empty"]
    last = service.log.machine.groups["g"].generation
    assert service.ask(DeleteGroup(group="g", born=1)).answer == DeletedGroup(True, last, SEALS.floor(last))
    assert isinstance(service.ask(DescribeGroup(group="g")).answer, UnknownGroupError)


def test_leaving_before_having_joined() -> None:
    service = Service(join_window_ms=60)
    joining = service.ask(JoinGroup(group="g", member="a", topics=("t",)))
    assert service.ask(LeaveGroup(group="g", member="a")).answer is None
    assert isinstance(joining.answer, UnknownMemberError)
    service.pass_time(1)
    assert "g" not in service.log.machine.groups


def test_a_static_member_comes_back(service: Service) -> None:
    first = service.join("a1", "t", instance="a")
    waiting = service.beat("a1", first.generation, *map(tp, range(4)), wait_ms=400)
    second = service.join("a2", "t", instance="a", client=2)
    assert isinstance(waiting.answer, UnknownMemberError)
    assert partitions(second) == [0, 1, 2, 3]
    assert {grant.generation for grant in second.grants} == {first.generation + 1}


# -- crowds -------------------------------------------------------------------------------------------------


def settle(service: Service, members: dict[str, Assignment]) -> int:
    """Let all members do as they are told until nothing moves. How many grants were new to a member."""
    reading: dict[str, set[TopicPartition]] = {name: set() for name in members}
    moves = 0
    for _ in range(100):
        before = dict(members)
        for name, assignment in before.items():
            granted = {grant.topic_partition for grant in assignment.grants}
            moves += len(granted - reading[name])
            reading[name] = granted
            call = Heartbeat(group="g", member=name, generation=assignment.generation, reading=assignment.grants)
            answer = service.ask(call).answer
            if isinstance(answer, Assignment):
                members[name] = answer
        if members == before:
            return moves
    raise AssertionError("it never comes to rest")


def test_members_that_start_together_share_in_one_step() -> None:
    service = Service(join_window_ms=60)
    service.ask(create(partitions=100))
    asked = {}
    for number in range(20):
        asked[f"m{number}"] = service.ask(JoinGroup(group="g", member=f"m{number}", topics=("t",)))
        service.pass_time(0.002)
    before = service.proposals
    service.pass_time(0.06)
    members = {name: each.answer for name, each in asked.items()}
    assert service.proposals - before <= 1
    assert all(len(each.grants) == 5 for each in members.values())
    assert settle(service, members) == 100  # each partition was granted once


def test_members_that_come_while_a_step_is_under_way_are_the_next_step(service: Service) -> None:
    service.join("a", "t")
    service.held = True
    asked = [service.ask(JoinGroup(group="g", member=f"m{n}", topics=("t",))) for n in range(3)]
    service.ask(LeaveGroup(group="g", member="a"))
    service.pass_time(1)
    before = service.proposals
    service.commit()
    service.held = False
    service.pass_time(1)
    assert service.proposals - before <= 1
    assert all(isinstance(each.answer, Assignment) for each in asked)
    assert set(service.log.machine.groups["g"].members) == {"m0", "m1", "m2"}


def test_members_that_join_one_by_one_move_no_more_than_they_must(service: Service) -> None:
    service.ask(AlterTopic(name="t", topic_id=1, changes={"partitions": 60}))
    members: dict[str, Assignment] = {}
    for number in range(6):
        members[f"m{number}"] = service.join(f"m{number}", "t")
    moves = settle(service, members)
    assert [len(each.grants) for each in members.values()] == [10] * 6
    assert moves == 60 + 50  # the first one has had all; each partition that moves does so once


@pytest.mark.slow
def test_ten_thousand_members_cost_nothing_per_tick() -> None:
    service = Service(join_window_ms=60)
    for number in range(100):
        for member in range(100):
            call = JoinGroup(group=f"g{number}", member=f"m{member}", topics=(), session_timeout_ms=60_000)
            service.ask(call, client=number)
    service.pass_time(0.06)
    assert sum(len(group.members) for group in service.log.machine.groups.values()) == 10_000
    started = time.process_time()
    for _ in range(10_000):
        service.now += 0.001
        service.coordinator.tick(service.now)
    assert time.process_time() - started < 0.5


# -- leadership ------------------------------------------------------------------------------------------------


def test_a_new_leader_gives_everybody_a_whole_session(service: Service) -> None:
    a = service.join("a", "t", session_timeout_ms=1000)
    service.pass_time(0.9)
    other = Service(service.log)
    other.now = service.now
    other.coordinator.lead(other.now)
    other.pass_time(0.9)
    assert other.beat("a", a.generation, *map(tp, range(4))).answer == a
    other.pass_time(0.9)
    assert "a" in other.log.machine.groups["g"].members
    other.pass_time(0.2)
    assert "a" not in other.log.machine.groups["g"].members


def test_calls_wait_until_a_new_leader_knows_its_predecessors_state() -> None:
    log = ClusterLog()
    service = Service(log)
    service.ask(create())
    service.held = True
    service.coordinator.lead(service.now)
    asked = service.ask(GetTopics())
    other = service.ask(GetTopics(), client=9)
    service.coordinator.disconnected(service.now, 9)
    assert not asked.given
    service.commit()
    assert len(asked.answer.topics) == 1
    assert not other.given


def test_who_waits_is_told_when_leadership_is_lost(service: Service) -> None:
    a = service.join("a", "t")
    waiting = service.beat("a", a.generation, wait_ms=400)
    service.held = True
    asked = [
        service.ask(JoinGroup(group="g", member="b", topics=("t",))),
        service.ask(LeaveGroup(group="g", member="a")),
        service.ask(create("u")),
        service.ask(create("v")),
        service.ask(NewProducerIds()),
    ]
    service.pass_time(0.1)
    service.coordinator.unlead()
    service.fail(LeadershipLostError("lost"))
    for each in (waiting, *asked):
        assert isinstance(each.answer, NotLeaderError | LeadershipLostError)
    assert isinstance(service.ask(GetTopics()).answer, NotLeaderError)
    assert service.coordinator.next_deadline_s == float("inf")
    service.coordinator.tick(service.now + 100)


def test_a_deposed_leader_throws_nobody_out(service: Service) -> None:
    """It does not know a member that its successor has taken in, and may not say so."""
    service.confirms = []
    asked = [service.beat("new", 3), service.ask(LeaveGroup(group="g", member="new")), service.ask(GetTopics())]
    assert not any(each.given for each in asked)
    for answer in service.confirms:
        answer(NotLeaderError("deposed"))
    assert all(isinstance(each.answer, NotLeaderError) for each in asked)


def test_an_eviction_that_could_not_be_written_comes_again(service: Service) -> None:
    service.join("a", "t", session_timeout_ms=1000)
    service.refuse = QueueFullError("full")
    service.pass_time(2)
    refused = service.ask(JoinGroup(group="g", member="b", topics=("t",)))
    service.pass_time(0.1)
    assert isinstance(refused.answer, QueueFullError)
    assert "a" in service.log.machine.groups["g"].members
    service.refuse = None
    service.pass_time(0.5)
    assert "a" not in service.log.machine.groups["g"].members


def test_a_start_that_could_not_be_written_comes_again() -> None:
    service = Service()
    service.refuse = QueueFullError("full")
    service.coordinator.lead(service.now)
    asked = service.ask(GetTopics())
    service.pass_time(0.5)
    assert not asked.given
    service.refuse = None
    service.pass_time(0.5)
    assert not isinstance(asked.answer, RayQueueError)
