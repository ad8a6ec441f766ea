"""Polling: what every kind of poll does, written once for threads and coroutines.

A poll tells the listener what has changed, raises what went wrong, and takes
what waits in memory; only if nothing does it waits. The waiting itself is left
to whoever runs it (``rayqueue.client.twins``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rayqueue.client.arguments import check_count
from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.lane import Chunk
from rayqueue.client.consumer.reader import ConsumerTasks
from rayqueue.client.consumer.subscription import Change, ChangeKind, Reading
from rayqueue.client.io import IoThread
from rayqueue.client.twins import Steps, in_io, of_application, rest
from rayqueue.config import ConsumerSettings
from rayqueue.errors import (
    ClosedError,
    DeserializationError,
    RayQueueError,
    StaleGenerationError,
    UnreadableBatchError,
)
from rayqueue.net.backoff import longest_s
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from rayqueue.records.room import Room

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

MAX_SET_ASIDE = 100
"""What a consumer keeps for its application; with so much, ``poll`` raises until it is taken."""
_LOGGED_SKIPS = 100
_LOGGED_EVERY = 1000
"""Of the skipped records the first so many have a line in the log each, and then each thousandth."""
_LATE_SKIPS = 1000
"""A poll whose time is up still skips so much to get at a record that is there."""
_BACK_OFF_MS, _MAX_BACK_OFF_MS = 50, 1000

Unreadable = UnreadableBatchError | DeserializationError
Records = list[Record[Any, Any]]
Block = Reading | Records
"""What an iteration hands out record by record."""


class Listener(Protocol):
    """Told of each change of what a consumer reads. Methods may be coroutines if the consumer is polled by one.

    One with a method ``deleted(topic)`` is also told of topics that were deleted, after their partitions were ``lost``.
    """

    def assigned(self, partitions: Sequence[TopicPartition]) -> Any:
        """These are read from now on. The place to ``seek``."""

    def revoked(self, partitions: Sequence[TopicPartition]) -> Any:
        """These are about to go to another member. The place to finish and ``commit``."""

    def lost(self, partitions: Sequence[TopicPartition]) -> Any:
        """These went, to another member already or with their topic: a commit would be refused."""


class Polling:
    """The application's side of a ``ConsumerTasks``."""

    def __init__(
        self, io: IoThread, core: ConsumerTasks, settings: ConsumerSettings, listener: Listener | None
    ) -> None:
        self.closing = False
        self.woken = False
        self._io = io
        self._core = core
        self._sub = core.subscription
        self._options = core.options
        self._settings = settings
        self._listener = listener
        self.skipped = 0
        """Batches that could not be read and were passed over."""
        self.skipped_records = 0
        """Records of which the value or key could not be read."""
        self.set_aside: list[tuple[Unreadable, bytes]] = []
        self._skipping = False
        self._raised_at: tuple[Any, ...] = ()
        self._raised = 0
        self._revoking: tuple[Change, concurrent.futures.Future[list[RayQueueError]]] | None = None
        """What is to be given up once this commit is done; a poll that has no time left goes on without."""

    # -- kinds of polls ----------------------------------------------------------------------

    def records(self, max_records: int | None, timeout_s: float, max_bytes: int | None = None) -> Steps[Records | None]:
        most = self.most(max_records)
        if max_bytes is not None:
            check_count("max_bytes", max_bytes)
        return self._polling(lambda: self._take_records(most, max_bytes), timeout_s)

    def parts(self, max_records: int | None, timeout_s: float) -> Steps[list[Any] | None]:
        """``arrow.Part``s."""
        return self._polling(self._parts_of(max_records), timeout_s)

    def block(self, timeout_s: float) -> Steps[Block | None]:
        return self._polling(self._block, timeout_s)

    def _block(self) -> Block | None:
        if self._options.at_most_once:
            return self._take_records(self._settings.max_poll_records)
        return self._sub.read()

    def each(self, block: Block | None) -> Iterator[Record[Any, Any]]:
        if block is None:
            return
        if isinstance(block, list):
            yield from block
            return
        records, sub, stamp = block.records, self._sub, block.stamp
        for index in range(block.index, len(records)):
            if sub.stamp != stamp:
                return  # something is more urgent, or this is not to be read any more
            block.index = index + 1
            yield records[index]

    def decoded(self, records: Records) -> Records:
        """Records as this consumer hands them out."""
        return records

    def _take_records(self, most: int, max_bytes: int | None = None) -> Records | None:
        found: Records = []
        room = None if max_bytes is None else Room(max_bytes)
        while len(found) < most:
            try:
                taken = self._take_some(most - len(found), room)
            except RayQueueError:
                if not found:
                    raise
                break  # what cannot be read: first what is before it
            if taken is None:
                break
            found = found + taken if found else taken
        return found or None

    def _take_some(self, most: int, room: Room | None) -> Records | None:
        """Of one batch."""
        if room is None:
            taken = self._sub.take(most, _records)
            return None if taken is None else taken[1]
        while (found := self._sub.look(most)) is not None:
            seen, records = found
            count, size_bytes = room.fitting(records)
            if not count:
                break
            if self._sub.take_seen(seen._replace(stop=seen.start + count)):
                room.take(size_bytes)
                return records[:count]
        return None

    def _parts_of(self, max_records: int | None) -> Callable[[], list[Any] | None]:
        from rayqueue.client.consumer import arrow

        most = None if max_records is None else self.most(max_records)
        budget_bytes = self._settings.fetch_bytes

        def take() -> list[Any] | None:
            parts: list[Any] = []
            count = size_bytes = 0
            while size_bytes < budget_bytes and (most is None or count < most):
                try:
                    taken = self._sub.take(2**31 if most is None else most - count, arrow.part)
                except RayQueueError:
                    if not parts:
                        raise
                    break
                if taken is None:
                    break
                parts.append(taken[1])
                count += taken[0]
                size_bytes += taken[1].size_bytes
            return parts or None

        return take

    def most(self, max_records: int | None) -> int:
        if max_records is None:
            return self._settings.max_poll_records
        most: int = check_count("max_records", max_records)
        return most

    async def _polling(self, take: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """The steps of every kind of poll."""
        core, sub = self._core, self._sub
        once = self._options.at_most_once
        now_s = time.monotonic()
        deadline_s = now_s + timeout_s
        late_skips = 0
        sub.asked_for_more()
        core.last_poll.at_s = now_s
        core.last_poll.under_way = True
        try:
            if not core.started:
                await in_io(self._io, core.start(), finish=True)
            elif core.away:
                core.polled()
            while True:
                if self.closing:
                    raise ClosedError("this consumer was closed")
                if sub.changes or sub.deleted or self._revoking is not None:
                    await self._tell_changes(deadline_s)
                error = core.error or sub.error()
                if error is not None:
                    raise error
                held = self._held() if once else {}
                taken = await self._taking(take)
                if taken is not None and once:
                    taken = await self._commit_first(taken, held)
                left_s = deadline_s - time.monotonic()
                late_skips += self._skipping and left_s <= 0
                go_on = left_s > 0 or (self._skipping and late_skips <= _LATE_SKIPS)
                if taken is not None or not go_on or self.woken:
                    self.woken = False
                    return taken
                await rest(core.wakeup, 0.0 if self._skipping else left_s)
        finally:
            core.last_poll.at_s = time.monotonic()
            core.last_poll.under_way = False

    async def _taking(self, take: Callable[[], _T | None]) -> _T | None:
        """Take from memory; a record that cannot be read goes the way that ``on_corrupt`` says, one at a time."""
        self._skipping = False
        try:
            return take()
        except (UnreadableBatchError, DeserializationError) as error:
            aside = self._settings.on_corrupt == "set_aside"
            if self._settings.on_corrupt == "raise" or (aside and len(self.set_aside) >= MAX_SET_ASIDE):
                place = (error.details["topic"], error.details["partition"], error.details["offset"])
                self._raised = self._raised + 1 if place == self._raised_at else 0
                self._raised_at = place
                if self._raised:  # asked again without a seek: not in a tight loop
                    await rest(self._core.wakeup, longest_s(_BACK_OFF_MS, _MAX_BACK_OFF_MS, self._raised))
                raise
            payload = self._sub.skip_unreadable()
            if payload is not None:
                self._skipped(error, payload, aside)
            self._skipping = True
            return None

    def _skipped(self, error: Unreadable, payload: bytes | memoryview, aside: bool) -> None:
        told = True
        if isinstance(error, DeserializationError):
            self.skipped_records += 1
            payload = error.details["record"].value or b""
            told = self.skipped_records <= _LOGGED_SKIPS or self.skipped_records % _LOGGED_EVERY == 0
        else:
            self.skipped += 1
        if told:
            _log.error("%s (%s)", error, "set aside" if aside else "skipped")
        if aside:
            self.set_aside.append((error, bytes(payload)))

    def _held(self) -> dict[TopicPartition, AssignedPartition]:
        with self._sub.lock:
            return dict(self._sub.assigned)

    async def _commit_first(self, taken: _T, held: Mapping[TopicPartition, AssignedPartition]) -> _T | None:
        """At most once: nobody gets these records again, so hand them out only once that is certain."""
        self._sub.ack_handed()
        for error in await in_io(self._io, self._core.commit_due(), finish=True):
            if not isinstance(error, StaleGenerationError):
                raise error
        # What was lost meanwhile another member has, even if it was given back since: that is another assignment.
        now_held = self._held()
        ours = {partition for partition, assigned in held.items() if now_held.get(partition) is assigned}
        return taken if len(ours) == len(held) else _still_read(taken, ours)

    async def close(self, *, done: bool) -> None:
        """Give everything up. ``done``: also what was handed out last."""
        core, sub = self._core, self._sub
        if done:
            sub.ack_handed()
        else:
            sub.settle(current_done=False)
        commit = self._options.auto_commit and self._options.group is not None
        try:
            partitions = [assigned for assigned in list(sub.assigned.values()) if assigned.shown]
            if partitions and self._listener is not None:
                if commit:
                    await in_io(self._io, core.commit_due(partitions), finish=True)
                await calling(self._listener.revoked(names_of(partitions)))
        finally:
            await in_io(self._io, core.close(commit=commit), finish=True)

    # -- rebalancing -----------------------------------------------------------------------

    async def _tell_changes(self, deadline_s: float) -> None:
        """Tell the listener of everything that has changed, in order, as far as it can be told by then."""
        sub = self._sub
        while True:
            if self._revoking is not None:
                left_s = deadline_s - time.monotonic()
                if self._revoking[1].done():
                    (change, commit), self._revoking = self._revoking, None
                    for error in commit.result():
                        _log.warning("partitions are given up without their last commit: %s", error)
                    await self._revoked(change)
                elif left_s <= 0 or self.closing:
                    return  # the commit goes on, and the partitions stay until it is done
                else:
                    await rest(self._core.wakeup, left_s)
                continue
            change_or_none = sub.next_change() if sub.changes else None
            if change_or_none is None:
                break
            await self._tell(change_or_none)
        while sub.deleted:
            topic = sub.deleted.popleft()
            told = getattr(self._listener, "deleted", None)
            if told is not None:
                await calling(told(topic))

    async def _tell(self, change: Change) -> None:
        """Tell the listener, and do what has to be done around it."""
        sub, listener = self._sub, self._listener
        if change.kind is ChangeKind.ASSIGNED:
            partitions = [assigned for assigned in change.partitions if not assigned.letting_go]
            try:
                if partitions and listener is not None:
                    await calling(listener.assigned(names_of(partitions)))
            finally:
                sub.show(partitions)
        elif change.kind is ChangeKind.REVOKED and self._options.auto_commit:
            partitions = self._held_of(change)
            sub.ack_handed(partitions)
            commit = self._io.run(self._core.commit_due(partitions))
            commit.add_done_callback(lambda _: self._core.wakeup.ring())
            self._revoking = change, commit
        elif change.kind is ChangeKind.REVOKED:
            await self._revoked(change)
            if self._options.exactly_once:
                sub.forfeit(change.partitions)
        else:
            if not self._options.exactly_once:  # else the transaction must know, whoever else does
                sub.take_forfeited()
            partitions = [assigned for assigned in change.partitions if assigned.shown]
            if partitions and listener is not None:
                await calling(listener.lost(names_of(partitions)))

    async def _revoked(self, change: Change) -> None:
        partitions = self._held_of(change)
        try:
            if partitions and self._listener is not None:
                await calling(self._listener.revoked(names_of(partitions)))
        finally:
            self._core.released(partitions)

    def _held_of(self, change: Change) -> list[AssignedPartition]:
        """Those that were not lost meanwhile."""
        return [assigned for assigned in change.partitions if self._sub.assigned.get(assigned.partition) is assigned]


def _records(assigned: AssignedPartition, chunk: Chunk, start: int, stop: int) -> list[Record]:
    records = chunk.records(assigned.partition.topic, assigned.partition.partition)
    if start == chunk.base and stop == chunk.end:
        return records
    return records[start - chunk.base : stop - chunk.base]


async def calling(returned: Any) -> None:
    """A listener's method was called; if it is a coroutine, it is to be awaited."""
    if asyncio.iscoroutine(returned):
        await of_application(returned)


def names_of(partitions: Iterable[AssignedPartition]) -> list[TopicPartition]:
    return sorted(assigned.partition for assigned in partitions)


def _still_read(taken: Any, partitions: Container[TopicPartition]) -> Any:
    """Of records, or parts of tables, those of partitions that were not lost."""
    return [each for each in taken if TopicPartition(each.topic, each.partition) in partitions] or None
