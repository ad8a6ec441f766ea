"""The replica's loop: the order of one turn, the same in a running replica and in the simulator.

    first_half    take events, do what was asked, step the engine; early messages leave, answers are given
    write         make durable what the second half promises
    second_half   promises leave

A replica's thread does the three in a row. The simulator lets virtual time pass
between them, and takes the power away before, inside and after ``write``. What
must be durable before what is sent, which kind of write is made, and what a full
or a damaged disk means for the engine is said here and nowhere else.

Reads no clock, and knows neither threads nor transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from rayqueue.errors import DamagedLogError, DiskFullError, StorageError
from rayqueue.ids import ReplicaId
from rayqueue.log.store import LogStore
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.messages import Message
from rayqueue.raft.transport import Event
from rayqueue.replica.retry import SyncRetry


class Written(Enum):
    ALL = 1
    """Everything is durable; the second half may follow."""
    SMALL = 2
    """The disk is full. New entries were given up, what is left is durable; nothing of this turn may be promised."""
    NOTHING = 3
    """Nothing can be written, now or for good; nothing may be promised."""


class Loop:
    """One turn after the other, around an engine and its store."""

    def __init__(
        self,
        engine: RaftEngine,
        store: LogStore,
        *,
        send: Callable[[ReplicaId, Message], object],
        take_calls: Callable[[], bool],
        stepped: Callable[[list[Done]], None],
        troubled: Callable[[StorageError], None],
    ) -> None:
        """``take_calls`` does what others have asked since the last turn, and may propose; True if there was anything.
        ``stepped`` gets the answers of the step, whose early messages have left. ``troubled`` is told the first time
        that nothing can be written."""
        self._engine = engine
        self._store = store
        self._send = send
        self._take_calls = take_calls
        self._stepped = stepped
        self._troubled = troubled
        self._late: list[tuple[ReplicaId, Message]] = []
        self._retry = SyncRetry()

    @property
    def read_only(self) -> bool:
        """Nothing can be written, not even to the reserve: nothing is promised and nobody is led."""
        return self._retry.failing

    @property
    def retry_at_s(self) -> float:
        """When a disk that takes nothing is tried again; never, unless it is ``read_only``."""
        return self._retry.at_s

    def first_half(self, now: float, events: Iterable[Event]) -> bool:
        """Everything before the disk. True if something was asked."""
        engine = self._engine
        for event in events:
            engine.receive(now, event)
        asked = self._take_calls()
        ready = engine.step(now)
        for peer, message in ready.early:
            self._send(peer, message)
        self._late = ready.late
        self._stepped(ready.done)
        return asked

    @property
    def must_write(self) -> bool:
        """The second half has to wait for ``write``."""
        return self._store.must_sync or self._engine.must_mark or self.read_only

    def may_write(self, now: float) -> bool:
        """False while there is no use in trying, or for good."""
        return not self._engine.halted and (not self.read_only or now >= self._retry.at_s)

    def write(self, now: float, *, tables: bool) -> Written:
        """Make all durable that was done since the last time. ``tables``: snapshots are to see it, too."""
        if not self.may_write(now):
            return Written.NOTHING
        written = Written.ALL
        try:
            try:
                self.put(tables=tables)
                self._engine.synced()
            except DiskFullError:
                written = Written.SMALL
                # It answers whoever waits and gives up the new entries. The rest is small: the reserve is for that.
                self._engine.disk_full()
                self._store.sync()
                self._engine.synced()
        except DiskFullError as error:
            if not self.read_only:
                self._troubled(error)
            self._retry.failed(now)
            return Written.NOTHING
        except DamagedLogError as error:
            self._troubled(error)
            self._engine.halt(str(error))
            return Written.NOTHING
        self._retry.succeeded()
        return written

    def put(self, *, tables: bool) -> None:
        """The write itself: what is small goes into the write-ahead file, unless the tables are wanted."""
        if self._store.must_sync and not self.read_only and not tables:
            self._store.persist()
        else:
            self._store.sync()

    def second_half(self) -> None:
        """After the disk: what this turn promises leaves."""
        late, self._late = self._late, []
        for peer, message in late:
            self._send(peer, message)
