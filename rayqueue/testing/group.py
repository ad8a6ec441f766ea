"""A partition's replicas as processes of this machine, and everything that can happen to them.

``ProcessGroup`` starts one process per replica (real LMDB, real TCP on
loopback), tells each where the others listen, as the coordinator would, and
lets a test write, read, kill, pause, restart and change members. A replica
that restarts listens elsewhere; the others are told.

Writing through the group is what an idempotent producer does: find the
leader, keep a few batches in flight, send what failed again with the same
producer id, epoch and sequence, for as long as the error says that this may
help.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from rayqueue.config import Settings
from rayqueue.errors import (
    NotLeaderError,
    OutcomeUnknownError,
    RayQueueError,
    ReplicaClosedError,
)
from rayqueue.ids import NodeId
from rayqueue.partition import Appended, Fetched, PartitionSettings
from rayqueue.records import BatchHeader
from rayqueue.replica import Status
from rayqueue.testing.channel import Frame
from rayqueue.testing.load import LoadReport, Usage
from rayqueue.testing.process import CALL_TIMEOUT_S, START_TIMEOUT_S, Process, result_of, settings_values

_T = TypeVar("_T")

_LOOK_AGAIN_S = 0.005
_ATTEMPT_TIMEOUT_S = 2.0


def wait_for(condition: Callable[[], _T | None], what: str, timeout_s: float = 10.0) -> _T:
    """What ``condition`` returns, once that is neither None nor False. ``TimeoutError`` names ``what``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found is not None and found is not False:
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
        self._partition = asdict(partition or PartitionSettings())
        self._group_id = group_id
        self._setup = setup
        self._made = replicas
        self._processes: dict[NodeId, Process] = {}
        self._addresses: dict[NodeId, tuple[str, int]] = {}
        self._ended: list[Process] = []
        nodes = [NodeId(f"n{number}") for number in range(1, replicas + 1)]
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._start(nodes, create=True, voters=nodes)
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
        for process in self._processes.values():
            process.kill()

    # -- who is there ------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeId]:
        """Every replica, running or not."""
        return sorted(self._processes)

    @property
    def running(self) -> list[NodeId]:
        """Those whose process runs and is not paused."""
        return [node for node in self.nodes if self._processes[node].alive and not self._processes[node].paused]

    @property
    def crashes(self) -> list[str]:
        """Processes that ended though nobody killed them, each with the end of its log. A sound group has none."""
        return [crash for process in (*self._ended, *self._processes.values()) if (crash := process.crash)]

    def pid(self, node: NodeId) -> int:
        return self._processes[node].pid

    def status(self, node: NodeId) -> Status:
        return _status(self._processes[node].ask("inspect"))

    def statuses(self) -> dict[NodeId, Status]:
        """Of all that run and answer."""
        asked: dict[NodeId, Future[Frame]] = {}
        found: dict[NodeId, Status] = {}
        for node in self.running:
            try:
                asked[node] = self._processes[node].call("inspect")
            except ReplicaClosedError:
                continue
        for node, future in asked.items():
            try:
                found[node] = _status(result_of(future, _ATTEMPT_TIMEOUT_S).head["result"])
            except (OutcomeUnknownError, ReplicaClosedError):
                continue
        return found

    def leader(self, timeout_s: float = 10.0) -> NodeId:
        """Who leads the newest term, once somebody does."""
        return wait_for(self._find_leader, "a leader", timeout_s)

    def _find_leader(self) -> NodeId | None:
        leading = [status for status in self.statuses().values() if status.role == "leader"]
        return max(leading, key=lambda status: status.term).node_id if leading else None

    def token(self, node: NodeId) -> bytes:
        """What clients of this replica's socket prove that they hold."""
        return bytes.fromhex(self._processes[node].ask("token"))

    def usage(self, node: NodeId) -> Usage:
        return Usage(**self._processes[node].ask("usage"))

    def setup_report(self, node: NodeId) -> Any:
        """What the function that ``setup`` returned says now."""
        return self._processes[node].ask("setup_report")

    # -- writing -----------------------------------------------------------------------

    def append(self, batch: bytes, *, via: NodeId | None = None, timeout_s: float = CALL_TIMEOUT_S) -> Appended:
        """Append by one replica, one attempt; or without ``via`` by whoever leads, as a producer would."""
        if via is None:
            return next(self.append_each([batch], timeout_s=timeout_s))
        return _appended(result_of(self._processes[via].call("append", [batch]), timeout_s))

    def command(self, payload: bytes, *, via: NodeId, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Let the partition apply a command of ``rayqueue.partition``; one attempt. Raises what it was refused with."""
        result_of(self._processes[via].call("command", [payload]), timeout_s)

    def append_each(
        self, batches: Iterable[bytes], *, in_flight: int = 1, timeout_s: float = 30.0
    ) -> Iterator[Appended]:
        """Append by whoever leads, at most ``in_flight`` unanswered at a time; answers come in order.

        What failed and may be repeated is sent again, with all that was sent
        after it. A batch without a producer id is not repeated if its outcome
        is unknown. ``timeout_s`` bounds the time without any progress.
        """
        source = iter(batches)
        window: deque[bytes] = deque()  # not acknowledged
        sent: deque[Future[Frame]] = deque()  # attempts at the first of them
        process: Process | None = None
        deadline_s = time.monotonic() + timeout_s
        while True:
            while len(window) < in_flight and (batch := next(source, None)) is not None:
                window.append(batch)
            if not window:
                return
            try:
                if process is None or not process.alive:
                    sent.clear()
                    process = self._processes[self.leader(max(0.0, deadline_s - time.monotonic()))]
                for batch in list(window)[len(sent) :]:
                    sent.append(process.call("append", [batch]))
                answer = _appended(result_of(sent[0], _ATTEMPT_TIMEOUT_S))
            except RayQueueError as error:
                if time.monotonic() > deadline_s or not _may_repeat(error, window[0]):
                    raise
                sent.clear()
                if error.refresh_metadata:
                    process = None
                time.sleep(_LOOK_AGAIN_S)
                continue
            window.popleft()
            sent.popleft()
            deadline_s = time.monotonic() + timeout_s
            yield answer

    def load(
        self, batch: bytes, count: int, in_flight: int, *, via: NodeId | None = None, timeout_s: float = 600.0
    ) -> LoadReport:
        """Let the leader's process append the batch ``count`` times by itself, and measure.

        If the batch has a producer id, it must be a new one: sequences count from 0.
        """
        process = self._processes[via or self.leader()]
        call = process.call("load", [batch], count=count, in_flight=in_flight, timeout_s=timeout_s)
        frame = result_of(call, timeout_s + CALL_TIMEOUT_S)
        latencies_ms = array("d")
        latencies_ms.frombytes(frame.blobs[0])
        return LoadReport(**frame.head["result"], latencies_ms=latencies_ms)

    # -- reading -----------------------------------------------------------------------

    def fetch(
        self,
        node: NodeId,
        offset: int,
        max_bytes: int = 1 << 20,
        *,
        max_wait_ms: int = 0,
        lane: int | None = None,
        from_disk: bool = False,
    ) -> list[Fetched]:
        """Batches from ``offset`` on, as this replica has them; waits for the first one if it is told to."""
        call = self._processes[node].call(
            "fetch", offset=offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms, lane=lane, from_disk=from_disk
        )
        frame = result_of(call, max_wait_ms / 1000 + CALL_TIMEOUT_S)
        where = frame.head["result"]
        return [Fetched(base, count, blob) for (base, count), blob in zip(where, frame.blobs, strict=True)]

    def read_log(
        self, node: NodeId, offset: int = 0, *, from_disk: bool = False, timeout_s: float = 30.0
    ) -> list[Fetched]:
        """Everything from ``offset`` to this replica's high watermark."""
        end = self.status(node).high_watermark
        deadline_s = time.monotonic() + timeout_s
        found: list[Fetched] = []
        while offset < end:
            batches = self.fetch(node, offset, 8 << 20, from_disk=from_disk)
            found += batches
            if batches:
                offset = batches[-1].base_offset + batches[-1].count
            elif time.monotonic() > deadline_s:
                raise TimeoutError(f"{node} shows nothing at {offset} for {timeout_s} s, though it ends at {end}")
        return found

    def wait_for_offset(self, offset: int, *nodes: NodeId, timeout_s: float = 15.0) -> None:
        """Until these replicas, or all that run, have applied everything before ``offset``."""

        def reached() -> bool:
            statuses = self.statuses()
            return all(node in statuses and statuses[node].high_watermark >= offset for node in nodes or self.running)

        wait_for(reached, f"offset {offset} at {', '.join(nodes) or 'all'}", timeout_s)

    # -- faults ------------------------------------------------------------------------

    def kill(self, *nodes: NodeId) -> None:
        """kill -9 these processes, or all of them."""
        for node in nodes or self.nodes:
            self._processes[node].kill()

    def pause(self, node: NodeId) -> None:
        """SIGSTOP: it does nothing and closes nothing."""
        self._processes[node].pause()

    def resume(self, node: NodeId) -> None:
        self._processes[node].resume()

    def restart(self, *nodes: NodeId) -> None:
        """Start these replicas, or all of them, from what is on their disks. Those that still run are killed first."""
        nodes = nodes or tuple(self.nodes)
        self.kill(*nodes)
        self._start(list(nodes), create=False, voters=None)

    def close_replica(self, node: NodeId) -> None:
        """Let it stop in good order. The process stays, and answers every call with ``ReplicaClosedError``."""
        self._processes[node].ask("close")

    # -- members -----------------------------------------------------------------------

    def add_learner(self, node: NodeId | None = None) -> NodeId:
        """Start a new replica without data and let the group send it its log."""
        if node is None:
            self._made += 1
            node = NodeId(f"n{self._made}")
        self._start([node], create=True, voters=None)
        self._change("add_learner", node, lambda status: node in status.learners)
        return node

    def promote(self, node: NodeId) -> None:
        """Make a learner a voter, once it has caught up."""
        self._change("promote", node, lambda status: node in status.voters)

    def remove(self, node: NodeId) -> None:
        """Take a replica out of the group and end its process. Not the leader: transfer first."""
        self._change("remove", node, lambda status: node not in status.voters + status.learners)
        process = self._processes.pop(node)
        process.kill()
        self._ended.append(process)
        del self._addresses[node]
        self._tell_addresses()

    def transfer(self, target: NodeId) -> None:
        """Hand the leadership to ``target``."""
        if self.leader() != target:
            self._on_leader("transfer", target=target)
        wait_for(lambda: self._find_leader() == target, f"{target} to lead")

    def confirm_leadership(self, node: NodeId) -> None:
        """``NotLeaderError`` or another error unless a majority confirms that this replica leads."""
        self._processes[node].ask("confirm")

    def _change(self, change: str, node: NodeId, done: Callable[[Status], bool]) -> None:
        def attempt() -> bool:
            leader = self.leader()
            try:
                if done(self.status(leader)):
                    # In the log is not yet committed: the leader proves that nobody can undo it.
                    self.confirm_leadership(leader)
                    return True
                self._processes[leader].ask("change_members", change=change, node=node)
            except RayQueueError as error:
                if not error.retriable:
                    raise
            return False

        wait_for(attempt, f"{change} of {node}", 30.0)

    def _on_leader(self, call: str, **arguments: Any) -> None:
        def attempt() -> bool:
            try:
                self._processes[self.leader()].ask(call, **arguments)
            except (NotLeaderError, ReplicaClosedError):
                return False
            return True

        wait_for(attempt, f"an answer to {call}")

    # -- starting ----------------------------------------------------------------------

    def _start(self, nodes: list[NodeId], *, create: bool, voters: list[NodeId] | None) -> None:
        started: dict[NodeId, Future[Frame]] = {}
        for node in nodes:
            process = Process(node, self._data_dir / f"{node}.log")
            started[node] = process.call(
                "start",
                path=str(self._data_dir / node),
                group_id=self._group_id,
                node_id=node,
                settings=self._settings,
                partition=self._partition,
                create=create,
                voters=voters,
                setup=self._setup,
            )
            if node in self._processes:
                self._ended.append(self._processes[node])
            self._processes[node] = process  # only now: other threads may call it from here on
        for node, answer in started.items():
            self._addresses[node] = _status(result_of(answer, START_TIMEOUT_S).head["result"]).address
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        for process in self._processes.values():
            if process.alive:
                # Nobody waits for the answer: one that is paused hears it when it goes on.
                process.call("set_peers", peers=self._addresses)


def _may_repeat(error: RayQueueError, batch: bytes) -> bool:
    if isinstance(error, OutcomeUnknownError) and not BatchHeader.parse(batch).producer_id:
        return False
    return error.retriable


def _appended(frame: Frame) -> Appended:
    return Appended(*frame.head["result"])


def _status(fields: dict[str, Any]) -> Status:
    tuples = {name: tuple(fields[name]) for name in ("voters", "learners", "address")}
    return Status(**{**fields, **tuples})
