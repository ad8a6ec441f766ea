"""A partition's replicas as processes of this machine, and everything that can happen to them.

``ProcessGroup`` starts one process per replica (real LMDB, real TCP on
loopback), tells each where the others listen, as the coordinator would, and
lets a test kill, pause, restart and change members. A replica that restarts
listens elsewhere; the others are told. Records are written and read by
``client``, over the connections that applications use.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from typing_extensions import Self

from rayqueue.config import Settings
from rayqueue.errors import NotLeaderError, OutcomeUnknownError, RayQueueError, ReplicaClosedError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.directory import Directory
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings
from rayqueue.replica.status import Status
from rayqueue.testing.partition_client import PartitionClient
from rayqueue.testing.process import START_TIMEOUT_S, Process, result_of, settings_values
from rayqueue.testing.usage import Usage

_T = TypeVar("_T")

_LOOK_AGAIN_S = 0.005
_ANSWER_S = 2.0


def wait_for(condition: Callable[[], _T | None], what: str, timeout_s: float = 10.0) -> _T:
    """The result of ``condition``, once that is something. ``TimeoutError`` names ``what``.

    None, False and whatever is empty (a list of records that have not come yet) are nothing; a number is something, 0
    too.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found or (isinstance(found, (int, float)) and found is not False):
            return found
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(_LOOK_AGAIN_S)


class ProcessGroup:
    """The replicas of one partition. Use it in a ``with`` block: at its end every process is killed."""

    def __init__(
        self,
        data_dir: Path,
        replicas: int = 3,
        *,
        settings: Settings | None = None,
        partition: PartitionSettings | None = None,
        group_id: str = "test-0",
        setup: str | None = None,
    ) -> None:
        """Make ``replicas`` new replicas below ``data_dir`` and start them. ``settings`` counts for all of them.

        ``setup`` (``"module:function"``) is called in each process before its
        replica starts: a place to put faults or stopwatches in. It may return
        a function, which ``setup_report`` calls.
        """
        settings = settings or Settings()
        given = settings.transport.secret
        secret = secrets.token_urlsafe() if given is None else given.get_secret_value()
        self._data_dir = data_dir
        self._settings = settings_values(settings, secret)
        self._partition = msgspec.structs.asdict(partition or PartitionSettings())
        self._group_id = group_id
        self._setup = setup
        self._made = replicas
        self._processes: dict[ReplicaId, Process] = {}
        self._addresses: dict[ReplicaId, tuple[str, int]] = {}
        self._ended: list[Process] = []
        replica_ids = [ReplicaId(f"n{number}") for number in range(1, replicas + 1)]
        self.client = PartitionClient(group_id, replica_ids, _Directory(self._processes), settings)
        """Writes to the partition, and reads from it."""
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._start(replica_ids, create=True, voters=replica_ids)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process."""
        self.client.close()
        for process in self._processes.values():
            process.kill()

    # -- who is there ------------------------------------------------------------------

    @property
    def replica_ids(self) -> list[ReplicaId]:
        """Every replica, running or not."""
        return sorted(self._processes)

    @property
    def running(self) -> list[ReplicaId]:
        """Those whose process runs and is not paused."""
        return [
            replica_id
            for replica_id in self.replica_ids
            if self._processes[replica_id].alive and not self._processes[replica_id].paused
        ]

    @property
    def crashes(self) -> list[str]:
        """Processes that ended though nobody killed them, each with the end of its log. A sound group has none."""
        return [crash for process in (*self._ended, *self._processes.values()) if (crash := process.crash)]

    def pid(self, replica_id: ReplicaId) -> int:
        return self._processes[replica_id].pid

    def status(self, replica_id: ReplicaId) -> Status:
        return _status(self._processes[replica_id].ask("inspect"))

    def statuses(self) -> dict[ReplicaId, Status]:
        """Of all that run and answer."""
        asked: dict[ReplicaId, Future[Any]] = {}
        found: dict[ReplicaId, Status] = {}
        for replica_id in self.running:
            try:
                asked[replica_id] = self._processes[replica_id].call("inspect")
            except ReplicaClosedError:
                continue
        for replica_id, future in asked.items():
            try:
                found[replica_id] = _status(result_of(future, _ANSWER_S))
            except (OutcomeUnknownError, ReplicaClosedError):
                continue
        return found

    def leader(self, timeout_s: float = 10.0) -> ReplicaId:
        """The leader of the newest term, once there is one."""
        return wait_for(self._find_leader, "a leader", timeout_s)

    def _find_leader(self) -> ReplicaId | None:
        leading = [status for status in self.statuses().values() if status.role == "leader"]
        return max(leading, key=lambda status: status.term).replica_id if leading else None

    def endpoint(self, replica_id: ReplicaId) -> Endpoint:
        """The endpoint at which clients reach this replica, with the token that lets them in."""
        return msgspec.convert(self._processes[replica_id].ask("endpoint"), Endpoint)

    def usage(self, replica_id: ReplicaId) -> Usage:
        return msgspec.convert(self._processes[replica_id].ask("usage"), Usage)

    def setup_report(self, replica_id: ReplicaId) -> Any:
        """The report of the function that ``setup`` returned, as of now."""
        return self._processes[replica_id].ask("setup_report")

    def wait_for_offset(self, offset: int, *replica_ids: ReplicaId, timeout_s: float = 15.0) -> None:
        """Until these replicas, or all that run, have applied everything before ``offset``."""

        def reached() -> bool:
            statuses = self.statuses()
            return all(
                replica_id in statuses and statuses[replica_id].high_watermark >= offset
                for replica_id in replica_ids or self.running
            )

        wait_for(reached, f"offset {offset} at {', '.join(replica_ids) or 'all'}", timeout_s)

    # -- faults ------------------------------------------------------------------------

    def kill(self, *replica_ids: ReplicaId) -> None:
        """kill -9 these processes, or all of them."""
        for replica_id in replica_ids or self.replica_ids:
            self._processes[replica_id].kill()

    def pause(self, replica_id: ReplicaId) -> None:
        """SIGSTOP: it does nothing and closes nothing."""
        self._processes[replica_id].pause()

    def resume(self, replica_id: ReplicaId) -> None:
        self._processes[replica_id].resume()

    def restart(self, *replica_ids: ReplicaId) -> None:
        """Start these replicas, or all of them, from what is on their disks. Those that still run are killed first."""
        replica_ids = replica_ids or tuple(self.replica_ids)
        self.kill(*replica_ids)
        self._start(list(replica_ids), create=False, voters=None)

    def close_replica(self, replica_id: ReplicaId) -> None:
        """Let it stop in good order. The process stays, and answers every call with ``ReplicaClosedError``."""
        self._processes[replica_id].ask("close")

    # -- members -----------------------------------------------------------------------

    def add_learner(self, replica_id: ReplicaId | None = None) -> ReplicaId:
        """Start a new replica without data and let the group send it its log."""
        if replica_id is None:
            self._made += 1
            replica_id = ReplicaId(f"n{self._made}")
        self._start([replica_id], create=True, voters=None)
        self._change("add_learner", replica_id, lambda status: replica_id in status.learners)
        self.client.set_replicas(self.replica_ids)
        return replica_id

    def promote(self, replica_id: ReplicaId) -> None:
        """Make a learner a voter, once it has caught up."""
        self._change("promote", replica_id, lambda status: replica_id in status.voters)

    def remove(self, replica_id: ReplicaId) -> None:
        """Take a replica out of the group and end its process. Not the leader: transfer first."""
        self._change("remove", replica_id, lambda status: replica_id not in status.voters + status.learners)
        process = self._processes.pop(replica_id)
        process.kill()
        self._ended.append(process)
        del self._addresses[replica_id]
        self._tell_addresses()
        self.client.set_replicas(self.replica_ids)

    def transfer(self, target: ReplicaId) -> None:
        """Hand the leadership to ``target``."""
        if self.leader() != target:
            self._on_leader("transfer", target=target)
        wait_for(lambda: self._find_leader() == target, f"{target} to lead")

    def confirm_leadership(self, replica_id: ReplicaId) -> None:
        """``NotLeaderError`` or another error unless a majority confirms that this replica leads."""
        self._processes[replica_id].ask("confirm")

    def _change(self, change: str, replica_id: ReplicaId, done: Callable[[Status], bool]) -> None:
        def attempt() -> bool:
            leader = self.leader()
            try:
                if done(self.status(leader)):
                    # In the log is not yet committed: the leader proves that nobody can undo it.
                    self.confirm_leadership(leader)
                    return True
                self._processes[leader].ask("change_replicas", change=change, replica_id=replica_id)
            except RayQueueError as error:
                if not error.retriable:
                    raise
            return False

        wait_for(attempt, f"{change} of {replica_id}", 30.0)

    def _on_leader(self, call: str, **arguments: Any) -> None:
        def attempt() -> bool:
            try:
                self._processes[self.leader()].ask(call, **arguments)
            except (NotLeaderError, ReplicaClosedError):
                return False
            return True

        wait_for(attempt, f"an answer to {call}")

    # -- starting ----------------------------------------------------------------------

    def _start(self, replica_ids: list[ReplicaId], *, create: bool, voters: list[ReplicaId] | None) -> None:
        started: dict[ReplicaId, Future[Any]] = {}
        for replica_id in replica_ids:
            process = Process(replica_id, self._data_dir / f"{replica_id}.log")
            started[replica_id] = process.call(
                "start",
                path=str(self._data_dir / replica_id),
                group_id=self._group_id,
                replica_id=replica_id,
                settings=self._settings,
                partition=self._partition,
                create=create,
                voters=voters,
                setup=self._setup,
            )
            if replica_id in self._processes:
                self._ended.append(self._processes[replica_id])
            self._processes[replica_id] = process  # only now: other threads may call it from here on
        for replica_id, answer in started.items():
            self._addresses[replica_id] = _status(result_of(answer, START_TIMEOUT_S)).address
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        for process in self._processes.values():
            if process.alive:
                # Nobody waits for the answer: one that is paused hears it when it goes on.
                process.call("set_peers", peers=self._addresses)


class _Directory(Directory):
    """A ``rayqueue.net.directory.Directory``: each process is asked where its replica serves."""

    def __init__(self, processes: dict[ReplicaId, Process]) -> None:
        self._processes = processes

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        try:
            answer = await asyncio.wait_for(
                asyncio.wrap_future(self._processes[replica_id].call("endpoint")), _ANSWER_S
            )
        except (KeyError, ReplicaClosedError, asyncio.TimeoutError) as error:
            raise OutcomeUnknownError(
                f"{replica_id} does not say where it serves: {error!r}", replica_id=replica_id
            ) from None
        return msgspec.convert(answer, Endpoint)

    async def coordinators(self) -> tuple[str, ...]:
        return ()


def _status(fields: Any) -> Status:
    return msgspec.convert(fields, Status)
