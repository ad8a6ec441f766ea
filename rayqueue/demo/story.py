"""What happens in the demo: write, read, kill the leader, look whether anything is missing.

``Story`` is told step by step (``tick``) so that whoever shows it decides how
often. It kills with SIGKILL, the process of whichever replica leads, once the
group is whole again after the kill before; Ray restarts the process, and the
replica continues from its disk. At the end it reads the whole log once more,
from each replica, and compares.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rayqueue.client.group import ReplicaGroup
from rayqueue.demo.traffic import Check, Reader, Writer
from rayqueue.errors import RayQueueError
from rayqueue.ids import NodeId
from rayqueue.replica import Status

_LOOK_EVERY_S = 0.2
_PATIENCE_S = 60.0
_FETCH_BYTES = 4 << 20
_SPRINT_BATCH_RECORDS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    records: int = 100_000
    kills: int = 3
    seconds: float = 15.0
    """How long the writing takes, if nothing holds it up."""
    batch_records: int = 100


@dataclass(slots=True)
class Kill:
    """One kill -9 of the replica that led."""

    node: NodeId
    pid: int
    at_s: float
    term: int
    successor: NodeId | None = None
    pause_s: float | None = None
    """The longest silence between two acknowledgements around it: what the producer noticed."""
    rejoined_s: float | None = None
    """Until the killed replica ran again and had all records."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One replica's log, read from its beginning."""

    node: NodeId
    records: int
    missing: int
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Sprint:
    """Records written as fast as they go, while nothing is killed."""

    records: int
    seconds: float

    @property
    def records_per_s(self) -> float:
        return self.records / self.seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    acknowledged: int
    read: int
    lost: int
    duplicated: int
    out_of_order: int
    kills: tuple[Kill, ...]
    copies: tuple[Copy, ...]
    sprint: Sprint | None

    @property
    def sound(self) -> bool:
        wanted = self.plan.records
        return (
            (self.acknowledged, self.read, self.lost, self.duplicated, self.out_of_order) == (wanted, wanted, 0, 0, 0)
            and len(self.kills) == self.plan.kills
            and all(kill.rejoined_s is not None for kill in self.kills)
            and bool(self.copies)
            and all(copy.records == wanted and not copy.missing for copy in self.copies)
            and len({copy.digest for copy in self.copies}) == 1
            and self.sprint is not None
        )

    def facts(self) -> dict[str, Any]:
        """For programs."""
        told = {"sound": self.sound, **asdict(self)}
        for kill in told["kills"]:
            del kill["at_s"]
        return told


@dataclass(slots=True)
class Story:
    group: ReplicaGroup
    plan: Plan
    statuses: dict[NodeId, Status] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    sprint: Sprint | None = None
    started_s: float = field(default_factory=time.monotonic)
    writer: Writer = field(init=False)
    reader: Reader = field(init=False)
    _offset: int = field(init=False)
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        self._offset = self.group.end_offset()
        plan = self.plan
        self.writer = Writer(self.group, plan.records, plan.batch_records, plan.seconds)
        self.reader = Reader(self.group, self._offset, plan.records)

    # -- the telling -------------------------------------------------------------------------

    def begin(self) -> None:
        self.started_s = time.monotonic()
        self._look()
        self.writer.ceiling = self._ceiling()
        self.reader.start()
        self.writer.start()

    def tick(self) -> bool:
        """Go on with what is due. False once all is written, read and healed."""
        for thread in (self.writer, self.reader):
            if thread.error is not None:
                raise thread.error
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._look()
        if self._healing is not None:
            self._watch(self._healing, now_s)
        elif self._kill_is_due():
            self._kill_leader()
        self.writer.ceiling = self._ceiling()
        return self.writer.running or self.reader.running or self._healing is not None

    def read_copies(self) -> None:
        """Every replica's log from the first record on, from its own disk or memory."""
        self.copies = [self._copy(node) for node in self.group.nodes]

    def run_sprint(self) -> None:
        """Write as many records again, large batches, no pauses; the end of the log says whether all arrived."""
        plan, before = self.plan, self.group.end_offset()
        writer = Writer(self.group, plan.records, _SPRINT_BATCH_RECORDS, seconds=0.0)
        started_s = time.monotonic()
        writer.write()
        sprint = Sprint(writer.acknowledged, time.monotonic() - started_s)
        self.sprint = sprint if self.group.end_offset() == before + plan.records == before + sprint.records else None

    def stop(self) -> None:
        self.writer.stop()
        self.reader.stop()

    def outcome(self) -> Outcome:
        check = self.reader.check
        return Outcome(
            plan=self.plan,
            acknowledged=self.writer.acknowledged,
            read=check.read,
            lost=check.missing,
            duplicated=check.duplicated,
            out_of_order=check.out_of_order + check.gaps,
            kills=tuple(self.kills),
            copies=tuple(self.copies),
            sprint=self.sprint,
        )

    # -- its parts -----------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def leader(self) -> Status | None:
        leading = [status for status in self.statuses.values() if status.role == "leader"]
        return max(leading, key=lambda status: status.term, default=None)

    @property
    def _healing(self) -> Kill | None:
        return self.kills[-1] if self.kills and self.kills[-1].rejoined_s is None else None

    def _look(self) -> None:
        self.statuses = self.group.statuses()
        self._looked_s = time.monotonic()

    def _kill_is_due(self) -> bool:
        """At even distances, and never while a replica is missing: two of three must be there."""
        if len(self.kills) == self.plan.kills or len(self.statuses) < len(self.group.nodes):
            return False
        return self.writer.acknowledged >= self._next_mark()

    def _next_mark(self) -> int:
        return self.plan.records * (len(self.kills) + 1) // (self.plan.kills + 1)

    def _ceiling(self) -> int:
        """The writer goes on past a mark, but not to the next one: a kill should hit it while it writes."""
        half_way = self.plan.records // (self.plan.kills + 1) // 2
        return self._next_mark() + half_way if len(self.kills) < self.plan.kills else self.plan.records

    def _kill_leader(self) -> None:
        try:
            node = self.group.leader()
            pid = self.group.process(node).pid
        except RayQueueError:
            return  # nobody leads right now; the next tick tries again
        term = self.statuses[node].term if node in self.statuses else 0
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(node, pid, time.monotonic(), term))
        self.statuses.pop(node, None)

    def _watch(self, kill: Kill, now_s: float) -> None:
        if now_s - kill.at_s > _PATIENCE_S:
            raise TimeoutError(f"{kill.node} has not come back within {_PATIENCE_S:.0f} s after it was killed")
        leader = self.leader
        if kill.successor is None and leader is not None and leader.node_id != kill.node and leader.term > kill.term:
            kill.successor = leader.node_id
        back = self.statuses.get(kill.node)
        if kill.successor is None or back is None or leader is None or back.high_watermark < leader.high_watermark:
            return
        pause_s = self._pause_s(kill)
        if pause_s is not None:
            kill.pause_s = pause_s
            kill.rejoined_s = now_s - kill.at_s

    def _pause_s(self, kill: Kill) -> float | None:
        """None before the first acknowledgement that came after the kill."""
        times_s = list(self.writer.ack_times_s)
        return max((later - earlier for earlier, later in pairwise(times_s) if later > kill.at_s), default=None)

    def _copy(self, node: NodeId) -> Copy:
        started_s = time.monotonic()
        digest = hashlib.sha256()
        check = Check(self.plan.records)
        offset, end = self._offset, self._offset + self.plan.records
        while offset < end:
            for batch in self.group.fetch_from(node, offset, _FETCH_BYTES).batches:
                check.take(batch)
                digest.update(batch.base_offset.to_bytes(8, "little"))
                digest.update(batch.payload)
                offset = batch.base_offset + batch.count
            if time.monotonic() - started_s > _PATIENCE_S:
                break
        return Copy(node, check.read, check.missing, digest.hexdigest()[:12], time.monotonic() - started_s)
