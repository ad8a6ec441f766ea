"""Limits: how much one key, and one address, may ask for. No I/O; the clock is handed in.

A bucket fills by its rate and holds one second's worth. Who takes more than is
there goes into debt and is told when it will be paid, so that one large request
passes and the next waits. Buckets and counts of callers that are not heard of
are forgotten once they are full, respectively zero: a million addresses do not
fill the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from rayqueue.config import GatewaySettings
from rayqueue.errors import RateLimitedError

_MAX_KNOWN = 10_000
_LOOKED_AT = 100


class Bucket:
    """Of one caller, for one thing."""

    __slots__ = ("at_s", "left", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self.left = rate
        self.at_s = now_s

    def left_at(self, now_s: float) -> float:
        """Less than nothing: a debt."""
        return min(self.rate, self.left + (now_s - self.at_s) * self.rate)

    def take(self, amount: float, now_s: float) -> float:
        """0 if it was taken; otherwise nothing was, and after so many seconds it may be asked for again."""
        self.left = self.left_at(now_s)
        self.at_s = now_s
        if self.left <= 0:
            return max(0.001, -self.left / self.rate)
        self.left -= amount
        return 0.0


class Buckets:
    """Of all callers, for one thing. The longest unheard of is forgotten, if it owes nothing."""

    def __init__(self, what: str, rate: float, clock_s: Callable[[], float]) -> None:
        self._what = what
        self._rate = rate
        self._clock_s = clock_s
        self._known: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, who: str, amount: float = 1) -> None:
        """``RateLimitedError`` if he has had his share."""
        now_s = self._clock_s()
        bucket = self._known.get(who)
        if bucket is None:
            bucket = self._known[who] = Bucket(self._rate, now_s)
            if len(self._known) > _MAX_KNOWN:
                self._forget_one(now_s)
        else:
            self._known.move_to_end(who)
        wait_s = bucket.take(amount, now_s)
        if wait_s:
            raise RateLimitedError(
                f"more than {self._rate:g} {self._what} per second; come again in {wait_s:.3f} s",
                retry_after_ms=int(wait_s * 1000) + 1,
            )

    def _forget_one(self, now_s: float) -> None:
        """Who is forgotten has a full share again: no debtor, if one of the longest unheard of is none."""
        oldest = list(islice(self._known, _LOOKED_AT))
        paid = (who for who in oldest if self._known[who].left_at(now_s) >= 0)
        del self._known[next(paid, oldest[0])]


class Slots:
    """What each caller has open at a time."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._held: dict[str, int] = {}

    def take(self, who: str) -> None:
        held = self._held.get(who, 0)
        if held >= self._most:
            raise RateLimitedError(
                f"{held} {self._what} are open already, as many as one may have: close some first", retry_after_ms=1000
            )
        self._held[who] = held + 1

    def release(self, who: str) -> None:
        held = self._held.get(who, 0) - 1
        if held > 0:
            self._held[who] = held
        else:
            self._held.pop(who, None)

    @contextmanager
    def held(self, who: str) -> Iterator[None]:
        self.take(who)
        try:
            yield
        finally:
            self.release(who)


class Peers:
    """Connections of which no more is known than who calls over them: gRPC's.

    One is known from its first call until it has had none for ``idle_s``, when the server closes it, too. Nobody says
    when the caller has closed it before. So where another needs its place it is taken for closed after ``_SHORTLY_S``,
    the longest idle first: what is refused are more connections in use, and more new ones within that time.
    """

    _SHORTLY_S = 1.0

    def __init__(self, most: int, idle_s: float, clock_s: Callable[[], float]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._clock_s = clock_s
        self._known: dict[str, dict[str, list[float]]] = {}  # source -> peer -> calls under way, last heard of
        self._looked_s = clock_s()

    @contextmanager
    def held(self, source: str, peer: str) -> Iterator[None]:
        """For as long as a call lasts. ``RateLimitedError`` if this source has other connections enough."""
        now_s = self._clock_s()
        if now_s - self._looked_s >= self._idle_s:
            self._looked_s = now_s
            for each in list(self._known):
                self._forget_idle(each, now_s)
        if peer not in self._known.get(source, ()) and len(self._known.get(source, ())) >= self._most:
            self._make_room(source, now_s)
        state = self._known.setdefault(source, {}).setdefault(peer, [0, now_s])
        state[0] += 1
        try:
            yield
        finally:
            state[0] -= 1
            state[1] = self._clock_s()

    def _make_room(self, source: str, now_s: float) -> None:
        peers = self._known[source]
        idle = [(at_s, peer) for peer, (calls, at_s) in peers.items() if not calls and now_s - at_s >= self._SHORTLY_S]
        if not idle:
            raise RateLimitedError(
                f"{len(peers)} connections of gRPC from {source} have calls under way, or had a moment ago, as many as "
                "one may have: use those, or close some first",
                retry_after_ms=1000,
            )
        del peers[min(idle)[1]]

    def _forget_idle(self, source: str, now_s: float) -> None:
        peers = self._known[source]
        for peer in [each for each, (calls, at_s) in peers.items() if not calls and now_s - at_s >= self._idle_s]:
            del peers[peer]
        if not peers:
            del self._known[source]


class Limits:
    """Of one gateway, over all its listeners."""

    def __init__(self, settings: GatewaySettings, clock_s: Callable[[], float]) -> None:
        self._requests = Buckets("requests", settings.requests_per_s, clock_s)
        self._bytes = Buckets("bytes", settings.bytes_per_s, clock_s)
        self.streams = Slots("sessions and streams", settings.max_streams_per_caller)
        self.connections = Slots("connections", settings.max_connections_per_source)
        self.calls = Slots("gRPC calls", settings.max_connections_per_source)
        """From one address."""
        self.peers = Peers(settings.max_connections_per_source, settings.idle_timeout_ms / 1000, clock_s)

    def arrived(self, source: str) -> None:
        """A request from this address: before its key is looked at, so that guessing keys is limited, too."""
        self._requests.take(f"from {source}")

    def take(self, who: str, size_bytes: int) -> None:
        """A request of this caller, with so many bytes."""
        self.request(who)
        self.more(who, size_bytes)

    def request(self, who: str) -> None:
        """A request of this caller, or what counts as one: a batch in a stream."""
        self._requests.take(who)

    def more(self, who: str, size_bytes: int) -> None:
        """Another message in a stream of this caller."""
        self._bytes.take(who, size_bytes)
