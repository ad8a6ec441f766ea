"""The base of every replica's actor, whatever the replica's state machine is.

Owns the process: what it is called in logs, what a restart does, and how it
finds the other replicas of its group.

**Restarts.** After a crash Ray starts the actor anew with the same arguments
(``max_restarts=-1``), and it continues from its disk. Only the very first
start may make data: if a restarted replica finds none, its disk may be lost, and
since it may have voted and acknowledged, it must not begin anew under its old
id. A restart that finds data half made makes it anew: it was never used. One
that finds nothing at all cannot know. It says so (``StoreMissingError``), and
the keeper, which knows whether the replica was ever made, starts it again.
A replica that cannot start stays, and answers every call with the reason
(``StoreMissingError`` and others): an actor that fails while it is constructed
would leave no more than a text. Lost data is reported at once, a disk that
refuses (``reason="disk"``) after some tries, and what may pass by itself is tried
again. A failure of the running engine ends the process at once.

**Peers.** A replica listens on a new port each time it starts. It asks the
actors of the other replicas, which it finds by name, where they listen, as long
as it has no connection with them (``rayqueue.actors.meeting``), and dials them;
they learn where it listens from the connection. So all find each other without
anybody keeping addresses.

**Imports.** Ray loads an actor's class in every process that gets a handle of
it, so every client pays for what is imported here and in the subclasses. What
only the running replica needs, it imports when it starts.

It does not decide which replicas a group has, nor where they are placed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import ray
from ray.exceptions import RayError

from rayqueue.actors.meeting import Address, Meeting
from rayqueue.actors.names import actor_name, check_id, readable
from rayqueue.actors.replies import Reply
from rayqueue.config import Settings
from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    RayQueueError,
    StorageError,
    StoreAbandonedError,
    StoreMissingError,
)
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.lasting import lasting
from rayqueue.net.requests import in_time

if TYPE_CHECKING:
    from rayqueue.raft.replica_set import ReplicaSet
    from rayqueue.replica.answers import Answer
    from rayqueue.replica.replica import Replica
    from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)

ReplicaT = TypeVar("ReplicaT", bound="Replica[Any]")

_PEER_ANSWER_S = 2.0
_LOCK_PATIENCE_S = 20.0
_LOCK_RETRY_S = 0.05
_TRIES, _TRY_AGAIN_S = 3, 10.0
"""A disk that refuses is reported after so many starts in vain. What may pass is tried again so often."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All that a replica's process must know. Ray keeps it and hands it to each restart."""

    group_id: GroupId
    replica_id: ReplicaId
    settings: Settings
    """Data is kept below ``settings.data_dir`` of the node that the actor runs on."""
    create: bool = False
    """Make the replica's data if there is none. Without it, or in a restart, missing data is an error."""
    voters: tuple[ReplicaId, ...] | None = None
    """The voters of a new group. None: this replica has data, or waits to be added to a group."""
    host: str = "127.0.0.1"
    """Where it listens for its peers, who must be able to reach it there."""
    epoch: int = 0
    """The group's (``rayqueue.raft.recovery``): data from before it is not served."""
    alone: bool = False
    """Data from before it is what the group goes on with, without all others. Only at the very first start: a restart
    may find an older copy."""
    directory: str = ""
    """Its broker's, below ``settings.data_dir`` (``rayqueue.actors.keeper.claims``)."""

    @property
    def path(self) -> Path:
        return self.settings.data_dir / self.directory / check_id(self.group_id) / check_id(self.replica_id)


class Process(NamedTuple):
    """An actor's process, and the host and Ray node it runs on."""

    pid: int
    host: str
    ray_node_id: str


class ReplicaActor(Generic[ReplicaT]):
    """One replica of a group, whatever the group is for."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        _mark_logs(f"{spec.group_id} {spec.replica_id}")
        self._loop = asyncio.get_running_loop()
        self._started: ReplicaT | RayQueueError = self._attempt()
        if isinstance(self._started, RayQueueError):
            self._waiting = self._loop.create_task(self._try_again(self._started))
        else:
            self._run_beside(self._started)

    def _attempt(self) -> ReplicaT | RayQueueError:
        """The replica, or why it cannot start."""
        from rayqueue.log.lmdb_file import disk_error

        try:
            return self._start_unlocked()
        except RayQueueError as error:
            return error
        except OSError as error:
            if error.filename is not None:
                return disk_error(self._spec.path, error)
            return StorageError(f"the operating system refuses: {error}", reason="system", errno=error.errno)

    async def _try_again(self, error: RayQueueError) -> None:
        """Have the replica replaced if its data is lost, or its disk refuses it again and again. What may pass (a disk
        that is remounted, a directory that is brought back) is tried again all the same: it may be its group's only
        replica."""
        from rayqueue.actors.loss import report_loss

        spec = self._spec
        self._telling: asyncio.Task[None] | None = None
        said, reported = "", ""
        for tries in count(1):
            if str(error) != said:
                said = str(error)
                _log.critical("cannot start: %s", said)
            missing = type(error) is StoreMissingError  # not one of its kinds, which has found something
            lost = isinstance(error, StoreMissingError | DamagedLogError)
            if lost or (error.details.get("reason") == "disk" and tries >= _TRIES):
                kind = "missing" if missing else "lost" if lost else "refused"
                if kind != reported:  # what was only missing may be found damaged
                    if self._telling is not None:
                        self._telling.cancel()
                    report = report_loss(
                        spec.group_id, spec.replica_id, spec.settings, said, insist=True, missing=missing
                    )
                    self._telling, reported = self._loop.create_task(report), kind
            if not _may_pass(error):
                return
            await asyncio.sleep(_TRY_AGAIN_S)
            started = self._started = await asyncio.to_thread(self._attempt)
            if isinstance(started, RayQueueError):
                error = started
                continue
            _log.warning("could start after all")
            if self._telling is not None:
                self._telling.cancel()
            self._run_beside(started)
            return

    def _run_beside(self, replica: ReplicaT) -> None:
        """Begin the tasks that run beside the replica."""
        from rayqueue.actors.loss import report_damage
        from rayqueue.actors.metrics import report_metrics
        from rayqueue.actors.title import keep_title

        spec = self._spec
        self._look_for_peers = asyncio.Event()
        named = spec.group_id, spec.replica_id
        self._meeting = self._lasting(partial(self._meet_peers, replica), "meeting peers")
        self._reporting = self._lasting(partial(report_metrics, replica, *named), "reporting metrics")
        self._watching = self._lasting(partial(report_damage, replica, *named, spec.settings), "watching for damage")
        self._titled = self._lasting(partial(keep_title, replica), "keeping the title")

    def _lasting(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        return self._loop.create_task(lasting(work, what))

    def __repr__(self) -> str:
        """Ray asks once, when the actor has started, and shows this in the dashboard and before its log lines for as
        long as it lives. So it says what stays true; the role is in the process's title (``actors.title``).
        """
        who = readable(self._spec.group_id, self._spec.replica_id)
        started = getattr(self, "_started", None)  # Ray also asks when __init__ has failed
        return f"{who}: {started}" if isinstance(started, RayQueueError) else f"{who} on {self._spec.host}"

    def _start(self) -> ReplicaT:
        """Run the replica on its data. For the subclass."""
        raise NotImplementedError

    def _make_data(self) -> None:
        if self._spec.create and not self._spec.path.exists() and self._never_made():
            self._create()

    def _create(self) -> None:
        from rayqueue.raft.replica_set import ReplicaSet
        from rayqueue.replica.start import create_replica

        spec = self._spec
        replicas = None if spec.voters is None else ReplicaSet.of(spec.voters)
        create_replica(spec.path, spec.group_id, spec.replica_id, replicas, spec.settings)

    def _never_made(self) -> bool:
        """Whether this replica, which has no data, certainly never had any."""
        from rayqueue.log.lmdb_file import is_half_made

        return not restarted() or is_half_made(self._spec.path)

    def _start_unlocked(self) -> ReplicaT:
        """While another process has the data open, wait for its end: at first here, then by restarts."""
        deadline_s = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                self._make_data()
                return self._start()
            except StorageError as error:
                if error.details.get("reason") != "locked":
                    raise
                if time.monotonic() > deadline_s:
                    die(error)
            time.sleep(_LOCK_RETRY_S)

    def _die(self, error: BaseException) -> NoReturn:
        """The engine failed. A disk that refuses writes may let the next process start all the same."""
        from rayqueue.log.starts import note_failure

        if isinstance(error, StorageError | OSError):
            note_failure(self._spec.path, str(error))
        die(error)

    @property
    def _replica(self) -> ReplicaT:
        """Raises if the replica could not be started."""
        if isinstance(self._started, RayQueueError):
            raise type(self._started)(str(self._started), **self._started.details)
        return self._started

    # -- the group ------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    async def status(self) -> Status:
        """As it is now."""
        return await self._inspected()

    @ray.method(concurrency_group="control")
    async def endpoint(self) -> Endpoint:
        """The endpoint at which clients reach this replica without Ray, with the token that lets them in."""
        replica, status = self._replica, self._replica.status
        host, port = status.address
        tls = self._spec.settings.transport.tls_cert_path is not None
        return Endpoint(host, port, replica.token, status.replica_id, status.leader, status.term, tls)

    @ray.method(concurrency_group="control")
    async def address(self) -> Address:
        """The address at which this replica listens for its peers."""
        return self._replica.status.address

    @ray.method(concurrency_group="control")
    async def process(self) -> Process:
        context = ray.get_runtime_context()
        return Process(os.getpid(), self._spec.host, context.get_node_id())

    @ray.method(concurrency_group="control")
    async def disk(self) -> tuple[int, int]:
        """Bytes of the file system that its data is on, and those that are free."""
        usage = await asyncio.to_thread(shutil.disk_usage, self._spec.settings.data_dir)
        return usage.total, usage.free

    @ray.method(concurrency_group="control")
    async def confirm_leadership(self) -> None:
        """Returns if a majority confirms, after this call, that the replica leads."""
        await self._asked(self._replica.confirm_leadership)

    @ray.method(concurrency_group="control")
    async def add_learner(self, replica_id: ReplicaId) -> None:
        check_id(replica_id)
        await self._change(lambda replicas: replicas.with_learner(replica_id))

    @ray.method(concurrency_group="control")
    async def promote(self, replica_id: ReplicaId) -> None:
        """Let a learner that has caught up vote."""
        check_id(replica_id)
        await self._change(lambda replicas: replicas.with_voter(replica_id))

    @ray.method(concurrency_group="control")
    async def remove(self, replica_id: ReplicaId) -> None:
        check_id(replica_id)
        await self._change(lambda replicas: replicas.without(replica_id))

    @ray.method(concurrency_group="control")
    async def transfer_leadership(self, target: ReplicaId) -> None:
        check_id(target)
        await self._asked(lambda answer: self._replica.transfer_leadership(target, answer))

    @ray.method(concurrency_group="control")
    async def close(self, hand_over: bool = False) -> bool:
        """Stop in good order. The actor stays, and answers every other call with ``ReplicaClosedError``.

        With ``hand_over`` another replica leads before, if one can: for a stop while the group is to go on. True if
        nobody is left without a leader by it.
        """
        replica = self._replica
        if not hand_over:
            self._end_tasks()
            await asyncio.to_thread(replica.close)
            return True
        handed = await asyncio.to_thread(replica.stop)
        self._end_tasks()
        return handed

    @ray.method(concurrency_group="control")
    async def make_way(self) -> bool:
        """Let another replica lead, if this one does, and go on. Whether it led; the error, if it still does."""
        led = (await self._inspected()).role == "leader"
        if led:
            await self._asked(self._replica.make_way)
        return led

    def __ray_shutdown__(self) -> None:
        """A planned stop of this process: SIGTERM, or Ray's own way to end an actor. Ray waits for it, in the process's
        main thread."""
        started = getattr(self, "_started", None)  # there is none if __init__ has failed
        if started is not None and not isinstance(started, RayQueueError):
            _log.info("the process is to end")
            started.stop()

    def _end_tasks(self) -> None:
        """End the tasks that run beside the replica."""
        for task in (self._meeting, self._reporting, self._titled, self._watching):
            self._loop.call_soon_threadsafe(task.cancel)

    async def _change(self, change: Callable[[ReplicaSet], ReplicaSet]) -> None:
        await self._asked(lambda answer: self._replica.change_replicas(change, answer))
        self._loop.call_soon_threadsafe(self._look_for_peers.set)

    async def _inspected(self) -> Status:
        return await self._asked(self._replica.inspect)  # type: ignore[no-any-return]

    async def _asked(self, ask: Callable[[Answer], None]) -> Any:
        reply = Reply()
        ask(reply)
        return await reply.future

    # -- peers ---------------------------------------------------------------------------------

    async def _meet_peers(self, replica: Replica[Any]) -> None:
        """Ask the other replicas where they listen, while they are not connected. Ends with the replica."""
        meeting = Meeting()
        named: dict[ReplicaId, Address] = {}

        def name(peers: Collection[ReplicaId]) -> None:
            nonlocal named
            wanted = {peer: meeting.addresses[peer] for peer in peers if peer in meeting.addresses}
            if wanted != named:
                replica.set_peers(wanted)
                named = wanted

        async def meet(peer: ReplicaId, peers: Collection[ReplicaId]) -> None:
            """It is dialled as soon as it has answered: the others may take long, or be gone."""
            address = await self._address_of(peer)
            if address is not None and meeting.heard(peer, address):
                name(peers)

        while True:
            peers, connected = replica.status.peers, replica.status.connected
            name(peers)
            due = meeting.due(time.monotonic(), peers, connected)
            await asyncio.gather(*(meet(peer, peers) for peer in due))
            with suppress(asyncio.TimeoutError):
                await in_time(self._look_for_peers.wait(), meeting.pause_s(time.monotonic()))
                self._look_for_peers.clear()

    async def _address_of(self, peer: ReplicaId) -> Address | None:
        name, namespace = actor_name(self._spec.group_id, peer), self._spec.settings.namespace
        try:
            handle = await asyncio.to_thread(ray.get_actor, name, namespace)
            call: Awaitable[Address] = handle.address.remote()
            return await in_time(call, _PEER_ANSWER_S)
        except (ValueError, OSError, RayError, RayQueueError, asyncio.TimeoutError) as error:
            _log.debug("%s has not said where it listens: %s", peer, error)
            return None


def restarted() -> bool:
    """Whether this process continues the work of an earlier one. If Ray does not know, it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of a name that it has deprecated
        return ray.get_runtime_context().was_current_actor_reconstructed is not False


def _may_pass(error: RayQueueError) -> bool:
    if isinstance(error, StoreMissingError):
        return not isinstance(error, StoreAbandonedError)
    return isinstance(error, DiskFullError) or error.details.get("reason") in ("disk", "system")


def die(error: BaseException) -> NoReturn:
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
