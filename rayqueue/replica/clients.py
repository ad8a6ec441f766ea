"""The clients of one replica: their connections, and the bytes in both directions.

Owns every connection that a client has opened and proven itself on, from the
moment the transport hands it over. Lives on the engine's thread: it is called
by the transport's ``poll`` and by the replica's turn, and shares the selector.

Requests are handed on as they are read, inside ``poll``, which then returns:
so all that has come goes into one append and one sync. Answers are collected
and written by ``flush``, one write per client however many there are.

Bounded by ``CallSettings``: connections in all and from one address, bytes read
per client and per turn, requests that are not answered, answers that are not
taken. A client that does not take its answers is not heard until it does; one
that lets far more pile up is hung up on.

Whoever is idle may be hung up on, and comes back when it wants something: after
``client_idle_ms``, or sooner, the longest idle first, when another client needs
the place. Idle is who has nothing under way and is no member of a group. So
connections that only stand there lock nobody out. Everybody is told why.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from rayqueue.config import CallSettings
from rayqueue.errors import DamagedLogError, InvariantBrokenError, QueueFullError, RayQueueError, TransportError
from rayqueue.net.streams import Buffer, Stream
from rayqueue.protocol.calls import encode_answer
from rayqueue.protocol.failures import encode_failure
from rayqueue.protocol.frames import HEAD, FrameReader, Kind, head
from rayqueue.protocol.hello import TOKEN_BYTES

if TYPE_CHECKING:
    from rayqueue.replica.service import Service

_log = logging.getLogger(__name__)

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_BUFFER_BYTES = 64 * 1024
_JOIN_BYTES = 64 * 1024
_COMPLAINT_INTERVAL_S = 5.0
_EVICTED_AFTER_S = 1.0
"""Who was heard of more recently than this is not idle, whatever others need."""
_RELEASED_AFTER_S = 1.0
"""Who was silent for so long needs no memory to receive into."""
_HOPELESS = 4
"""How many times the limit of its queue, and the largest answer, may wait for a client before it is hung up on."""
THE_CONNECTION = 0
"""A FAILED frame with this number is about the connection, not about a request."""


@dataclass(eq=False, slots=True)
class _Client:
    number: int
    stream: Stream
    fd: int
    reader: FrameReader
    heard_s: float
    """When something last went through, in either direction."""
    interest: int = 0
    out: list[Buffer] = field(default_factory=list)
    """Answers of this turn, for one write."""
    out_bytes: int = 0
    unanswered: int = 0
    deaf: bool = False
    """It is not read from, because it does not take its answers."""
    closed: bool = False


@dataclass(frozen=True, slots=True)
class ClientStats:
    connected: int = 0
    refused: int = 0
    """Turned away because there were too many."""
    hung_up: int = 0
    """Closed from here: they spoke nonsense, did not take their answers, or were idle."""


class Clients:
    """All on the engine's thread. ``service`` is set before the first client comes."""

    service: Service

    def __init__(
        self,
        settings: CallSettings,
        max_frame_bytes: int,
        *,
        damaged: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``damaged`` is told of damage that serving a client has met."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.stirred = False
        self._settings = settings
        self._max_frame_bytes = max_frame_bytes
        self._damaged = damaged
        self._clock = clock
        self._numbers = count(1)
        self._sources: Counter[str] = Counter()
        self._clients: dict[int, _Client] = {}
        self._written_to: dict[_Client, None] = {}
        self._half_read: dict[_Client, None] = {}
        self._budget_bytes = settings.turn_read_bytes
        self._hopeless_bytes = _HOPELESS * (
            settings.client_queue_bytes + max(settings.max_fetch_bytes, max_frame_bytes)
        )
        self._selector: selectors.BaseSelector | None = None
        self._refused = 0
        self._hung_up = 0
        self._complain_again_s = 0.0

    # -- the transport's side (rayqueue.raft.clients.ClientPort) ----------------------

    def attach(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def admit(self, stream: Stream, unread: bytes) -> None:
        reader = FrameReader(self._max_frame_bytes, _BUFFER_BYTES)
        client = _Client(next(self._numbers), stream, stream.fileno(), reader, self._clock())
        full = self._make_room(stream.source)
        if full is not None:
            self._refused += 1
            self._last_words(client, full)
            stream.close()
            return
        self._clients[client.number] = client
        self._sources[stream.source] += 1
        try:
            reader.space()[: len(unread)] = unread
            self._take(client, len(unread))
            self._read(client)
        except (OSError, TransportError) as error:
            self._lost(client, error)
            return
        self._watch(client)

    def _make_room(self, source: str) -> QueueFullError | None:
        """Let another one of this source in: hang up on the longest idle if that is needed. Or say why it cannot be."""
        settings, candidates = self._settings, list(self._clients.values())
        if self._sources[source] >= settings.max_clients_per_source:
            candidates = [client for client in candidates if client.stream.source == source]
            text = f"{len(candidates)} clients of this address are connected, which is the limit; none of them is idle"
        elif len(candidates) >= settings.max_clients:
            text = f"{len(candidates)} clients are connected, which is the limit; none of them is idle"
        else:
            return None
        before_s = self._clock() - _EVICTED_AFTER_S
        for client in sorted(candidates, key=lambda client: client.heard_s):
            if client.heard_s <= before_s and self._is_idle(client):
                self._lost(client, TransportError("idle, and another client needed the place; connect again"))
                return None
        return QueueFullError(text)

    def _is_idle(self, client: _Client) -> bool:
        """Nothing is under way: no request, no answer; and nobody needs it to be there."""
        return not client.unanswered and not client.stream.queued_bytes and not self.service.needs(client.number)

    def sweep(self) -> None:
        """Now and then: hang up on who is idle for too long, or does not take its answers; give memory back."""
        now_s = self._clock()
        idle_s = self._settings.client_idle_ms / 1000
        for client in list(self._clients.values()):
            silent_s = now_s - client.heard_s
            if silent_s >= idle_s and (client.deaf or self._is_idle(client)):
                self._lost(client, TransportError(f"idle for {silent_s:.0f} s; connect again"))
            elif silent_s >= _RELEASED_AFTER_S:
                client.reader.release()

    def on_ready(self, client: _Client, mask: int) -> None:
        if client.closed:
            return  # by what happened earlier in this round
        client.heard_s = self._clock()
        try:
            if mask & _READ and not client.deaf:
                self._read(client)
            if mask & _WRITE and not client.closed:
                client.stream.flush()
                self._hear_again(client)
            self._watch(client)
        except (OSError, TransportError) as error:
            self._lost(client, error)

    @property
    def half_read(self) -> bool:
        return bool(self._half_read)

    def read_rest(self) -> None:
        half_read, self._half_read = self._half_read, {}
        for client in half_read:
            self.on_ready(client, _READ)

    def close(self) -> None:
        for client in self._clients.values():
            client.closed = True
            client.stream.close()
        self._clients.clear()

    # -- the replica's side ------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._clients)

    def stats(self) -> ClientStats:
        return ClientStats(len(self._clients), self._refused, self._hung_up)

    def new_turn(self) -> bool:
        """A turn begins: as much may come again as did. Answers whether anything came."""
        stirred, self.stirred = self.stirred, False
        self._budget_bytes = self._settings.turn_read_bytes
        return stirred

    def is_full(self, number: int) -> bool:
        """It does not take its answers, or is gone: nothing large should be made for it."""
        client = self._clients.get(number)
        if client is None:
            return True
        return client.stream.queued_bytes + client.out_bytes > self._settings.client_queue_bytes

    def serving(self, number: int, request: int | None, work: Callable[[], None]) -> None:
        """Do something that a client asked for. A ``RayQueueError`` out of it is the answer; with None nobody waits.

        Anything else is a bug that the client's bytes have found, before anything was proposed: it is hung up on,
        and the replica goes on. Not so if the replica itself is unsound, or its disk: then that is the end.
        """
        try:
            work()
        except (InvariantBrokenError, OSError):
            raise
        except RayQueueError as error:
            if request is not None:
                self.fail(number, request, error)
            elif type(error) is DamagedLogError:
                self._damaged(str(error))
        except Exception as error:  # noqa: BLE001  # whatever it is
            self._hang_up(number, error)

    def send(self, number: int, kind: Kind, request: int, buffers: Sequence[bytes]) -> None:
        """Answer a request with the next ``flush``. A client that is gone gets nothing, and that is no error."""
        client = self._clients.get(number)
        if client is None:
            return
        size_bytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        client.unanswered -= 1
        out = client.out
        if not out:
            self._written_to[client] = None
        out.append(head(kind, request, size_bytes))
        out.extend(buffers)
        client.out_bytes += HEAD.size + size_bytes

    def answer(self, number: int, request: int, answer: Any) -> None:
        """Answer a call: with what was found, or with the error that says why nothing was."""
        if isinstance(answer, RayQueueError):
            self.fail(number, request, answer)
        else:
            self.send(number, Kind.ANSWER, request, (encode_answer(answer),))

    def fail(self, number: int, request: int, error: RayQueueError) -> None:
        """Answer a request with an error."""
        if type(error) is DamagedLogError:
            self._damaged(str(error))
        self.send(number, Kind.FAILED, request, (encode_failure(error),))

    def _hang_up(self, number: int, error: Exception) -> None:
        """Close a client's connection: its request failed in a way that nobody foresaw."""
        client = self._clients.get(number)
        if client is None:
            return
        self._complain("client %d is hung up on for what it sent", number, error=error)
        self._lost(client, TransportError(f"what this client sent could not be served: {type(error).__name__}"))

    def flush(self) -> None:
        """Write what was sent since the last time."""
        if not self._written_to:
            return
        written_to, self._written_to = self._written_to, {}
        for client in written_to:
            if client.closed:
                continue
            try:
                self._write(client)
            except (OSError, TransportError) as error:
                self._lost(client, error)

    # -- one client ----------------------------------------------------------------------

    def _read(self, client: _Client) -> None:
        budget_bytes = min(self._settings.client_read_bytes, self._budget_bytes)
        stream, reader = client.stream, client.reader
        while budget_bytes > 0:
            space = reader.space()
            received = stream.read_into(space)
            if received is None:
                return
            if received == 0:
                self._lost(client, None)
                return
            budget_bytes -= received
            self._budget_bytes -= received
            self._take(client, received)
            if client.closed or received < len(space):
                return
        if self._budget_bytes <= 0:
            self.stirred = True  # this turn has enough, though there may not be a whole request among it
        if stream.has_more:
            self._half_read[client] = None

    def _take(self, client: _Client, received_bytes: int) -> None:
        most = self._settings.max_unanswered
        for frame in client.reader.frames(received_bytes):
            self.stirred = True
            if frame.kind != Kind.APPEND_UNACKED:
                client.unanswered += 1
                if client.unanswered > most:
                    error = QueueFullError(f"{most} requests of this client are not answered yet, which is the limit")
                    self.fail(client.number, frame.request, error)
                    continue
            request = None if frame.kind == Kind.APPEND_UNACKED else frame.request
            self.serving(client.number, request, partial(self.service.serve, client.number, frame))
            if client.closed:
                return

    def _write(self, client: _Client) -> None:
        out, size_bytes = client.out, client.out_bytes
        client.out, client.out_bytes = [], 0
        stream = client.stream
        if size_bytes <= _JOIN_BYTES:
            out = [b"".join(out)]
        stream.write(out, size_bytes)
        queued_bytes = stream.queued_bytes
        if queued_bytes > self._settings.client_queue_bytes:
            if queued_bytes > self._hopeless_bytes:
                raise TransportError(f"it does not take its answers: {queued_bytes} bytes wait")
            client.deaf = True
        self._watch(client)

    def _hear_again(self, client: _Client) -> None:
        if client.deaf and client.stream.queued_bytes <= self._settings.client_queue_bytes // 2:
            client.deaf = False
            if client.stream.has_more:
                self._half_read[client] = None

    def _watch(self, client: _Client) -> None:
        if client.closed or self._selector is None:
            return
        interest = (0 if client.deaf else _READ) | (_WRITE if client.stream.wants_write else 0)
        if interest == client.interest:
            return
        if client.interest:
            self._selector.modify(client.fd, interest, client)
        else:
            self._selector.register(client.fd, interest, client)
        client.interest = interest

    def _lost(self, client: _Client, error: Exception | None) -> None:
        if client.closed:
            return
        if isinstance(error, TransportError):
            self._hung_up += 1
            self._complain("client %d: %s", client.number, error)
            self._last_words(client, error)
        client.closed = True
        if client.interest and self._selector is not None:
            self._selector.unregister(client.fd)
            client.interest = 0
        client.stream.close()
        del self._clients[client.number]
        self._sources[client.stream.source] -= 1
        if not self._sources[client.stream.source]:
            del self._sources[client.stream.source]
        self._half_read.pop(client, None)
        self._written_to.pop(client, None)
        self.stirred = True
        self.service.client_gone(client.number)

    def _complain(self, text: str, *values: object, error: Exception | None = None) -> None:
        """Log, but let nobody fill the log: once in a while. The others are counted (``ClientStats``)."""
        now_s = self._clock()
        if now_s >= self._complain_again_s:
            self._complain_again_s = now_s + _COMPLAINT_INTERVAL_S
            _log.warning(text, *values, exc_info=error)

    def _last_words(self, client: _Client, error: RayQueueError) -> None:
        """Tell why, at best effort."""
        body = encode_failure(error)
        try:
            client.stream.write([head(Kind.FAILED, THE_CONNECTION, len(body)), body], HEAD.size + len(body))
        except OSError as unheard:
            _log.debug("client %d went before it was told why: %s", client.number, unheard)
