"""The plan of a worker's takes: which partitions are asked for how many jobs, and where a question waits for some.

No I/O and no clock of its own: ``plan`` says what to ask now, and is told what
came of it. At most one take per partition is under way.

Three rules keep many partitions cheap and no partition forgotten:

- where jobs are known or believed to be, they are asked for in turn, and the
  wanted number is shared among these partitions, at least ``SHARE`` jobs each
  (a take is an entry of the log, of one job or of a thousand): nobody leases
  what it does not want;
- where there are none, and nowhere else are any, a take is *parked*: the
  partition answers it when a job comes, so an idle worker sends nothing;
- that a partition has none is believed for ``LOOK_AGAIN_S`` only: then it takes
  its turn again, however busy the others are.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from rayqueue.protocol.jobs import MAX_JOBS

LOOK_AGAIN_S = 1.0
SHARE = 100
"""Jobs that one partition is asked for, at least, if so many are wanted."""
MAX_AHEAD = 1000
"""Jobs that are taken before they are asked for, at most."""
AHEAD_S = 0.03
"""As much work, about, is taken ahead."""
_JOB_BYTES = 64
"""Of a job without key and value, as partitions count it."""
QUICK_S = 0.1
"""A worker that comes back within this gets some ahead."""


class Ask(NamedTuple):
    """One take to send."""

    partition: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    parked: bool


class _State(Enum):
    IDLE = "idle"
    ASKED = "asked"
    PARKED = "parked"
    PAUSED = "paused"
    """It could not be asked; ``resumed`` ends it."""


class _Partition:
    __slots__ = ("count", "empty_since_s", "state")

    def __init__(self) -> None:
        self.state = _State.IDLE
        self.count = 0
        """How many the take that is under way may bring."""
        self.empty_since_s: float | None = None
        """Since when it is known to have none; None if it may have some."""


class Takes:
    """Of one worker over all partitions of its queue. ``first`` is where its turn begins: others begin elsewhere."""

    def __init__(self, partitions: int, first: int = 0) -> None:
        self._partitions = [_Partition() for _ in range(partitions)]
        self._turn = first % max(1, partitions)

    def __len__(self) -> int:
        return len(self._partitions)

    def grow(self, partitions: int) -> None:
        """The queue has more partitions now."""
        self._partitions += [_Partition() for _ in range(partitions - len(self._partitions))]

    def plan(self, wanted: int, now_s: float, *, park: bool = True, most: int = MAX_JOBS) -> list[Ask]:
        """The takes to send for ``wanted`` jobs more than are there. They count as sent.

        ``park``: somebody waits for them. Jobs that are only taken ahead are not waited for. ``most``: in one take.
        """
        wanted -= sum(each.count for each in self._partitions if each.state is _State.ASKED)
        if wanted <= 0:
            return []
        order = [(self._turn + step) % len(self._partitions) for step in range(len(self._partitions))]
        idle = [number for number in order if self._partitions[number].state is _State.IDLE]
        asks: list[Ask] = []
        candidates = [number for number in idle if self._may_have(number, now_s)]
        left = wanted
        for position, number in enumerate(candidates):
            count = min(left, most, max(SHARE, -(-left // (len(candidates) - position))))
            asks.append(self._sent(Ask(number, count, False)))
            left -= count
            if not left:
                break
        if asks:
            self._turn = (asks[-1].partition + 1) % len(self._partitions)
        if park and not asks and not any(each.state is _State.ASKED for each in self._partitions):
            asks = [self._sent(Ask(number, min(wanted, most), True)) for number in idle]
        return asks

    def _may_have(self, number: int, now_s: float) -> bool:
        empty_since_s = self._partitions[number].empty_since_s
        if empty_since_s is None:
            return True
        if now_s - empty_since_s < LOOK_AGAIN_S:
            return False
        # Worth a look while others are busy; with nothing else to do a parked take finds out as soon.
        return any(each.empty_since_s is None for each in self._partitions)

    def _sent(self, ask: Ask) -> Ask:
        partition = self._partitions[ask.partition]
        partition.state = _State.PARKED if ask.parked else _State.ASKED
        partition.count = ask.count
        return ask

    def answered(self, number: int, left: int, now_s: float) -> None:
        """A take came back; the partition has so many ready jobs left."""
        partition = self._partitions[number]
        partition.state, partition.count = _State.IDLE, 0
        partition.empty_since_s = None if left else now_s

    def failed(self, number: int) -> None:
        """A take failed: nothing is asked there until ``resumed``."""
        partition = self._partitions[number]
        partition.state, partition.count = _State.PAUSED, 0
        partition.empty_since_s = None

    def resumed(self, number: int) -> None:
        partition = self._partitions[number]
        if partition.state is _State.PAUSED:
            partition.state = _State.IDLE

    @property
    def under_way(self) -> list[int]:
        """Where a take waits, or is being answered, or may have been."""
        states = (_State.ASKED, _State.PARKED, _State.PAUSED)
        return [number for number, each in enumerate(self._partitions) if each.state in states]


class Ahead:
    """How many jobs a worker takes before it asks for them: as many as it does in ``AHEAD_S``, within ``most`` jobs and
    ``most_bytes``. None while it comes back later than ``QUICK_S``."""

    def __init__(self, most_bytes: int = 2**62, most: int = MAX_AHEAD) -> None:
        self.count = 0
        self._most = most
        self._most_bytes = most_bytes
        self._job_bytes = 1
        self._each_s = AHEAD_S
        self._gave: tuple[float, int] | None = None
        """When the worker got its last jobs, and how many."""

    def asked(self, now_s: float) -> None:
        """The application asks for jobs: it is through with those that it got, or soon."""
        if self._gave is None:
            return
        gave_s, given = self._gave
        took_s = now_s - gave_s
        if took_s >= QUICK_S:
            self.count, self._each_s = 0, AHEAD_S
            return
        each_s = took_s / given
        # Slow ones count at once, quick ones bit by bit: what is taken ahead and not done has to be handed back.
        self._each_s = max(1e-6, each_s, self._each_s / 8)
        self.count = min(self._most, int(AHEAD_S / self._each_s), self.at_once(self._most_bytes))

    def gave(self, count: int, now_s: float) -> None:
        """It has got so many."""
        if count:
            self._gave = now_s, count

    def received(self, count: int, size_bytes: int) -> None:
        """So many came, of so many bytes."""
        self._job_bytes = size_bytes // count + _JOB_BYTES

    def at_once(self, size_bytes: int) -> int:
        """How many jobs, of the size of the last ones, fit into these bytes; at least one."""
        return max(1, size_bytes // self._job_bytes)

    def goes_on(self, now_s: float) -> None:
        """The application has waited for something of ours until now."""
        if self._gave is not None:
            self._gave = max(now_s - QUICK_S / 2, self._gave[0]), self._gave[1]

    def wanted(self, now_s: float) -> int:
        """How many to have in store now: none once the worker has not come back for a while."""
        return self.count if self._gave is not None and now_s - self._gave[0] < QUICK_S else 0

    def soon(self, now_s: float, within_s: float) -> int:
        """How many of those in store the worker will come to soon: none if it has not come back ``within_s``."""
        return 2 * self.count if self._gave is not None and now_s - self._gave[0] < within_s else 0

    def unused(self) -> None:
        """Some that were taken ahead had to be handed back."""
        self.count //= 2
        self._each_s *= 2
