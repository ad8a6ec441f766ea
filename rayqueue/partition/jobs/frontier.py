"""The frontier of a lane: from here on, jobs of plain batches have never been given to anybody.

They are runs of offsets, which are joined where batches follow each other: of a
queue of plain jobs it is one run, however long. A bounded number of runs is kept
in memory; the rest is read again from the partition's own rows, when it is their
turn. Runs of before a checkpoint, whose batches a restored replica has not got,
are kept as rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from struct import Struct

from rayqueue.log.store import LogStore
from rayqueue.partition.rows import offset_key, read_batch
from rayqueue.partition.tables import JOB_INDEX, OFFSETS

MAX_RUNS = 4096
NOT_PLAIN = 255
"""The lane, in a row of OFFSETS, of a batch whose jobs have rows. No lane has this number."""

_KEPT = Struct(">cBQ")
_END = Struct(">Q")


class Frontier:
    def __init__(self, store: LogStore, lane: int) -> None:
        self._store = store
        self._lane = lane
        self._runs: deque[list[int]] = deque()  # start, end
        self._unread: int | None = None  # from here on they are to be read
        self.count = 0
        """Jobs ahead."""

    def append(self, start: int, count: int) -> None:
        """A plain batch was appended to the lane."""
        self.count += count
        if self._unread is None:
            self._add(start, start + count)

    def _add(self, start: int, end: int) -> bool:
        """False if there are too many: it is to be read again."""
        runs = self._runs
        if runs and runs[-1][1] == start:
            runs[-1][1] = end
        elif len(runs) < MAX_RUNS:
            runs.append([start, end])
        else:
            self._unread = start
        return self._unread is None

    def first(self) -> int | None:
        """The next job."""
        if not self._runs and self._unread is not None:
            self._read()
        return self._runs[0][0] if self._runs else None

    def take(self, count: int, below: int) -> tuple[int, int]:
        """The next jobs that follow each other: the first, and how many. There must be one below ``below``."""
        run = self._runs[0]
        start = run[0]
        taken = min(count, run[1] - start, below - start)
        run[0] += taken
        if run[0] == run[1]:
            self._runs.popleft()
        self.count -= taken
        return start, taken

    def put_back(self, start: int, count: int) -> None:
        """What was taken last."""
        self.count += count
        if self._runs and self._runs[0][0] == start + count:
            self._runs[0][0] = start
        else:
            self._runs.appendleft([start, start + count])

    @property
    def start(self) -> int:
        """No job before this is ahead."""
        if self._runs:
            return self._runs[0][0]
        return 0 if self._unread is None else self._unread

    def has(self, job_id: int) -> bool:
        """Whether this job is ahead. Looks through all runs."""
        return any(start <= job_id < end for start, end in self.runs())

    def runs(self) -> Iterator[tuple[int, int]]:
        """All of them, start and end."""
        yield from [(start, end) for start, end in self._runs]
        if self._unread is not None:
            yield from self._stored(self._unread)

    # -- the tables -----------------------------------------------------------------

    def load(self, start: int, count: int) -> None:
        """``start``: the first job that was not given to anybody, or one before it."""
        self._runs.clear()
        self._unread, self.count = start, count

    def keep(self, runs: list[tuple[int, int]], count: int) -> None:
        """Begin with these, of a checkpoint."""
        for start, end in runs:
            self._store.put(JOB_INDEX, _KEPT.pack(b"L", self._lane, start), _END.pack(end))
        self.load(runs[0][0] if runs else 2**63, count)

    def _read(self) -> None:
        unread, self._unread = self._unread or 0, None
        if not self.count:
            return  # those that come will be appended
        for start, end in self._stored(unread):
            if not self._add(start, end):
                return

    def _stored(self, first: int) -> Iterator[tuple[int, int]]:
        end = first
        for key, row in self._store.scan(
            JOB_INDEX, _KEPT.pack(b"L", self._lane, 0), _KEPT.pack(b"L", self._lane, 2**64 - 1)
        ):
            start, until = int.from_bytes(key[2:], "big"), _END.unpack(row)[0]
            if until > first:
                yield max(start, first), until
                end = max(end, until)
        before = next(self._store.scan(OFFSETS, stop=offset_key(end + 1), reverse=True), None)
        begin = offset_key(end) if before is None else before[0]
        for key, row in self._store.scan(OFFSETS, begin):
            batch = read_batch(key, row)
            if batch.lane == self._lane and batch.end_offset > end:
                yield max(batch.base_offset, end), batch.end_offset
