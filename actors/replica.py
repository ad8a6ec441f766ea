"""The Ray actor of one partition replica: a thin shell around ``rayqueue.replica.Replica``.

Owns the process: what it is called, what a restart does, which calls wait for
which. Everything else is the replica's, which knows nothing of Ray.

**Calls never wait for each other.** The actor is async, and its methods are in
three concurrency groups: append, fetch, control. In Ray each group has an
event loop and a thread of its own, so thousands of fetches that wait for new
records hold up no append, and a slow disk read holds up neither.

**Errors** are those of ``rayqueue.errors``. Ray raises them at the caller as a
class that is both ``RayTaskError`` and the error's own type, with its
``details``; ``rayqueue.client.calls`` takes the wrapping off again.

**Restarts.** After a crash Ray starts the actor anew with the same arguments
(``max_restarts=-1``), and it continues from its disk. Only the very first
start may make data: if a restarted replica finds none, its disk was lost, and
since it may have voted and acknowledged, it must not begin anew under its old
id. A replica that cannot start stays, does nothing, and answers every call with
the reason (``StoreMissingError`` and others): an actor that fails while it is
constructed would leave no more than a text. A failure of the running engine
ends the process at once.

**Peers.** A replica listens on a new port each time it starts. It asks the
actors of the other members, which it finds by name, where they listen, until
each has answered once, and dials them; they learn where it listens from the
connection. Of two replicas that restart, the later one finds the earlier one,
so all find each other without anybody keeping addresses.

It does not decide who is a member, nor where replicas are placed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ray
from ray.exceptions import RayError

from rayqueue.actors.names import actor_name, check_id
from rayqueue.actors.replies import Replies, Reply, ReplyTo, deliver
from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, OffsetOutOfRangeError, RayQueueError, StorageError
from rayqueue.ids import GroupId, NodeId, Offset
from rayqueue.partition import Appended, Fetched, PartitionSettings
from rayqueue.partition.reader import MAX_LANE
from rayqueue.raft.members import Members
from rayqueue.raft.stream import is_numeric
from rayqueue.replica import Answer, Replica, Status, create_replica, start_replica

_log = logging.getLogger(__name__)

Address = tuple[str, int]

_LOCK_PATIENCE_S = 20.0
_LOCK_RETRY_S = 0.05
_PEER_ANSWER_S = 2.0
_PEER_RETRY_MIN_S = 0.05
_PEER_RETRY_MAX_S = 1.0
_RECHECK_S = 0.005


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica's process must know. Ray keeps it and hands it to each restart."""

    group_id: GroupId
    """The partition, such as ``orders-3``."""
    node_id: NodeId
    settings: Settings
    """Data is kept below ``settings.data_dir`` of the node that the actor runs on."""
    create: bool = False
    """Make the replica's data if there is none. Without it, or in a restart, missing data is an error."""
    voters: tuple[NodeId, ...] | None = None
    """The members of a new group. None: this replica has data, or waits to be added to a group."""
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    host: str = "127.0.0.1"
    """Where it listens for its peers, who must be able to reach it there."""

    @property
    def path(self) -> Path:
        return self.settings.data_dir / check_id(self.group_id) / check_id(self.node_id)


class Fetch(NamedTuple):
    """What a fetch found. Empty if nothing came in time."""

    batches: list[Fetched]
    high_watermark: Offset
    start_offset: Offset


class Process(NamedTuple):
    """Where an actor runs."""

    pid: int
    host: str
    ray_node_id: str


class ReplicaActor:
    """One replica. ``rayqueue.actors.start`` makes the actor of it."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._calls = spec.settings.calls
        self._addresses: dict[NodeId, Address] = {}
        self._started: Replica | RayQueueError
        _mark_logs(f"{spec.group_id} {spec.node_id}")
        try:
            if spec.create and not _restarted() and not spec.path.exists():
                members = None if spec.voters is None else Members.of(spec.voters)
                create_replica(spec.path, spec.group_id, spec.node_id, members, spec.settings)
            self._started = _start(spec)
        except RayQueueError as error:
            _log.critical("cannot start: %s", error)
            self._started = error
            return
        self._readers = ThreadPoolExecutor(self._calls.disk_readers, thread_name_prefix="disk")
        self._loop = asyncio.get_running_loop()
        self._look_for_peers = asyncio.Event()
        self._meeting = self._loop.create_task(self._meet_peers(self._started))

    def __repr__(self) -> str:
        if isinstance(self._started, RayQueueError):
            return f"{self._spec.group_id} {self._spec.node_id}: {self._started}"
        status, mark = self._started.status, self._started.high_watermark
        return f"{status.group_id} {status.role} {status.node_id}, term {status.term}, high watermark {mark}"

    @property
    def _replica(self) -> Replica:
        """Raises if the replica could not be started."""
        if isinstance(self._started, RayQueueError):
            raise type(self._started)(str(self._started), **self._started.details)
        return self._started

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
        deadline_s = time.monotonic() + _PEER_ANSWER_S
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
    async def status(self) -> Status:
        """As it is now."""
        return await self._inspected()

    @ray.method(concurrency_group="control")
    async def address(self) -> Address:
        """Where this replica listens for its peers."""
        return self._replica.status.address

    @ray.method(concurrency_group="control")
    async def process(self) -> Process:
        context = ray.get_runtime_context()
        return Process(os.getpid(), self._spec.host, context.get_node_id())

    @ray.method(concurrency_group="control")
    async def set_peers(self, addresses: Mapping[NodeId, Address]) -> None:
        """Where others listen, if somebody knows better than their names in Ray."""
        _check_addresses(addresses)
        self._addresses = {**self._addresses, **addresses}
        self._replica.set_peers(self._addresses)

    @ray.method(concurrency_group="control")
    async def confirm_leadership(self) -> None:
        """Returns if a majority confirms, after this call, that the replica leads."""
        await self._asked(self._replica.confirm_leadership)

    @ray.method(concurrency_group="control")
    async def command(self, payload: bytes) -> Any:
        """Propose a command of ``rayqueue.partition.commands``; answers what applying it answers."""
        return await self._asked(lambda answer: self._replica.command(payload, answer))

    @ray.method(concurrency_group="control")
    async def add_learner(self, node: NodeId) -> None:
        check_id(node)
        await self._change(lambda members: members.with_learner(node))

    @ray.method(concurrency_group="control")
    async def promote(self, node: NodeId) -> None:
        """Let a learner that has caught up vote."""
        check_id(node)
        await self._change(lambda members: members.with_voter(node))

    @ray.method(concurrency_group="control")
    async def remove(self, node: NodeId) -> None:
        check_id(node)
        await self._change(lambda members: members.without(node))

    @ray.method(concurrency_group="control")
    async def transfer_leadership(self, target: NodeId) -> None:
        check_id(target)
        await self._asked(lambda answer: self._replica.transfer_leadership(target, answer))

    @ray.method(concurrency_group="control")
    async def close(self) -> None:
        """Stop in good order. The actor stays, and answers every other call with ``ReplicaClosedError``."""
        replica = self._replica
        self._loop.call_soon_threadsafe(self._meeting.cancel)
        await asyncio.to_thread(replica.close)

    async def _change(self, change: Callable[[Members], Members]) -> None:
        await self._asked(lambda answer: self._replica.change_members(change, answer))
        self._loop.call_soon_threadsafe(self._look_for_peers.set)

    async def _inspected(self) -> Status:
        return await self._asked(self._replica.inspect)  # type: ignore[no-any-return]

    async def _asked(self, ask: Callable[[Answer], None]) -> Any:
        reply = Reply()
        ask(reply)
        return await reply.future

    # -- peers ---------------------------------------------------------------------------------

    async def _meet_peers(self, replica: Replica) -> None:
        """Ask each member where it listens, until it has said so once. Ends with the replica."""
        pause_s = _PEER_RETRY_MIN_S
        named: dict[NodeId, Address] = {}
        while True:
            status = replica.status
            members = {*status.voters, *status.learners} - {self._spec.node_id}
            missing = sorted(members - self._addresses.keys())
            answers = await asyncio.gather(*map(self._address_of, missing))
            found = {peer: address for peer, address in zip(missing, answers, strict=True) if address is not None}
            self._addresses = {**self._addresses, **found}
            wanted = {peer: self._addresses[peer] for peer in members & self._addresses.keys()}
            if wanted != named:
                replica.set_peers(wanted)
                named = wanted
            pause_s = min(pause_s * 2, _PEER_RETRY_MAX_S)
            try:
                await asyncio.wait_for(self._look_for_peers.wait(), pause_s)
            except asyncio.TimeoutError:
                continue
            self._look_for_peers.clear()
            pause_s = _PEER_RETRY_MIN_S

    async def _address_of(self, peer: NodeId) -> Address | None:
        name, namespace = actor_name(self._spec.group_id, peer), self._spec.settings.namespace
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, namespace)
            call: Awaitable[Address] = handle.address.remote()
            return await asyncio.wait_for(call, _PEER_ANSWER_S)
        except (ValueError, OSError, RayError, RayQueueError, asyncio.TimeoutError) as error:
            _log.debug("%s has not said where it listens: %s", peer, error)
            return None


def _start(spec: ReplicaSpec) -> Replica:
    """Run the replica. While another process has the data open, wait for its end: at first here, then by restarts."""
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return start_replica(
                spec.path,
                spec.group_id,
                spec.node_id,
                spec.settings,
                host=spec.host,
                partition=spec.partition,
                deliver=deliver,
                on_fatal=_die,
            )
        except StorageError as error:
            if error.details.get("reason") != "locked":
                raise
            if time.monotonic() > deadline_s:
                _die(error)
        time.sleep(_LOCK_RETRY_S)


def _restarted() -> bool:
    """Whether this process continues the work of an earlier one. If Ray does not know, it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of a name that it has deprecated
        return ray.get_runtime_context().was_current_actor_reconstructed is not False


def _die(error: BaseException) -> NoReturn:
    """The engine failed: whoever waits learns it from the broken connection, and Ray starts the actor again."""
    _log.critical("the process ends: %s", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _mark_logs(who: str) -> None:
    """Every line of RayQueue's in this process's log says whose it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who} %(name)s: %(message)s"))
    logger = logging.getLogger("rayqueue")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, bytes):
        raise InvalidInputError(f"a batch is bytes, not {type(batch).__name__}")


def _check_addresses(addresses: Any) -> None:
    """The engine's thread uses them, and whatever fails there ends the process."""
    try:
        for node, (host, port) in addresses.items():
            check_id(node)
            if not is_numeric(host) or not 0 < port < 2**16:
                raise InvalidInputError(f"{node} needs a numeric address and a port, not {host}:{port}")
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"peers come as ids with a host and a port: {error}") from None


def _check_fetch(max_bytes: Any, max_wait_ms: Any, lane: Any) -> None:
    for name, number in (("max_bytes", max_bytes), ("max_wait_ms", max_wait_ms)):
        if not isinstance(number, int) or number < 0:
            raise InvalidInputError(f"{name} is a whole number that is not negative, not {number!r}")
    if lane is not None and (not isinstance(lane, int) or not 0 <= lane <= MAX_LANE):
        raise InvalidInputError(f"a lane is a number from 0 to {MAX_LANE}, not {lane!r}", lane=lane)
