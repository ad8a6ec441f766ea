"""Group membership of a consumer. In the I/O thread, whatever the application does meanwhile.

Joins, says regularly that it lives and what it reads, and carries out what it
is told:

- A partition that is granted is claimed first (a commit without offsets, with
  the grant's generation): from then on whoever read it before cannot commit,
  and the answer says where to begin.
- A partition that is not granted any more is let go: no more of it is handed
  out, what the application has finished is committed, its listener is told in
  its own thread, and only then is the partition missing from what this member
  says it reads, so that another one may begin.
- A member that the group does not know any more has lost everything; it joins
  again under a new name.
- A topic that was deleted takes what was read of it along: lost, not let go. If
  it is made again, its partitions are granted anew and begin anew. While none
  of its topics is there, ``error`` says so, unless ``on_topic_deleted`` is "drop".
- With a pattern the member looks regularly which topics match, and if these are
  others says so to the group (a join of a member that is one already).

A coordinator that fails over is none of this: reading goes on, and the next
heartbeat finds the new one. A member whose application does not poll for
``max_poll_interval_ms`` leaves, and joins again with the next poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.subscription import ChangeKind, Subscription
from rayqueue.client.consumer.wanted import Options
from rayqueue.client.joining import own_node
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, RayQueueError, StaleGenerationError, TopicError, UnknownMemberError
from rayqueue.net.backoff import Backoff
from rayqueue.net.interfaces import Routes
from rayqueue.net.requests import heard, repeated
from rayqueue.protocol.calls import Assignment, Grant, Heartbeat, JoinGroup, LeaveGroup
from rayqueue.protocol.topics import TopicPartition

_log = logging.getLogger(__name__)

_LEAVE_TIMEOUT_MS = 2000
_FENCED_AS_IF = 5
"""Failures: the coordinator is to have time to learn the newer generation before the member is back."""
_MAX_FENCINGS = 8
"""So often in a row a partition may refuse what the coordinator grants, before the application is told."""
_MISSING_S = 3.0
"""A topic that is not there for so long is reported; one that is made again at once is not."""


@dataclass(slots=True)
class LastPoll:
    """When the application polled last. Written by its thread, read by the membership."""

    at_s: float
    under_way: bool = False


class GroupMembership:
    """Of one member, from ``start`` to ``close``. ``error``: why it has given up for good."""

    def __init__(
        self,
        routes: Routes,
        subscription: Subscription,
        fetcher: Fetcher,
        commits: Commits,
        settings: Settings,
        options: Options,
        last_poll: LastPoll,
        *,
        rng: Random,
    ) -> None:
        self.group = commits.group
        self.name = ""
        self.generation = 0
        self._error: RayQueueError | None = None
        self.away = False
        """It has left because the application did not poll."""
        self._routes = routes
        self._coordinator = routes.coordinator
        self._subscription = subscription
        self._fetcher = fetcher
        self._commits = commits
        self._settings = settings.consumer
        self._client = settings.client
        self._last_poll = last_poll
        self._options = options
        self.topics = self._asked_topics = options.topics  # of the group
        self._rng = rng
        self._ray_node = own_node()
        self._grants: dict[TopicPartition, Grant] = {}
        self._seals: dict[Grant, bytes] = {}
        self._missing: dict[str, float] = {}  # topics that are not there, and since when
        self._held: dict[TopicPartition, AssignedPartition] = {}
        self._fencings: dict[TopicPartition, int] = {}
        self._last_fencing: StaleGenerationError | None = None
        self._fenced: dict[TopicPartition, Grant] = {}  # grants that their partition did not accept
        self._changed = asyncio.Event()  # what is read has changed: say so now
        self._polled_again = asyncio.Event()  # the application polls again
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        commits.on_stale = self._stale

    @property
    def error(self) -> RayQueueError | None:
        """Why nothing comes, as far as the application must know: this member has given up, or its topics are gone."""
        missing = self._missing
        if self._error is not None or not missing or time.monotonic() - max(missing.values()) < _MISSING_S:
            return self._error
        return self._options.gone(missing, self._settings)

    # -- life ----------------------------------------------------------------------------

    def start(self) -> None:
        self._main = self._loop.create_task(self._run())
        self._main.add_done_callback(self._ended)
        self._spawn(self._watch())
        if self._options.pattern is not None:
            self._spawn(self._follow())

    async def _follow(self) -> None:
        """Want what the pattern means from now on."""
        while True:
            await asyncio.sleep(self._settings.refresh_ms / 1000)
            try:
                self.topics = await self._options.look(self._routes)
            except RayQueueError as error:
                _log.info("group %s: topics cannot be looked up at the moment: %s", self.group, error)
            if self.topics != self._asked_topics:
                self._changed.set()

    async def close(self) -> None:
        """Leave. What it reads is free for others at once, unless it keeps its place by ``instance``."""
        for task in (*([self._main] if self._main else []), *self._tasks):
            task.cancel()
        await asyncio.gather(*([self._main] if self._main else []), *self._tasks, return_exceptions=True)
        for assigned in list(self._held.values()):
            self._drop(assigned)
        if self._options.instance is None:
            await self._leave()

    def polled(self) -> None:
        """The application has come back."""
        self._polled_again.set()

    async def _run(self) -> None:
        backoff = Backoff(self._client, self._rng)
        while True:
            try:
                await self._join()
                backoff.reset()
                await self._heartbeats()
            except UnknownMemberError as error:
                _log.warning("group %s: %s; joining again", self.group, error)
                self._lose(list(self._held.values()))
            except RayQueueError as error:
                if not error.retriable:
                    self._give_up(error)
                    return
                _log.warning("group %s has no coordinator at the moment: %s", self.group, error)
                await asyncio.sleep(backoff.pause_s())
            if self.away:
                await self._polled_again.wait()
                self.away = False

    def _ended(self, main: asyncio.Task[None]) -> None:
        if not main.cancelled() and main.exception() is not None:  # a bug; whoever polls must learn that nothing comes
            _log.error("the membership of group %s has failed", self.group, exc_info=main.exception())
            self._give_up(OutcomeUnknownError(f"group {self.group!r} is not read any more; see the log"))

    def _give_up(self, error: RayQueueError) -> None:
        self._error = error
        self._lose(list(self._held.values()))
        self._subscription.on_data()

    async def _leave(self) -> None:
        name, self.name = self.name, ""
        if name:
            with suppress(RayQueueError, TimeoutError):
                await self._coordinator.call(LeaveGroup(group=self.group, member=name), timeout_ms=_LEAVE_TIMEOUT_MS)

    # -- joining and heartbeats ----------------------------------------------------------

    async def _join(self) -> None:
        self.name = f"{self._options.client[:100]}-{uuid.uuid4().hex}"
        self.generation = 0
        self._grants = {}
        self._fenced = {}
        self._asked_topics = self.topics
        joined: Assignment = await self._coordinator.call(self._join_request())
        if self.name:  # else it has left meanwhile
            self._apply(joined)

    async def _ask_for_topics(self) -> None:
        """As a member, want others than before."""
        before, self._asked_topics = self._asked_topics, self.topics
        _log.info("group %s: %d topics match now, %d did", self.group, len(self._asked_topics), len(before))
        answer: Assignment = await self._coordinator.call(self._join_request())
        if self.name:
            # What is not meant any more was deleted: there is nothing left to commit to.
            self._apply(answer, deleted=tuple(sorted(set(before) - set(self._asked_topics))))

    def _join_request(self) -> JoinGroup:
        return JoinGroup(
            group=self.group,
            member=self.name,
            topics=self._asked_topics,
            instance=self._options.instance,
            client=self._options.client,
            assignor=self._settings.assignor,
            session_timeout_ms=self._settings.session_timeout_ms,
            generation=self.generation,
        )

    async def _heartbeats(self) -> None:
        """One is always under way: the coordinator answers when there is news. Ends when the member has left."""
        while not self.away:
            self._changed.clear()
            if self.topics != self._asked_topics:
                await self._ask_for_topics()
            beat = self._loop.create_task(self._heartbeat())
            beat.add_done_callback(heard)  # one that is given up may fail all the same
            changed = self._loop.create_task(self._changed.wait())
            try:
                await asyncio.wait((beat, changed), return_when=asyncio.FIRST_COMPLETED)
                if not beat.done():
                    continue  # its answer would be to what is not so any more
                answer = beat.result()
            finally:
                changed.cancel()
                if not beat.done():
                    beat.cancel()
            if not self.name:
                return  # it has left meanwhile: what this answer grants is given up already
            self._apply(answer)
            fenced, self._fenced = self._fenced, {}
            refused = [partition for partition, grant in fenced.items() if self._grants.get(partition) == grant]
            if refused:
                # A partition knows a newer generation than the coordinator: joining again makes a newer one.
                self._count_fencings(refused)
                self._lose(list(self._held.values()))
                await self._leave()
                await asyncio.sleep(Backoff(self._client, self._rng, failures=_FENCED_AS_IF).pause_s())
                return

    async def _heartbeat(self) -> Assignment:
        wait_ms = self._settings.heartbeat_ms
        answer: Assignment = await self._coordinator.call(
            Heartbeat(
                group=self.group,
                member=self.name,
                generation=self.generation,
                reading=tuple(sorted(assigned.grant for assigned in self._held.values())),
                wait_ms=wait_ms,
                ray_node=self._ray_node,
            ),
            may_take_ms=wait_ms,
        )
        return answer

    def _apply(self, assignment: Assignment, *, deleted: tuple[str, ...] = ()) -> None:
        """Read what is granted, let go of everything else. ``deleted``: topics that are not wanted for that reason."""
        self.generation = assignment.generation
        self._grants = {grant.topic_partition: grant for grant in assignment.grants}
        self._seals = dict(zip(assignment.grants, assignment.seals, strict=True))
        self._note_missing(assignment.missing + deleted)
        gone = [assigned for assigned in self._held.values() if assigned.partition.topic in self._missing]
        if gone:
            self._lose(gone, deleted=True)
        # Taken away and given back, and we have not heard of it; or it is of another topic of this name.
        lost = [
            assigned
            for each, assigned in self._held.items()
            if self._grants.get(each, assigned.grant) != assigned.grant
        ]
        if lost:
            self._lose(lost)
        self._revoke(
            [
                assigned
                for partition, assigned in self._held.items()
                if partition not in self._grants and not assigned.letting_go
            ]
        )
        for partition, grant in self._grants.items():
            if partition not in self._held and self._fenced.get(partition) != grant:
                self._grant(grant)

    def _note_missing(self, missing: tuple[str, ...]) -> None:
        now_s = time.monotonic()
        for topic in missing:
            if topic not in self._missing:
                _log.warning("group %s: there is no topic %s any more", self.group, topic)
                self._subscription.topic_deleted(topic)
                self._loop.call_later(_MISSING_S, self._subscription.on_data)  # whoever polls is to look at ``error``
        self._missing = {topic: self._missing.get(topic, now_s) for topic in missing}

    # -- partitions come -----------------------------------------------------------------

    def _grant(self, grant: Grant) -> None:
        assigned = AssignedPartition(
            grant.topic_partition,
            grant.topic_id,
            grant.generation,
            seal=self._seals[grant],
            shown=not self._options.listened,
        )
        self._held[assigned.partition] = assigned
        self._changed.set()
        self._spawn(self._claim(assigned))

    async def _claim(self, assigned: AssignedPartition) -> None:
        backoff = Backoff(self._client, self._rng)

        def after(error: RayQueueError, _: float) -> float:
            if not error.retriable and not isinstance(error, TopicError):
                raise error
            _log.info("%s cannot be claimed at the moment: %s", assigned.partition, error)
            return backoff.pause_s()

        try:
            await repeated(partial(self._claim_once, assigned), after)
        except StaleGenerationError as error:
            self._stale(assigned, error)
        except RayQueueError as error:
            self._give_up(error)
        if self._held.get(assigned.partition) is not assigned or assigned.letting_go:
            return
        self._fencings.pop(assigned.partition, None)
        self._subscription.add(assigned)
        self._fetcher.start(assigned)
        self._subscription.announce(ChangeKind.ASSIGNED, (assigned,))

    async def _claim_once(self, assigned: AssignedPartition) -> None:
        if assigned.letting_go:
            return  # it is not to be ours any more
        position = await self._commits.claim(assigned, pin=self._options.pin)
        new = await self._fetcher.begin(assigned, position)
        if new and self._settings.start == "latest":
            # Now is when this group begins. Else whoever reads this partition next would begin later.
            await self._commits.commit(assigned)

    # -- partitions go -------------------------------------------------------------------

    def _revoke(self, partitions: list[AssignedPartition]) -> None:
        """To be let go in good order. The application takes part if it has to finish something, or wants to know."""
        together: list[AssignedPartition] = []
        for assigned in partitions:
            self._fetcher.stop(assigned)
            self._subscription.let_go(assigned)
            if assigned.begun and assigned.shown and (self._options.listened or not assigned.settled):
                together.append(assigned)
            else:
                self._spawn(self._finish(assigned))
        if together:
            self._subscription.announce(ChangeKind.REVOKED, together)

    async def _finish(self, assigned: AssignedPartition) -> None:
        if self._options.commits_itself and assigned.begun:
            errors = await self._commits.commit_due([assigned])
            for error in errors:
                _log.warning("%s was given up without its last commit: %s", assigned.partition, error)
        self.released([assigned])

    def released(self, partitions: Iterable[AssignedPartition]) -> None:
        """The application is through with these."""
        for assigned in partitions:
            if self._held.get(assigned.partition) is not assigned:
                continue
            self._drop(assigned)
            grant = self._grants.get(assigned.partition)
            if grant is not None:  # meanwhile the group has changed its mind
                self._grant(grant)
        self._changed.set()

    def _lose(self, partitions: list[AssignedPartition], *, deleted: bool = False) -> None:
        """Others may read these already; or nobody ever will, for they are ``deleted``."""
        for assigned in partitions:
            self._drop(assigned)
        told = tuple(assigned for assigned in partitions if assigned.begun)
        if told:
            self._subscription.announce(ChangeKind.LOST, told, deleted=deleted)
        self._changed.set()

    def _stale(self, assigned: AssignedPartition, error: StaleGenerationError) -> None:
        """The partition has seen a newer generation: ask the coordinator what is true."""
        if self._held.get(assigned.partition) is assigned:
            _log.warning(
                "group %s is refused by %s: generation %d, and the partition is at %s",
                *(self.group, assigned.partition, assigned.generation, error.details.get("current")),
            )
            self._last_fencing = error
            self._fenced[assigned.partition] = assigned.grant
            self._lose([assigned])

    def _count_fencings(self, refused: list[TopicPartition]) -> None:
        """Partitions have refused what the coordinator says is ours. Once that may be; again and again it is wrong."""
        for partition in refused:
            count = self._fencings[partition] = self._fencings.get(partition, 0) + 1
            if count >= _MAX_FENCINGS:
                raise StaleGenerationError(
                    f"{partition} has refused group {self.group!r} {count} times in a row: it knows a newer generation "
                    f"than the coordinator gives ({self._last_fencing}). Delete the group, or its position there",
                    group=self.group,
                    topic=partition.topic,
                    partition=partition.partition,
                )

    def _drop(self, assigned: AssignedPartition) -> None:
        self._fetcher.stop(assigned)
        self._subscription.remove(assigned)
        self._commits.forget(assigned.partition)
        if self._held.get(assigned.partition) is assigned:
            del self._held[assigned.partition]

    # -- the application's side --------------------------------------------------------------

    async def _watch(self) -> None:
        """Leave when the application does not poll any more."""
        limit_s = self._settings.max_poll_interval_ms / 1000
        seen = self._subscription.progress
        while True:
            await asyncio.sleep(min(limit_s / 4, 1.0))
            progress = self._subscription.progress
            if progress != seen:  # it reads record by record
                seen, self._last_poll.at_s = progress, time.monotonic()
            silent_s = time.monotonic() - self._last_poll.at_s
            if self._last_poll.under_way or self.away or silent_s < limit_s or not self.name:
                continue
            _log.warning(
                "group %s: no poll for %.1f s (max_poll_interval_ms is %d): leaving until the next one",
                *(self.group, silent_s, self._settings.max_poll_interval_ms),
            )
            self._polled_again.clear()
            self.away = True
            self._lose(list(self._held.values()))
            await self._leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of group %s failed", self.group, exc_info=task.exception())
