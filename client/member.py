"""A consumer's membership of its group. In the I/O thread, whatever the application does meanwhile.

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
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from random import Random
from typing import Any

from rayqueue.client.commits import Commits
from rayqueue.client.feed import Feed
from rayqueue.client.fetcher import Fetcher
from rayqueue.client.routing import Route
from rayqueue.client.subscription import ChangeKind, Subscription
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, StaleGenerationError, TopicError, UnknownMemberError, UnknownTopicError
from rayqueue.protocol.calls import Assignment, Grant, Heartbeat, JoinGroup, LeaveGroup
from rayqueue.protocol.topics import TopicPartition

_log = logging.getLogger(__name__)

_LEAVE_TIMEOUT_MS = 2000
_MAX_FENCINGS = 8
"""So often in a row a partition may refuse what the coordinator grants, before the application is told."""
_MISSING_S = 3.0
"""A topic that is not there for so long is reported; one that is made again at once is not."""


class Activity:
    """When the application was last heard of. Written by its thread, read by the member."""

    __slots__ = ("polled_s", "polling")

    def __init__(self, now_s: float) -> None:
        self.polled_s = now_s
        self.polling = False


class Member:
    """One member, from ``start`` to ``close``. ``error``: why it has given up for good."""

    def __init__(
        self,
        coordinator: Route,
        subscription: Subscription,
        fetcher: Fetcher,
        commits: Commits,
        settings: Settings,
        activity: Activity,
        topics: tuple[str, ...],
        *,
        rng: Random,
        look: Callable[[], Awaitable[tuple[str, ...]]] | None = None,
        instance: str | None = None,
        client: str = "",
        pin: bool = False,
        auto_commit: bool = True,
        listened: bool = False,
    ) -> None:
        """``look``: which topics are meant now. Without it they stay the same."""
        self.group = commits.group
        self.name = ""
        self.generation = 0
        self.rebalancing = True
        self._error: RayQueueError | None = None
        self.away = False
        """It has left because the application did not poll."""
        self._coordinator = coordinator
        self._subscription = subscription
        self._fetcher = fetcher
        self._commits = commits
        self._settings = settings.consumer
        self._client = settings.client
        self._activity = activity
        self.topics = topics
        self._said = topics  # to the group
        self._look = look
        self._drops = look is not None or settings.consumer.on_topic_deleted == "drop"
        self._rng = rng
        self._instance = instance
        self._client_name = client
        self._pin = pin
        self._auto_commit = auto_commit
        self._listened = listened
        self._grants: dict[TopicPartition, Grant] = {}
        self._seals: dict[Grant, bytes] = {}
        self._missing: dict[str, float] = {}  # topics that are not there, and since when
        self._held: dict[TopicPartition, Feed] = {}
        self._fencings: dict[TopicPartition, int] = {}
        self._last_fencing: StaleGenerationError | None = None
        self._fenced: dict[TopicPartition, Grant] = {}  # grants that their partition did not accept
        self._changed = asyncio.Event()  # what is read has changed: say so now
        self._back = asyncio.Event()  # the application polls again
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        commits.on_stale = self._stale

    @property
    def error(self) -> RayQueueError | None:
        """Why nothing comes, as far as the application must know: this member has given up, or its topics are gone."""
        missing = self._missing
        if self._error is not None or self._drops or len(missing) < len(self.topics):
            return self._error
        if time.monotonic() - max(missing.values()) < _MISSING_S:
            return None
        return UnknownTopicError(f"{', '.join(sorted(missing))}: deleted, and not made again", topic=min(missing))

    # -- life ----------------------------------------------------------------------------

    def start(self) -> None:
        self._main = self._loop.create_task(self._run())
        self._spawn(self._watch())
        if self._look is not None:
            self._spawn(self._follow(self._look))

    async def _follow(self, look: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
        """Want what the pattern means from now on."""
        while True:
            await asyncio.sleep(self._settings.refresh_ms / 1000)
            try:
                self.topics = await look()
            except RayQueueError as error:
                _log.info("group %s: topics cannot be looked up at the moment: %s", self.group, error)
            if self.topics != self._said:
                self._changed.set()

    async def close(self) -> None:
        """Leave. What it reads is free for others at once, unless it keeps its place by ``instance``."""
        for task in (*([self._main] if self._main else []), *self._tasks):
            task.cancel()
        await asyncio.gather(*([self._main] if self._main else []), *self._tasks, return_exceptions=True)
        for feed in list(self._held.values()):
            self._drop(feed)
        if self._instance is None:
            await self._leave()

    def polled(self) -> None:
        """The application has come back."""
        self._back.set()

    async def _run(self) -> None:
        attempts = 0
        while True:
            try:
                await self._join()
                attempts = 0
                await self._heartbeats()
            except UnknownMemberError as error:
                _log.warning("group %s: %s; joining again", self.group, error)
                self._lose(list(self._held.values()))
            except RayQueueError as error:
                if not error.retriable:
                    self._give_up(error)
                    return
                attempts += 1
                _log.warning("group %s has no coordinator at the moment: %s", self.group, error)
                await self._pause(attempts)
            if self.away:
                await self._back.wait()
                self.away = False

    def _give_up(self, error: RayQueueError) -> None:
        self._error = error
        self._lose(list(self._held.values()))
        self._subscription.on_data()

    async def _pause(self, attempts: int) -> None:
        wait_ms = min(self._client.retry_max_ms, self._client.retry_min_ms * 2 ** min(attempts, 16))
        await asyncio.sleep(wait_ms / 1000 * (0.5 + self._rng.random() / 2))

    async def _leave(self) -> None:
        name, self.name = self.name, ""
        if name:
            with suppress(RayQueueError, TimeoutError):
                await self._coordinator.call(LeaveGroup(group=self.group, member=name), timeout_ms=_LEAVE_TIMEOUT_MS)

    # -- joining and heartbeats ----------------------------------------------------------

    async def _join(self) -> None:
        self.name = f"{self._client_name[:100] or 'consumer'}-{uuid.uuid4().hex}"
        self.generation = 0
        self._grants = {}
        self._fenced = {}
        self._said = self.topics
        joined: Assignment = await self._coordinator.call(self._wish())
        if self.name:  # else it has left meanwhile
            self._take(joined)

    async def _say_topics(self) -> None:
        """As a member, want others than before."""
        before, self._said = self._said, self.topics
        _log.info("group %s: %d topics match now, %d did", self.group, len(self._said), len(before))
        answer: Assignment = await self._coordinator.call(self._wish())
        if self.name:
            # What is not meant any more was deleted: there is nothing left to commit to.
            self._take(answer, deleted=tuple(sorted(set(before) - set(self._said))))

    def _wish(self) -> JoinGroup:
        return JoinGroup(
            group=self.group,
            member=self.name,
            topics=self._said,
            instance=self._instance,
            client=self._client_name,
            assignor=self._settings.assignor,
            session_timeout_ms=self._settings.session_timeout_ms,
            generation=self.generation,
        )

    async def _heartbeats(self) -> None:
        """One is always under way: the coordinator answers when there is news. Ends when the member has left."""
        while not self.away:
            self._changed.clear()
            if self.topics != self._said:
                await self._say_topics()
            beat = self._loop.create_task(self._heartbeat())
            beat.add_done_callback(_note)
            changed = self._loop.create_task(self._wait_changed())
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
            self._take(answer)
            fenced, self._fenced = self._fenced, {}
            refused = [partition for partition, grant in fenced.items() if self._grants.get(partition) == grant]
            if refused:
                # A partition knows a newer generation than the coordinator: joining again makes a newer one.
                self._count_fencings(refused)
                self._lose(list(self._held.values()))
                await self._leave()
                await self._pause(5)
                return

    async def _heartbeat(self) -> Assignment:
        wait_ms = self._settings.heartbeat_ms
        answer: Assignment = await self._coordinator.call(
            Heartbeat(
                group=self.group,
                member=self.name,
                generation=self.generation,
                reading=tuple(sorted(feed.grant for feed in self._held.values())),
                wait_ms=wait_ms,
            ),
            may_take_ms=wait_ms,
        )
        return answer

    async def _wait_changed(self) -> None:
        await self._changed.wait()

    def _take(self, assignment: Assignment, *, deleted: tuple[str, ...] = ()) -> None:
        """Read what is granted, let go of everything else. ``deleted``: topics that are not wanted for that reason."""
        self.generation = assignment.generation
        self.rebalancing = assignment.rebalancing
        self._grants = {grant.topic_partition: grant for grant in assignment.grants}
        self._seals = dict(zip(assignment.grants, assignment.seals, strict=True))
        self._note_missing(assignment.missing + deleted)
        gone = [feed for feed in self._held.values() if feed.partition.topic in self._missing]
        if gone:
            self._lose(gone, deleted=True)
        # Taken away and given back, and we have not heard of it; or it is of another topic of this name.
        lost = [feed for each, feed in self._held.items() if self._grants.get(each, feed.grant) != feed.grant]
        if lost:
            self._lose(lost)
        self._revoke(
            [feed for partition, feed in self._held.items() if partition not in self._grants and not feed.letting_go]
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
        feed = Feed(
            grant.topic_partition,
            grant.topic_id,
            grant.generation,
            seal=self._seals[grant],
            shown=not self._listened,
        )
        self._held[feed.partition] = feed
        self._changed.set()
        self._spawn(self._claim(feed))

    async def _claim(self, feed: Feed) -> None:
        attempts = 0
        while not await self._claimed(feed):
            attempts += 1
            await self._pause(attempts)
        if self._held.get(feed.partition) is not feed or feed.letting_go:
            return
        self._fencings.pop(feed.partition, None)
        self._subscription.add(feed)
        self._fetcher.start(feed)
        self._subscription.announce(ChangeKind.ASSIGNED, (feed,))

    async def _claimed(self, feed: Feed) -> bool:
        """Whether there is nothing more to try: the partition is ours, or is not to be."""
        try:
            position = await self._commits.claim(feed, pin=self._pin)
            new = await self._fetcher.begin(feed, position)
            if new and self._settings.start == "latest":
                # Now is when this group begins. Else whoever reads this partition next would begin later.
                await self._commits.commit(feed)
        except StaleGenerationError as error:
            self._stale(feed, error)
        except RayQueueError as error:
            if not error.retriable and not isinstance(error, TopicError):
                self._give_up(error)
                return True
            _log.info("%s cannot be claimed at the moment: %s", feed.partition, error)
            return feed.letting_go
        return True

    # -- partitions go -------------------------------------------------------------------

    def _revoke(self, feeds: list[Feed]) -> None:
        """To be let go in good order. The application takes part if it has to finish something, or wants to know."""
        together: list[Feed] = []
        for feed in feeds:
            self._fetcher.stop(feed)
            self._subscription.let_go(feed)
            if feed.begun and feed.shown and (self._listened or not feed.settled):
                together.append(feed)
            else:
                self._spawn(self._finish(feed))
        if together:
            self._subscription.announce(ChangeKind.REVOKED, together)

    async def _finish(self, feed: Feed) -> None:
        if self._auto_commit and feed.begun:
            errors = await self._commits.commit_due([feed])
            for error in errors:
                _log.warning("%s was given up without its last commit: %s", feed.partition, error)
        self.released([feed])

    def released(self, feeds: Iterable[Feed]) -> None:
        """The application is through with these."""
        for feed in feeds:
            if self._held.get(feed.partition) is not feed:
                continue
            self._drop(feed)
            grant = self._grants.get(feed.partition)
            if grant is not None:  # meanwhile the group has changed its mind
                self._grant(grant)
        self._changed.set()

    def _lose(self, feeds: list[Feed], *, deleted: bool = False) -> None:
        """Others may read these already; or nobody ever will, for they are ``deleted``."""
        for feed in feeds:
            self._drop(feed)
        told = tuple(feed for feed in feeds if feed.begun)
        if told:
            self._subscription.announce(ChangeKind.LOST, told, deleted=deleted)
        self._changed.set()

    def _stale(self, feed: Feed, error: StaleGenerationError) -> None:
        """The partition has seen a newer generation: ask the coordinator what is true."""
        if self._held.get(feed.partition) is feed:
            _log.warning(
                "group %s is refused by %s: generation %d, and the partition is at %s",
                *(self.group, feed.partition, feed.generation, error.details.get("current")),
            )
            self._last_fencing = error
            self._fenced[feed.partition] = feed.grant
            self._lose([feed])

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

    def _drop(self, feed: Feed) -> None:
        self._fetcher.stop(feed)
        self._subscription.remove(feed)
        self._commits.forget(feed.partition)
        if self._held.get(feed.partition) is feed:
            del self._held[feed.partition]

    # -- the application's side --------------------------------------------------------------

    async def _watch(self) -> None:
        """Leave when the application does not poll any more."""
        limit_s = self._settings.max_poll_interval_ms / 1000
        seen = self._subscription.progress
        while True:
            await asyncio.sleep(min(limit_s / 4, 1.0))
            progress = self._subscription.progress
            if progress != seen:  # it reads record by record
                seen, self._activity.polled_s = progress, time.monotonic()
            silent_s = time.monotonic() - self._activity.polled_s
            if self._activity.polling or self.away or silent_s < limit_s or not self.name:
                continue
            _log.warning(
                "group %s: no poll for %.1f s (max_poll_interval_ms is %d): leaving until the next one",
                *(self.group, silent_s, self._settings.max_poll_interval_ms),
            )
            self._back.clear()
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


def _note(task: asyncio.Task[Assignment]) -> None:
    """A heartbeat that was given up may fail all the same; nobody needs to be told of it then."""
    if not task.cancelled():
        task.exception()
