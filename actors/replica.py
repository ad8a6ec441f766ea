"""The Ray actor of one partition replica: a thin shell around ``rayqueue.replica.PartitionReplica``.

Owns the process: what it is called, what a restart does, which calls wait for
which. Everything else is the replica's, which knows nothing of Ray.

**Calls never wait for each other.** The actor is async, and its methods are in
three concurrency groups: append, fetch, control. In Ray each group has an
event loop and a thread of its own, so thousands of fetches that wait for new
records hold up no append, and a slow disk read holds up neither.

**Errors** are those of ``rayqueue.errors``. Ray raises them at the caller as a
class that is both ``RayTaskError`` and the error's own type, with its
``details``; ``rayqueue.client.calls`` takes the wrapping off again.

Restarts and peers are ``rayqueue.actors.member``'s.

It does not decide who is a member, nor where replicas are placed.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from rayqueue.actors.member import PEER_ANSWER_S, MemberActor, MemberSpec, Process, die
from rayqueue.actors.replies import Replies, Reply, ReplyTo, deliver
from rayqueue.errors import InvalidInputError, OffsetOutOfRangeError, RayQueueError
from rayqueue.ids import Offset
from rayqueue.partition import Appended, Fetched, PartitionSettings
from rayqueue.partition.reader import MAX_LANE
from rayqueue.replica import PartitionReplica, start_replica

__all__ = ["Fetch", "Process", "ReplicaActor", "ReplicaSpec"]

_RECHECK_S = 0.005


@dataclass(frozen=True, slots=True)
class ReplicaSpec(MemberSpec):
    """What a partition replica's process must know. Its group is the partition, such as ``orders-3``."""

    partition: PartitionSettings = field(default_factory=PartitionSettings)


class Fetch(NamedTuple):
    """What a fetch found. Empty if nothing came in time."""

    batches: list[Fetched]
    high_watermark: Offset
    start_offset: Offset


class ReplicaActor(MemberActor[PartitionReplica]):
    """One replica. ``rayqueue.actors.start`` makes the actor of it."""

    _spec: ReplicaSpec

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        self._calls = spec.settings.calls
        self._readers = ThreadPoolExecutor(self._calls.disk_readers, thread_name_prefix="disk")

    def _start(self) -> PartitionReplica:
        spec = self._spec
        return start_replica(
            spec.path,
            spec.group_id,
            spec.node_id,
            spec.settings,
            host=spec.host,
            partition=spec.partition,
            deliver=deliver,
            on_fatal=die,
        )

    # -- writing -------------------------------------------------------------------------

    @ray.method(concurrency_group="append")
    async def append(self, batch: bytes) -> Appended:
        """Append an encoded batch; answers once a majority has it on disk."""
        _check_batch(batch)
        reply = Reply()
        self._replica.append(batch, reply)
        return await reply.future  # type: ignore[no-any-return]

    @ray.method(concurrency_group="append")
    async def append_many(self, batches: list[bytes]) -> list[Appended | RayQueueError]:
        """Append batches in this order, by one call. Each has its own answer, which may be an error."""
        if not isinstance(batches, list):
            raise InvalidInputError(f"batches come as a list, not {type(batches).__name__}")
        if not batches:
            return []
        replies = Replies(len(batches))
        for position, batch in enumerate(batches):
            try:
                _check_batch(batch)
                self._replica.append(batch, ReplyTo(replies, position))
            except RayQueueError as error:
                replies.take(position, error)
        return await replies.future

    # -- reading -------------------------------------------------------------------------

    @ray.method(concurrency_group="fetch")
    async def fetch(self, offset: int, max_bytes: int, max_wait_ms: int = 0, lane: int | None = None) -> Fetch:
        """Batches from the one that holds ``offset`` on: at least one, then while they fit.

        At the end of the log it waits for the next one, at most ``max_wait_ms``.
        """
        _check_fetch(max_bytes, max_wait_ms, lane)
        max_bytes = min(max_bytes, self._calls.max_fetch_bytes)
        loop, replica = asyncio.get_running_loop(), self._replica
        deadline_s = loop.time() + min(max_wait_ms, self._calls.max_fetch_wait_ms) / 1000
        while True:
            seen = replica.high_watermark
            try:
                batches = replica.read_tail(offset, max_bytes, lane)
            except OffsetOutOfRangeError:
                await self._confirm_end(offset)
                continue
            if batches is None:
                batches = await loop.run_in_executor(self._readers, replica.read_disk, offset, max_bytes, lane)
            if batches or not await self._grows(seen, deadline_s - loop.time()):
                return Fetch(batches, replica.high_watermark, replica.status.start_offset)

    async def _grows(self, end: Offset, timeout_s: float) -> bool:
        """True as soon as the log reaches past ``end``; False if it does not in time."""
        if self._replica.high_watermark > end:
            return True
        if timeout_s <= 0:
            return False
        reply = Reply()
        self._replica.when_longer(end, reply)
        timer = reply.loop.call_later(timeout_s, reply, False)
        try:
            grown = await reply.future is not False
        finally:
            timer.cancel()
        if not grown:
            self._replica.forget_reader(reply)
        return grown

    async def _confirm_end(self, offset: int) -> None:
        """``offset`` is past the end that this replica knows. Raise, unless the end turns out to be further.

        A leader that was just elected may not know yet how much of its log is
        committed, and a follower never knows. Saying "out of range" then would
        send a reader back to records that it has read.
        """
        await self._asked(self._replica.confirm_leadership)
        status = await self._inspected()
        commit = status.commit
        deadline_s = time.monotonic() + PEER_ANSWER_S
        while status.applied < commit and time.monotonic() < deadline_s:
            await asyncio.sleep(_RECHECK_S)
            status = await self._inspected()
        start, end = status.start_offset, self._replica.high_watermark
        if offset > end:
            raise OffsetOutOfRangeError(
                f"offset {offset} is past the end; the log has {start} to {end}", offset=offset, start=start, end=end
            )

    # -- the group ------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    async def command(self, payload: bytes) -> Any:
        """Propose a command of ``rayqueue.partition.commands``; answers what applying it answers."""
        return await self._asked(lambda answer: self._replica.command(payload, answer))


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, bytes):
        raise InvalidInputError(f"a batch is bytes, not {type(batch).__name__}")


def _check_fetch(max_bytes: Any, max_wait_ms: Any, lane: Any) -> None:
    for name, number in (("max_bytes", max_bytes), ("max_wait_ms", max_wait_ms)):
        if not isinstance(number, int) or number < 0:
            raise InvalidInputError(f"{name} is a whole number that is not negative, not {number!r}")
    if lane is not None and (not isinstance(lane, int) or not 0 <= lane <= MAX_LANE):
        raise InvalidInputError(f"a lane is a number from 0 to {MAX_LANE}, not {lane!r}", lane=lane)
