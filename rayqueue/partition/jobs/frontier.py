"""The frontier of a lane: from here on, jobs of plain batches have never been given to anybody.

They are runs of offsets, which are joined where batches follow each other: of a
queue of plain jobs it is one run, however long. A bounded number of runs is kept
in memory; the rest is read again from the partition's own rows, when it is their
turn. Runs of before a checkpoint, whose batches a restored replica has not got,
are kept as rows.

Jobs that were given out and handed back, as if they had not been, come first. They
are runs too, in memory and as rows: not more than were leased at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from struct import Struct

from rayqueue.log.store import LogStore
from rayqueue.partition.rows import offset_key, read_batch
from rayqueue.partition.tables import JOB_INDEX, OFFSETS

MAX_RUNS = 4096
NOT_PLAIN = 255
"""The lane, in a row of OFFSETS, of a batch whose jobs have rows. No lane has this number."""

_KEPT = Struct(">cBQ")  # L: of before a checkpoint. G: given back
_END = Struct(">Q")


def lanes_back(store: LogStore) -> list[int]:
    """Lanes with jobs that were handed back."""
    return sorted({key[1] for key, _ in store.scan(JOB_INDEX, b"G", b"H")})


class Frontier:
    def __init__(self, store: LogStore, lane: int) -> None:
        self._store = store
        self._lane = lane
        self._runs: deque[list[int]] = deque()  # start, end
        self._unread: int | None = None  # from here on they are to be read
        self._back: list[list[int]] = []  # start, end; all of them before those above
        self._count_back = 0
        self.fresh = 0
        """Jobs ahead that nobody has ever had."""

    @property
    def count(self) -> int:
        """Jobs ahead."""
        return self.fresh + self._count_back

    def append(self, start: int, count: int) -> None:
        """A plain batch was appended to the lane."""
        self.fresh += count
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
        if self._back:
            return self._back[0][0]
        if not self._runs and self._unread is not None:
            self._read()
        return self._runs[0][0] if self._runs else None

    def take(self, count: int, below: int) -> tuple[int, int]:
        """The next jobs that follow each other: the first, and how many. There must be one below ``below``."""
        run = self._back[0] if self._back else self._runs[0]
        start = run[0]
        taken = min(count, run[1] - start, below - start)
        run[0] += taken
        if self._back:
            self._count_back -= taken
            self._store.delete(JOB_INDEX, self._key_back(start))
            if run[0] == run[1]:
                del self._back[0]
            else:
                self._store.put(JOB_INDEX, self._key_back(run[0]), _END.pack(run[1]))
        else:
            self.fresh -= taken
            if run[0] == run[1]:
                self._runs.popleft()
        return start, taken

    def put_back(self, start: int, count: int) -> None:
        """Some that were taken, and that nobody has had."""
        back, end = self._back, start + count
        self._count_back += count
        at = bisect_left(back, [start])
        if at < len(back) and back[at][0] == end:
            self._store.delete(JOB_INDEX, self._key_back(end))
            end = back.pop(at)[1]
        if at and back[at - 1][1] == start:
            start = back.pop(at - 1)[0]
            at -= 1
        back.insert(at, [start, end])
        self._store.put(JOB_INDEX, self._key_back(start), _END.pack(end))

    def _key_back(self, start: int) -> bytes:
        return _KEPT.pack(b"G", self._lane, start)

    @property
    def start(self) -> int:
        """No job before this is ahead."""
        return self._back[0][0] if self._back else self.fresh_start

    @property
    def fresh_start(self) -> int:
        """None before this that nobody has ever had."""
        if self._runs:
            return self._runs[0][0]
        return 0 if self._unread is None else self._unread

    def has(self, job_id: int) -> bool:
        """Whether this job is ahead. Looks through all runs."""
        return any(start <= job_id < end for start, end in self.runs())

    def runs(self) -> Iterator[tuple[int, int]]:
        """All of them, start and end."""
        yield from self.runs_back()
        yield from self.fresh_runs()

    def runs_back(self) -> list[tuple[int, int]]:
        """Of jobs that were handed back."""
        return [(start, end) for start, end in self._back]

    def fresh_runs(self) -> Iterator[tuple[int, int]]:
        """Of jobs that nobody has ever had."""
        yield from [(start, end) for start, end in self._runs]
        if self._unread is not None:
            yield from self._stored(self._unread)

    # -- the tables -----------------------------------------------------------------

    def load(self, start: int, count: int) -> None:
        """``start``: the first job that was not given to anybody, or one before it."""
        self._runs.clear()
        self._unread, self.fresh = start, count

    def load_back(self) -> None:
        """Those that were handed back."""
        first, stop = self._key_back(0), self._key_back(2**64 - 1)
        rows = self._store.scan(JOB_INDEX, first, stop)
        self._back = [[int.from_bytes(key[2:], "big"), _END.unpack(row)[0]] for key, row in rows]
        self._count_back = sum([end - start for start, end in self._back])

    def keep(self, runs: list[tuple[int, int]], count: int) -> None:
        """Begin with these, of a checkpoint."""
        for start, end in runs:
            self._store.put(JOB_INDEX, _KEPT.pack(b"L", self._lane, start), _END.pack(end))
        self.load(runs[0][0] if runs else 2**63, count)

    def _read(self) -> None:
        unread, self._unread = self._unread or 0, None
        if not self.fresh:
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
