"""A follower's progress as its leader knows it, and when more may be sent.

Three states, as etcd's tracker has them:

    PROBE      the follower's log is unknown. One small question at a time
               ("do you have prev?") until one is answered with yes.
    PIPELINE   the logs match. Entries are sent ahead of the answers, at most
               ``window_bytes`` of them.
    SNAPSHOT   the follower needs entries that are trimmed. Wait until it has
               the checkpoint.

Answers may be late, doubled or from before a reset. Each is accepted only if
it answers the question that is open now, so two refusals of two messages in
flight reset the follower once, not for ever.

A follower that denies what it has confirmed to this very leader has lost it: its
disk was replaced, by an older copy for example. The denial may be older than the
confirmation, so the same is asked again, in a round (``doubted_in``) that no
older question had. Denied again, all that the follower confirmed is void.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from rayqueue.ids import Index


class Pace(Enum):
    PROBE = "probe"
    PIPELINE = "pipeline"
    SNAPSHOT = "snapshot"


class Progress:
    """One follower, as seen by the leader of one term."""

    __slots__ = (
        "_in_flight",
        "_mark",
        "_refused_at",
        "_snapshot_sent_s",
        "acked_round",
        "asked",
        "caught_up_s",
        "doubted_in",
        "full",
        "heard",
        "in_flight_bytes",
        "match",
        "next",
        "pace",
        "window_bytes",
    )

    def __init__(self, next_index: int, window_bytes: int) -> None:
        self.pace = Pace.PROBE
        self.match = Index(0)
        self.next = Index(next_index)
        self.asked = False  # a probe is on its way
        self.full = False  # its disk has room for small entries only
        self.acked_round = 0
        self.heard = False  # since the last heartbeat
        self.caught_up_s = float("-inf")
        """When the leader last had no more than this follower has now."""
        self._mark: tuple[float, Index] | None = None
        self.doubted_in: int | None = None
        self.in_flight_bytes = 0
        self.window_bytes = window_bytes
        self._in_flight: deque[tuple[Index, int]] = deque()
        self._refused_at: Index | None = None  # its match when it last refused what was sent ahead
        self._snapshot_sent_s = float("-inf")

    def look(self, now: float, last_index: Index) -> None:
        """At each heartbeat: has it what the leader had at an earlier one? An answer must have come meanwhile."""
        if self.heard and (self._mark is None or self.match >= self._mark[1]):
            if self._mark is not None:
                self.caught_up_s = self._mark[0]
            self._mark = now, last_index
        self.heard = False

    def may_send(self) -> bool:
        if self.pace is Pace.PIPELINE:
            return self.in_flight_bytes < self.window_bytes
        return self.pace is Pace.PROBE and not self.asked

    def snapshot_age(self, now: float) -> float:
        return now - self._snapshot_sent_s

    def sent(self, last: Index, size_bytes: int) -> None:
        """Entries up to ``last`` are on their way."""
        self.next = Index(last + 1)
        self._in_flight.append((last, size_bytes))
        self.in_flight_bytes += size_bytes

    def confirmed(self, match: Index) -> None:
        """The follower's log matches ours up to ``match``."""
        self.match = max(self.match, match)
        if match >= self.match:
            self.doubted_in = None
        if self.pace is Pace.PIPELINE:
            while self._in_flight and self._in_flight[0][0] <= self.match:
                self.in_flight_bytes -= self._in_flight.popleft()[1]
            self.next = max(self.next, Index(self.match + 1))
        elif self.pace is Pace.PROBE or self.match + 1 >= self.next:
            self._start(Pace.PIPELINE)

    def refused(self, prev: Index, hint: Index) -> None:
        """The follower does not have ``prev`` as we do; it may match up to ``hint``."""
        if self.pace is Pace.PIPELINE:
            if prev > self.match:
                self._start(Pace.PROBE)
                # Twice it said yes and then took nothing: its disk may be damaged there. The next heartbeat asks again;
                # to ask at once would send the same entries at the network's pace until it is replaced.
                self.asked = self.match == self._refused_at
                self._refused_at = self.match
        elif self.pace is Pace.PROBE and prev == self.next - 1:
            self.next = Index(max(self.match, min(prev - 1, hint)) + 1)
            self.asked = False

    def denies(self, prev: Index, hint: Index) -> bool:
        """Whether this refusal contradicts what the follower has confirmed."""
        return 0 < prev <= self.match and hint < self.match  # prev 0 answers a leadership of the past

    def doubt(self, round_: int) -> None:
        """Ask about all that it has confirmed, in a round that no older question had."""
        self.doubted_in = round_
        self._start(Pace.PROBE)

    def forgot(self, hint: Index) -> None:
        """It has lost what it confirmed. Whatever it has is to be found out anew."""
        self.doubted_in = None
        self.match = Index(0)
        self._start(Pace.PROBE)
        self.next = Index(hint + 1)

    def lost(self) -> None:
        """Whatever was on its way may be gone."""
        self._start(Pace.PROBE)

    def needs_snapshot(self, index: Index, now: float) -> None:
        """The checkpoint at ``index`` is on its way; nothing else is of use before it arrives."""
        self._start(Pace.SNAPSHOT)
        self.next = Index(index + 1)
        self._snapshot_sent_s = now

    def _start(self, pace: Pace) -> None:
        self.pace = pace
        self.next = Index(self.match + 1)
        self.asked = False
        self._in_flight.clear()
        self.in_flight_bytes = 0
