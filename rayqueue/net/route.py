"""The route to one Raft group: which of its replicas leads, an open channel to it, and calls that find their way.

Everything here belongs to one event loop, and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from rayqueue.config import Settings
from rayqueue.errors import ClosedError, ConfigError, NotLeaderError, OutcomeUnknownError, RayQueueError, StorageError
from rayqueue.ids import COORDINATOR
from rayqueue.net.backoff import Backoff, Retry
from rayqueue.net.channel import Channel
from rayqueue.net.directory import Directory
from rayqueue.net.interfaces import Way
from rayqueue.net.replicas import Replicas
from rayqueue.net.requests import heard, in_time, request
from rayqueue.protocol.calls import Call, GetStatus, ReplicaStatus

_T = TypeVar("_T")

_ASK_S = 1.0
"""How long one replica may take to say who leads, connecting to it included."""
_LOOK_AGAIN_MAX_MS = 100
"""An election takes a few tenths of a second, and to ask costs little."""
_REFRESH_EVERY = 5
"""After so many vain attempts the replicas themselves may be others."""
_LEADERLESS_S = 1.0
"""When nobody leads for so long, the topic may be gone, or another one may have its name."""


class GroupRoute:
    """The way to one Raft group."""

    def __init__(
        self,
        group_id: str,
        replica_ids: Iterable[str],
        directory: Directory,
        settings: Settings,
        *,
        on_leaderless: Callable[[], None] | None = None,
    ) -> None:
        """``on_leaderless`` is called now and then while a leader is looked for in vain."""
        self.group_id = group_id
        self.leader_channel: Channel | None = None
        """The open channel to whoever is known to lead, without waiting."""
        self.term = 0
        """The newest in which somebody was seen to lead."""
        self.closed = False
        self._settings = settings
        self._on_leaderless = on_leaderless
        self._replicas = Replicas(group_id, replica_ids, directory, settings)
        self._hint: str | None = None
        self._troubles: dict[str, str] = {}
        """By replica: that it is damaged, or why it cannot start. As of the last look."""
        self._search: asyncio.Task[Channel] | None = None
        self._doubt: asyncio.Task[None] | None = None
        self._rng = random.Random()  # noqa: S311  # jitter

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return self._replicas.replica_ids

    # -- who leads -----------------------------------------------------------------------

    async def leader(self) -> Channel:
        """An open channel to whoever leads. ``NotLeaderError`` if nobody does within ``client.call_timeout_ms``.

        ``ClosedError`` once this route is closed, also to those who wait: ask for the route that replaces it.
        """
        channel = self.leader_channel
        if channel is not None:
            return channel
        search = self._searching()
        await asyncio.wait((search,))
        if search.cancelled():
            raise self._closed_error()
        return search.result()

    async def any_replica(self, prefer_host: str | None = None) -> Channel:
        """An open channel to any replica, one on this host if there is one. For reads that followers may serve."""
        self._check_open()
        return await self._replicas.any(prefer_host)

    def failed(self, error: RayQueueError) -> None:
        """A request to the leader ended with an error that says that this route is out of date."""
        channel = self.leader_channel
        if not error.refresh_metadata or self.closed:
            return
        known = None if channel is None else channel.endpoint.replica_id
        said = error.details.get("leader") if isinstance(error, NotLeaderError) else None
        if known is not None and (said == known or error.details.get("replica_id", known) != known):
            return  # about somebody who is not asked any more
        self._hint = said
        self._forget_leader()
        self._searching()

    def close(self) -> None:
        """Close its channels."""
        self.closed = True
        for task in (self._search, self._doubt):
            if task is not None:
                task.cancel()
        self.leader_channel = None
        self._replicas.close()

    # -- calls ---------------------------------------------------------------------------

    async def call(
        self,
        call: Call,
        *,
        timeout_ms: int | None = None,
        may_take_ms: int = 0,
        idempotent: bool = True,
        way: Way | None = None,
    ) -> Any:
        """Ask whoever leads, and again if the error says that this may help; by the ``way`` that there is then."""
        now_s = asyncio.get_running_loop().time()
        retry = Retry(self._settings.client, self._rng, now_s, idempotent=idempotent)
        if timeout_ms is not None:
            retry.deadline_s = now_s + timeout_ms / 1000
        retry.deadline_s += may_take_ms / 1000

        async def attempt(route: GroupRoute) -> Any:
            channel = await route._in_time(route.leader(), retry.deadline_s, written=False)
            answer = channel.call(call, may_take_ms=may_take_ms)
            return await route._in_time(answer, retry.deadline_s, written=True)

        return await request(way or self._itself, attempt, retry)

    async def _itself(self) -> GroupRoute:
        return self

    async def _in_time(
        self, work: Coroutine[Any, Any, _T] | asyncio.Future[_T], deadline_s: float, *, written: bool
    ) -> _T:
        try:
            return await in_time(work, max(0.0, deadline_s - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            if written:
                raise OutcomeUnknownError(f"{self.group_id} has not answered in time; outcome unknown") from None
            raise self._nobody_leads() from None

    # -- looking for the leader ---------------------------------------------------------------

    def _searching(self) -> asyncio.Task[Channel]:
        self._check_open()
        if self._search is None:
            self._search = asyncio.get_running_loop().create_task(self._find())
            self._search.add_done_callback(self._found)
        return self._search

    def _found(self, search: asyncio.Task[Channel]) -> None:
        self._search = None
        heard(search)

    async def _find(self) -> Channel:
        loop, client = asyncio.get_running_loop(), self._settings.client
        deadline_s = loop.time() + client.call_timeout_ms / 1000
        backoff = Backoff(client, self._rng, max_ms=_LOOK_AGAIN_MAX_MS)
        tell_s = loop.time() + _LEADERLESS_S
        while True:
            with suppress(OutcomeUnknownError):
                await self._replicas.refresh(force=(backoff.failures + 1) % _REFRESH_EVERY == 0)
            found = await self._look()
            if found is not None:
                return found
            if loop.time() + backoff.peek_s() > deadline_s:
                raise self._nobody_leads()
            if loop.time() >= tell_s and self._on_leaderless is not None:
                self._on_leaderless()
                tell_s = loop.time() + _LEADERLESS_S
            await asyncio.sleep(backoff.pause_s())

    async def _look(self) -> Channel | None:
        """Ask everybody at once; the first that says it leads, in the newest term we know or a newer one, does."""
        replica_ids = self.replica_ids
        hint, self._hint = self._hint, None
        if hint in replica_ids:
            replica_ids = (hint,)
        return await self._first_leading(replica_ids, lambda term: term >= self.term)

    async def _first_leading(self, replica_ids: Iterable[str], counts: Callable[[int], bool]) -> Channel | None:
        """The first of them that says that it leads, in a term that counts, is followed from now on."""
        asked = [asyncio.ensure_future(self._ask(replica_id)) for replica_id in replica_ids]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None and found[0].role == "leader" and counts(found[0].term):
                    return self._follow(found[1], found[0].term)
        finally:
            for task in asked:
                task.cancel()
        return None

    async def _ask(self, replica_id: str) -> tuple[ReplicaStatus, Channel] | None:
        trouble = ""
        try:
            found = await in_time(self._status(replica_id), _ASK_S)
            trouble = found[0].problem
        except ConfigError:  # ours: nobody will lead for us
            raise
        except StorageError as error:
            found, trouble = None, str(error)
        except (RayQueueError, asyncio.TimeoutError):
            found = None
        self._troubles[replica_id] = trouble
        return found

    @property
    def trouble(self) -> str:
        """Why nobody may lead, for the end of a sentence; "" if nothing is known."""
        told = [f"{replica_id}: {why}" for replica_id, why in sorted(self._troubles.items()) if why]
        return f" ({'; '.join(told)})" if told else ""

    def _nobody_leads(self) -> NotLeaderError:
        return NotLeaderError(f"no replica of {self.group_id} leads at the moment{self.trouble}", leader=None)

    async def _status(self, replica_id: str) -> tuple[ReplicaStatus, Channel]:
        channel = await self._replicas.channel(replica_id)
        return await channel.call(GetStatus()), channel

    def _follow(self, channel: Channel, term: int) -> Channel:
        self._check_open()
        self.term = term
        self._forget_leader()
        self.leader_channel = channel
        channel.add_closed_callback(self._lost)
        channel.watch(self._overdue)
        self._replicas.keep_only(channel)
        return channel

    def _forget_leader(self) -> None:
        """It is still watched: what it was asked before and does not answer must not wait for it (``_overdue``)."""
        self.leader_channel = None

    def _lost(self, channel: Channel) -> None:
        """The connection broke. If this was the leader's, there will be another one soon: look for it now."""
        if channel is self.leader_channel and not self.closed:
            self._forget_leader()
            self._searching()

    # -- doubt ------------------------------------------------------------------------------

    def _overdue(self, channel: Channel) -> None:
        """The leader does not answer. It may be slow, stopped, or cut off from the others, who then know better.

        Or it was the leader: then whoever waits for it is told, and asks the one that leads now.
        """
        leader = self.leader_channel
        if leader is not None and channel is not leader:
            channel.close(f"it did not answer, and {leader.endpoint.replica_id} leads now")
        elif leader is not None and self._doubt is None:
            self._doubt = asyncio.get_running_loop().create_task(self._ask_others(channel))
            self._doubt.add_done_callback(self._doubted)

    def _doubted(self, doubt: asyncio.Task[None]) -> None:
        self._doubt = None
        heard(doubt)

    async def _ask_others(self, doubtful: Channel) -> None:
        others = [replica_id for replica_id in self.replica_ids if replica_id != doubtful.endpoint.replica_id]
        newer = lambda term: term > self.term and doubtful is self.leader_channel  # noqa: E731
        try:
            found = await self._first_leading(others, newer)
            if found is not None:
                doubtful.close(f"it did not answer, and {found.endpoint.replica_id} leads now")
        finally:
            if self.leader_channel is not None:
                self._replicas.keep_only(self.leader_channel)

    def _check_open(self) -> None:
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the route to {self.group_id} was closed")


class CoordinatorRoute(GroupRoute):
    """The route to the coordinator's group, whose replicas the directory names."""

    def __init__(self, directory: Directory, settings: Settings) -> None:
        super().__init__(COORDINATOR, (), directory, settings)
        self._replicas = Replicas(COORDINATOR, (), directory, settings, find=directory.coordinators)
