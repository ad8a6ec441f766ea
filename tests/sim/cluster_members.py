"""Those who use the simulated cluster: consumers that come, go, freeze and return, and an administrator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayqueue.errors import RayQueueError, StaleGenerationError, UnknownMemberError
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Assignment, DeletedGroup, Grant
from rayqueue.protocol.topics import TopicPartition, TopicSettings
from tests.sim.cluster_node import Link

if TYPE_CHECKING:
    from tests.sim.cluster_world import ClusterWorld

SESSION_MS = 1500
HEARTBEAT_S = 0.3


class Held:
    """A partition that a member reads, or is about to."""

    __slots__ = ("claimed", "grant", "letting_go", "offset")

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.claimed = False
        self.letting_go = False
        self.offset = 0

    @property
    def generation(self) -> int:
        return self.grant.generation

    @property
    def topic_id(self) -> int:
        return self.grant.topic_id


class SimMember:
    """A consumer process. It may die and be started again, freeze and go on, or lose the coordinator."""

    def __init__(self, world: ClusterWorld, name: str, group: str, topics: tuple[str, ...], static: bool) -> None:
        self.world = world
        self.name = name
        self.group = group
        self.topics = topics
        self.static = static
        self.slow_release = False
        self.alive = False
        self.paused = False
        self.link = Link(world, name)
        self.lives = 0
        self.joins = 0
        self.member = ""
        self.joined = False
        self.generation = 0
        self.held: dict[TopicPartition, Held] = {}
        self.fenced: dict[TopicPartition, Grant] = {}
        """Grants that their partition refused as those of an older generation."""
        self._postponed: list[Callable[[], None]] = []

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        if self.alive:
            return
        self.alive = True
        self.paused = False
        self.lives += 1
        self._postponed = []
        self._new_member()
        self._join()

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self.joined = False
        self.paused = self.link.frozen = False
        self.held = {}
        self.link.close()

    def leave(self) -> None:
        """Close: let go of everything, say so, and stop."""
        if not self.alive or self.paused:
            return
        for each, held in self.held.items():
            if held.claimed and not held.letting_go:
                self._commit(each, held)  # which may arrive when the group is gone
        self.held = {}
        if self.joined:
            self.link.call(calls.LeaveGroup(group=self.group, member=self.member), lambda _: None)
            self.world.checker.said_goodbye(self.group, self.member)
        self.alive = False
        self.joined = False
        self.world.clock.after(0.3, lambda: self.link.close() if not self.alive else None)

    def pause(self, duration: float) -> None:
        if self.alive:
            self.paused = self.link.frozen = True
            self.world.clock.after(duration, self._resume)

    def _resume(self) -> None:
        if self.paused:
            self.paused = self.link.frozen = False
            postponed, self._postponed = self._postponed, []
            for action in postponed:
                action()

    def _awake(self, action: Callable[[], None]) -> Callable[[], None]:
        """The action, in this life only, and not while it is frozen."""
        life = self.lives

        def act() -> None:
            if not self.alive or life != self.lives:
                return
            if self.paused:
                self._postponed.append(act)
            else:
                action()

        return act

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        self.world.clock.after(delay, self._awake(action))

    # -- the group ---------------------------------------------------------------------------

    def _new_member(self) -> None:
        self.joins += 1
        self.member = f"{self.name}.{self.joins}"
        self.joined = False
        self.generation = 0
        self.held = {}
        self.fenced = {}

    def want(self, topics: tuple[str, ...]) -> None:
        self.topics = topics
        if self.alive:
            self._awake(lambda: self._join() if self.joined else None)()

    def _join(self) -> None:
        join = calls.JoinGroup(
            group=self.group,
            member=self.member,
            topics=self.topics,
            instance=self.name if self.static else None,
            assignor=self.world.assignor,
            session_timeout_ms=SESSION_MS,
            generation=self.generation if self.joined else 0,
        )
        member = self.member
        self.link.call(join, lambda result: self._awake(lambda: self._join_answered(member, join, result))())

    def _join_answered(self, member: str, join: calls.JoinGroup, result: Any) -> None:
        if member != self.member:
            return
        if isinstance(result, Assignment):
            first = not self.joined
            self.joined = True
            self._take(result)
            if first:
                self._heartbeat()
            if join.topics != self.topics:
                self._join()
        elif isinstance(result, UnknownMemberError):
            self._start_over()
        elif join.topics == self.topics or not self.joined:
            self._after(self.world.rng.uniform(0.02, 0.2), lambda: self._join() if member == self.member else None)

    def _start_over(self) -> None:
        """The group has gone on without this member: everything is lost."""
        self._new_member()
        self._after(self.world.rng.uniform(0.01, 0.1), self._join)

    def _join_anew(self) -> None:
        """As ``client.member``: a partition refuses what the coordinator says is this member's, so it knows a newer
        generation. Joining again makes one above it."""
        self.link.call(calls.LeaveGroup(group=self.group, member=self.member), lambda _: None)
        self.world.checker.said_goodbye(self.group, self.member)
        self._start_over()

    def _heartbeat(self) -> None:
        if not self.joined:
            return
        wait_ms = self.world.rng.choice((0, 400))
        call = calls.Heartbeat(
            group=self.group,
            member=self.member,
            generation=self.generation,
            reading=self._reading(),
            wait_ms=wait_ms,
        )
        member, fenced = self.member, dict(self.fenced)
        pause = 0.001 if wait_ms else HEARTBEAT_S
        self.link.call(call, lambda result: self._awake(lambda: self._heard(member, pause, fenced, result))())

    def _heard(self, member: str, pause: float, fenced: dict[TopicPartition, Grant], result: Any) -> None:
        """``fenced``: what had been refused when this was asked."""
        if member != self.member or not self.joined:
            return
        if isinstance(result, Assignment):
            self._take(result)
            if any(fenced.get(grant.topic_partition) == grant for grant in result.grants):
                self._join_anew()
                return
            self.fenced = {each: grant for each, grant in self.fenced.items() if fenced.get(each) != grant}
        elif isinstance(result, UnknownMemberError):
            self._start_over()
            return
        else:
            pause = self.world.rng.uniform(0.02, 0.2)
        self._after(pause, lambda: self._heartbeat() if member == self.member else None)

    def _reading(self) -> tuple[Grant, ...]:
        return tuple(sorted(held.grant for held in self.held.values()))

    def _take(self, assignment: Assignment) -> None:
        if assignment.generation < self.generation:
            return  # an answer that was overtaken
        self.generation = assignment.generation
        granted = {grant.topic_partition: grant for grant in assignment.grants}
        for each, held in list(self.held.items()):
            if granted.get(each) != held.grant and not held.letting_go:
                held.letting_go = True
                delay = self.world.rng.uniform(0, 2.5 if self.slow_release else 0.05)
                self._after(delay, lambda each=each, held=held: self._let_go(each, held))  # type: ignore[misc]
        for each, grant in granted.items():
            if each not in self.held and self.fenced.get(each) != grant:
                self._begin(each, grant)

    def _let_go(self, each: TopicPartition, held: Held) -> None:
        if self.held.get(each) is not held:
            return
        if held.claimed:
            self._commit(each, held)
        del self.held[each]
        # Says so at once, though another heartbeat may wait for its answer.
        call = calls.Heartbeat(
            group=self.group, member=self.member, generation=self.generation, reading=self._reading()
        )
        member = self.member

        def heard(result: Any) -> None:
            if isinstance(result, Assignment) and member == self.member and self.joined:
                self._take(result)

        self.link.call(call, lambda result: self._awake(lambda: heard(result))())

    # -- the partitions ---------------------------------------------------------------------------

    def _begin(self, each: TopicPartition, grant: Grant) -> None:
        """Claim the partition, then read it."""
        held = self.held[each] = Held(grant)
        self.world.checker.took(self, each, held)
        self.claim(each, held)

    def claim(self, each: TopicPartition, held: Held) -> None:
        def claimed(result: Any) -> None:
            if self.held.get(each) is not held:
                return
            if isinstance(result, RayQueueError):
                self._refused(each, held, result)
                return
            held.claimed = True
            held.offset = max(result.offsets.values(), default=0)
            self._work(each, held)

        self.world.commit(self, each, held, None, self._answer(claimed))

    def _work(self, each: TopicPartition, held: Held) -> None:
        def worked() -> None:
            if self.held.get(each) is held and held.claimed:
                if not held.letting_go:
                    self._commit(each, held)
                self._work(each, held)

        self._after(self.world.rng.uniform(0.3, 1.2), worked)

    def _commit(self, each: TopicPartition, held: Held) -> None:
        held.offset += 1

        def committed(result: Any) -> None:
            if isinstance(result, RayQueueError) and self.held.get(each) is held:
                self._refused(each, held, result)

        self.world.commit(self, each, held, held.offset, self._answer(committed))

    def _refused(self, each: TopicPartition, held: Held, error: RayQueueError) -> None:
        """Lost. If it is this member's after all, the next heartbeat's answer says so."""
        if isinstance(error, StaleGenerationError):
            self.world.checker.refusals += 1
            self.fenced[each] = held.grant
        del self.held[each]

    def _answer(self, answer: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda result: self._awake(lambda: answer(result))()


class Admin:
    """Makes, changes and deletes topics, takes producer ids, deletes groups; repeats what was not answered."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.link = Link(world, "admin")
        self.attempts = 0
        self.pending = 0
        self.producer_ids: list[tuple[int, int]] = []

    def create(self, name: str, partitions: int) -> None:
        self.attempts += 1
        settings = TopicSettings(partitions=partitions, replication=2)
        self._ask(calls.CreateTopic(name=name, settings=settings, attempt=f"a{self.attempts}"))

    def alter(self, name: str, partitions: int) -> None:
        self._ask(calls.AlterTopic(name=name, topic_id=self._seen(name), changes={"partitions": partitions}))

    def delete(self, name: str) -> None:
        self._ask(calls.DeleteTopic(name=name, topic_id=self._seen(name)))

    def delete_group(self, name: str) -> None:
        group = self.world.checker.reference.groups.get(name)
        self._ask(calls.DeleteGroup(group=name, born=None if group is None else group.born))

    def _seen(self, name: str) -> int:
        """As one who has just asked."""
        info = self.world.checker.reference.topics.get(name)
        return -1 if info is None else info.topic_id

    def take_ids(self, count: int) -> None:
        self._ask(calls.NewProducerIds(count=count))

    def _ask(self, call: Any) -> None:
        self.pending += 1

        def answer(result: Any) -> None:
            if isinstance(result, RayQueueError) and result.retriable:
                self.world.clock.after(self.world.rng.uniform(0.05, 0.3), lambda: self.link.call(call, answer))
                return
            self.pending -= 1
            if isinstance(call, calls.DeleteGroup) and isinstance(result, DeletedGroup):
                self.world.forget_group(call.group, result)
            if isinstance(call, calls.NewProducerIds) and isinstance(result, int):
                self.producer_ids.append((result, call.count))

        self.link.call(call, answer)
