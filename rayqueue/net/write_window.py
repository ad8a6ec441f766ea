"""The window of a writer into one partition: batches in order, each once, many under way. A state machine.

Events come in as method calls, each with the time; what is to be done about them
goes out as a list of actions. No loop, no clock, no dice: ``rayqueue.net.writer``
has them in production, the simulator and the transcripts of ``tests/unit/net``
have their own.

Batches are numbered when they are offered and go to whoever leads, one after the
other, without waiting for answers. They stay in the window until they are
acknowledged. When one comes back with an error that may pass (the leader is
another one, the connection broke, the queue is full), the window stops, waits
until nothing is under way any more, and sends everything again in its order. The
partition answers what it has already with the offset of the first time, so
nothing is lost, doubled or reordered, whatever happened in between.

    IDLE ──wanted──> CONNECTING ──connected──> OPEN <──confirmed── DOUBTING
     ^                ^       │                │  └──tick: silent────^  │
     │ nothing left   │       │ full           │ refused, lost          │ replaced
     └────────────────┤       v                v                        │
                   PAUSING  WAITING ───────> SETTLING <─────────────────┘
                      ^                        │
                      └────nothing under way───┘

A partition whose backlog is bounded refuses what does not fit. The window then
waits for its turn there (``AskRoom``), is told how much room is kept for it, cuts
the batch where the room ends, and sends what fits; then it waits again. Sequences
count records, so a piece of a batch continues where the one before it ended, and
the partition knows a piece of what it has written as a whole.

A batch that is given up (an error that does not pass, or its time is up) leaves a
hole in the numbers, and the partition takes nothing behind a hole. So a new
*epoch* of the producer id begins, numbered from 0. What is *held* behind the hole
goes with the new epoch, once what is before it is settled. A newer epoch also
fences the older one: a batch that was given up and still is under way somewhere
arrives before what was sent after it, or never.

Only a batch that is surely not written may be numbered again. The partition takes
batches without gaps, so behind one that is surely not written nothing is. A batch
whose time is up but that may be written stays in the window, reported as unknown,
for as long as others behind it may be written too.

Batches that were numbered by somebody else (``Numbering.FIXED``) are never numbered
again: what is behind one that is given up fails with it. The same holds for those of a
transaction (``Numbering.GIVEN``), whose epoch is the coordinator's to give. Those without a number
(``Numbering.NONE``) may be in the log twice: what is behind a failed one is sent
again even if it was acknowledged, so that the last copies are in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count, islice, takewhile

from rayqueue.errors import (
    ClosedError,
    DeliveryTimeoutError,
    DiskFullError,
    InvalidInputError,
    InvariantBrokenError,
    NotLeaderError,
    OutcomeUnknownError,
    OversizedRecordError,
    ProducerError,
    ProducerFencedError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
    SequenceExpiredError,
    SequenceGapError,
    TransactionError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.net.outgoing import Outgoing
from rayqueue.net.write_actions import (
    Action,
    AskRoom,
    Connect,
    Doubt,
    FailWaiting,
    Identity,
    Numbering,
    Resolve,
    Split,
    State,
    Transmit,
    WriteLimits,
)
from rayqueue.net.write_queue import WriteQueue
from rayqueue.protocol.calls import AwaitRoom, Room
from rayqueue.protocol.data import Appended
from rayqueue.records import BatchHeader

_LOST_TAIL_S = 1.0
"""How long a gap must be reported at the head of the window before it is taken for what acks="leader" has lost."""

_ROOM_WAIT_MS = 5000
"""How long the leader of a full partition is asked to wait for room before it answers. Then it is asked again."""

_STORY_EVENTS = 32

_NOT_WRITTEN = (
    NotLeaderError,
    ReplicaClosedError,
    QueueFullError,
    DiskFullError,
    ProducerError,
    TransactionError,
    InvalidInputError,
)
"""Errors that say for sure that this attempt has written nothing."""

_ALWAYS = {"answered", "begun", "tick", "aborted", "closed"}
_TAKES = {
    State.IDLE: _ALWAYS | {"wanted"},
    State.CONNECTING: _ALWAYS | {"connected", "not_connected"},
    State.OPEN: _ALWAYS | {"offered", "lost"},
    State.SETTLING: _ALWAYS | {"timer"},
    State.PAUSING: _ALWAYS | {"timer"},
    State.WAITING: _ALWAYS | {"granted", "not_granted"},
    State.DOUBTING: _ALWAYS | {"confirmed", "replaced"},
    State.CLOSED: _ALWAYS,
}
"""Which events a state takes."""


class WriteWindow:
    """One partition's. Call ``timer`` at ``wake_s``, if that is not None, and ``tick`` now and then."""

    def __init__(self, name: str, limits: WriteLimits, backoff: Backoff) -> None:
        """``name`` is the partition's, for the errors."""
        self.state = State.IDLE
        self.wake_s: float | None = None
        self._name = name
        self._limits = limits
        self._backoff = backoff
        self._actions: list[Action] = []
        self._takes = _TAKES[State.IDLE]
        self._story: deque[tuple[State, str, object]] = deque(maxlen=_STORY_EVENTS)
        self._queue = WriteQueue(limits)
        # What is under way.
        self._attempts = count(1)
        self._under_way: set[int] = set()
        self._heard_s = 0.0
        # What went wrong.
        self._cause: RayQueueError | None = None  # why the window has stopped
        self._stale: RayQueueError | None = None  # what to tell whoever looks for the leader
        self._last_error: RayQueueError | None = None  # since the last acknowledgement
        self._gap_since_s: float | None = None
        self._probe = False  # a queue or a disk is full: one batch at a time
        self._full: RayQueueError | None = None  # the partition's backlog is: nothing goes without a grant
        self._asked: tuple[Outgoing, float]  # for room: for which batch, and until when

    # -- for the driver ------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a batch may be offered."""
        return self.state is State.OPEN and self._queue.has_room

    @property
    def in_flight(self) -> int:
        """Batches that were offered and are neither acknowledged nor given up."""
        return len(self._queue)

    @property
    def numbered(self) -> int:
        """Records that were offered since ``begun``: if there are any, some may be written."""
        return self._queue.numbered

    # -- events: batches -----------------------------------------------------------------

    def begun(self, producer_id: int, epoch: int) -> list[Action]:
        """A transaction; nothing of the one before is in the window."""
        self._enter("begun", epoch)
        self._queue.begin(producer_id, epoch)
        return []

    def wanted(self, now_s: float) -> list[Action]:
        """There is something to offer."""
        self._enter("wanted")
        self._connect()
        return self._done(now_s)

    def offered(self, batch: Outgoing, now_s: float) -> list[Action]:
        """One more. There is room for it."""
        self._enter("offered")
        try:
            self._queue.add(batch)
        except RayQueueError as error:  # send has checked its records; this is a bug of ours, or a strange object
            self._report(batch, error)
        else:
            self._transmit(batch, now_s)
        return self._done(now_s)

    def answered(self, batch: Outgoing, attempt: int, answer: Appended | RayQueueError, now_s: float) -> list[Action]:
        """The outcome of an attempt, also of one that was given up: what is written is written."""
        self._enter("answered", attempt)
        self._under_way.discard(attempt)
        self._heard_s = now_s
        current = batch.attempt == attempt
        if isinstance(answer, SequenceExpiredError):
            answer = Appended(None, len(batch), True)
        if not self._limits.acknowledged:  # it is the kernel's now, or was never given to it
            self._settle(batch, answer)
            self._queue.pop_settled()
        elif not isinstance(answer, RayQueueError):
            if current or self._limits.numbering is not Numbering.NONE:
                self._acknowledged(batch, answer)
        elif current and not batch.settled and self.state is not State.CLOSED:
            self._refused(batch, answer, now_s)
        return self._done(now_s)

    # -- events: the way to the leader ---------------------------------------------------

    def connected(self, producer_id: int | None, now_s: float) -> list[Action]:
        """Somebody leads. ``producer_id``, if one was asked for."""
        self._enter("connected")
        queue = self._queue
        queue.producer_id = queue.producer_id if producer_id is None else producer_id
        self._tidy(now_s)
        if queue.new_epoch and not queue.window:
            queue.begin_epoch()
            self._gap_since_s = None
        if self._full is not None and queue.window:
            self._ask_room(now_s)
        else:
            self._send_again(now_s)
        return self._done(now_s)

    def not_connected(self, error: RayQueueError, now_s: float) -> list[Action]:
        """Nobody leads, or the topic is gone."""
        self._enter("not_connected")
        self._last_error = error
        if error.retriable:
            self._cause = error
            self._become(State.SETTLING)
        else:
            self._fail_all(error)
        return self._done(now_s)

    def lost(self, now_s: float) -> list[Action]:
        """The connection is gone."""
        self._enter("lost")
        self._stop(None)
        return self._done(now_s)

    # -- events: room --------------------------------------------------------------------

    def granted(self, room: Room, now_s: float) -> list[Action]:
        """So much is kept for us; nothing, if the leader has waited in vain."""
        self._enter("granted", room.records)
        self._tidy(now_s)  # time has passed
        self._become(State.SETTLING)
        asked_for, until_s = self._asked
        del self._asked
        if self._queue.head is asked_for:
            self._send_into(room, now_s)
            if not self._under_way and self._limits.raises_full:
                self._give_up(asked_for, self._full or _no_room(self._name))
            elif not self._under_way and now_s < until_s:
                self._cause = _no_room(self._name)  # a leader that does not wait is not asked at once again
        return self._done(now_s)

    def not_granted(self, error: RayQueueError, now_s: float) -> list[Action]:
        self._enter("not_granted")
        self._last_error = error
        self._become(State.SETTLING)
        asked_for, _ = self._asked
        del self._asked
        if error.retriable:
            self._cause = error
        elif self._queue.head is asked_for:
            alone = isinstance(error, OversizedRecordError)
            self._give_up(self._cut(asked_for, *asked_for.least()) if alone else asked_for, error)
        return self._done(now_s)

    # -- events: time --------------------------------------------------------------------

    def timer(self, now_s: float) -> list[Action]:
        """It is ``wake_s``."""
        self._enter("timer")
        if self.state is State.PAUSING:
            self._go_on(now_s)
        elif self._under_way and now_s - self._heard_s >= self._limits.stall_s:
            self._abandon()
        return self._done(now_s)

    def tick(self, now_s: float, late: Iterable[Outgoing] = ()) -> list[Action]:
        """Time passes. ``late``: batches that were never offered and whose time is up."""
        self._enter("tick")
        for batch in late:
            self._report(batch, self._too_late(unsure=False))
        self._expire(now_s)
        if self.state is State.OPEN and self._under_way and now_s - self._heard_s >= self._limits.stall_s:
            self._become(State.DOUBTING)
            self._actions.append(Doubt(self._silence()))
        return self._done(now_s)

    # -- events: doubt -------------------------------------------------------------------

    def confirmed(self, now_s: float) -> list[Action]:
        """The silent one leads still. Only another leader is a reason to send again: a slow one has it all already."""
        self._enter("confirmed")
        self._heard_s = now_s
        self._become(State.OPEN if self._cause is None and not self._queue.new_epoch else State.SETTLING)
        return self._done(now_s)

    def replaced(self, error: RayQueueError | None, now_s: float) -> list[Action]:
        """Another one leads, or nobody is known to."""
        self._enter("replaced")
        self._last_error = error or self._last_error
        self._become(State.SETTLING)
        self._abandon()
        return self._done(now_s)

    # -- events: the end -----------------------------------------------------------------

    def aborted(self, error: RayQueueError, now_s: float) -> list[Action]:
        """The driver has failed: nobody may wait for ever because of it."""
        self._enter("aborted")
        if self.state is not State.CLOSED:
            self._fail_all(error)
        return self._done(now_s)

    def closed(self) -> list[Action]:
        """Send nothing any more. What is not acknowledged is reported as unknown, or as not written."""
        self._enter("closed")
        self._become(State.CLOSED)
        not_sent = ClosedError("the producer was closed before this was sent; it is not written")
        unsure = OutcomeUnknownError("the producer was closed before this was acknowledged; it may be written")
        for batch in self._queue.clear():
            self._report(batch, unsure if batch.maybe_written or batch.attempt in self._under_way else not_sent)
        self._actions.append(FailWaiting(not_sent))
        actions, self._actions = self._actions, []
        return actions

    # -- transitions ---------------------------------------------------------------------

    def _enter(self, event: str, detail: object = "") -> None:
        self._story.append((self.state, event, detail))
        if event not in self._takes:
            story = [f"{state.value} {event} {detail}".strip() for state, event, detail in self._story]
            raise InvariantBrokenError(
                f"the writer of {self._name} cannot take {event!r} in state {self.state.value!r}; events so far: "
                + ", ".join(story),
                story=story,
            )

    def _become(self, state: State, wake_s: float | None = None) -> None:
        self.state = state
        self.wake_s = wake_s
        self._takes = _TAKES[state]

    def _done(self, now_s: float) -> list[Action]:
        """Go on as far as nothing has to be heard for it; what is to be done."""
        if self.state is State.SETTLING:
            if self._under_way:
                self.wake_s = max(self._heard_s + self._limits.stall_s, now_s + 0.001)
            else:
                self._settled(now_s)
        actions, self._actions = self._actions, []
        return actions

    def _stop(self, cause: RayQueueError | None) -> None:
        if self._cause is None:  # the first one is the cause; those after it are gaps
            self._cause = cause
        if self.state is State.OPEN:
            self._become(State.SETTLING)

    def _settled(self, now_s: float) -> None:
        """Nothing is under way, so no batch is twice."""
        cause, self._cause = self._cause, None
        if cause is not None:
            self._stale = cause
            if self._full is None or not _is_bounded(cause):  # for room we wait in the line
                self._become(State.PAUSING, now_s + self._backoff.pause_s())
                return
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        self._tidy(now_s)
        if len(self._queue):
            self._connect()
        else:
            self._full = None
            self._become(State.IDLE)

    def _connect(self) -> None:
        stale, self._stale = self._stale, None
        identity = Identity.NONE
        if self._queue.producer_id is None:
            identity = Identity.FRESH if self._queue.new_epoch else Identity.OWN
        self._become(State.CONNECTING)
        self._actions.append(Connect(stale if stale is not None and stale.refresh_metadata else None, identity))

    def _send_again(self, now_s: float) -> None:
        """The whole window. No more than is allowed: more in doubt is more than the partition remembers."""
        window = self._queue.window
        most = 1 if self._probe else self._limits.max_batches
        for batch in islice(window, most):
            self._transmit(batch, now_s)
        whole = not self._queue.new_epoch and len(window) <= most and not (self._probe and window)
        self._become(State.OPEN if whole else State.SETTLING)

    def _transmit(self, batch: Outgoing, now_s: float) -> None:
        attempt = batch.attempt = next(self._attempts)
        batch.answer = None
        if not self._under_way:
            self._heard_s = now_s
        self._under_way.add(attempt)
        self._actions.append(Transmit(batch, attempt))

    # -- answers -------------------------------------------------------------------------

    def _acknowledged(self, batch: Outgoing, answer: Appended) -> None:
        if batch.settled:
            return
        self._backoff.reset()
        self._last_error = None
        self._gap_since_s = None
        self._probe = False
        if self._limits.numbering is not Numbering.NONE:
            self._settle(batch, answer)
        else:
            batch.answer = answer
            for each in takewhile(lambda each: each.answer is not None, self._queue.window):
                self._settle(each, each.answer or answer)
        self._queue.pop_settled()

    def _refused(self, batch: Outgoing, error: RayQueueError, now_s: float) -> None:
        self._last_error = error
        if not isinstance(error, _NOT_WRITTEN):
            batch.maybe_written = True
        full = isinstance(error, QueueFullError)
        if _is_bounded(error) and self._limits.numbering is not Numbering.NONE:  # who has no number has no turn
            full, self._full = False, error
        self._probe = self._probe or full or isinstance(error, DiskFullError)
        if full and self._limits.raises_full and not batch.maybe_written:
            self._give_up(batch, error)
        elif isinstance(error, SequenceGapError) and batch is self._queue.head:
            self._gap_at_head(batch, error, now_s)
        elif error.retriable:
            self._stop(error)
        else:
            self._give_up(batch, error)

    def _gap_at_head(self, batch: Outgoing, error: RayQueueError, now_s: float) -> None:
        """All before it is acknowledged, and yet the partition misses something.

        It has forgotten this producer, or lost what only one replica had acknowledged, or does not know its log yet.
        """
        if self._limits.numbering is not Numbering.OWN:
            if self._limits.refuse_forgotten and error.details.get("expected") == 0:
                self._give_up(batch, error)
                return
        else:
            self._gap_since_s = now_s if self._gap_since_s is None else self._gap_since_s
            lost = self._limits.may_lose_tail and now_s - self._gap_since_s > _LOST_TAIL_S
            if lost or not batch.maybe_written:
                self._queue.hold(self._queue.take_from(batch))
        self._stop(error)

    def _give_up(self, batch: Outgoing, error: RayQueueError) -> None:
        """An error that does not pass. What is behind the batch waits until what is before it is settled."""
        queue = self._queue
        _, *behind = queue.take_from(batch)
        if self._limits.numbering is not Numbering.OWN:
            for each in (batch, *behind):
                self._settle(each, error)
        else:
            if isinstance(error, ProducerFencedError):
                queue.producer_id = None
            if batch.maybe_written:
                # An earlier attempt may have written it and some behind it: these cannot be numbered again.
                for each in behind:
                    if each.maybe_written or each.attempt in self._under_way:
                        self._settle(each, OutcomeUnknownError(f"it may be written; the batch before it: {error}"))
                error = OutcomeUnknownError(f"an earlier attempt may have written it; the last one: {error}")
            for each in behind:
                each.settled = each.reported  # nobody waits for it any more
            queue.hold([each for each in behind if not each.settled])
        self._settle(batch, error)
        self._stop(None)

    def _abandon(self) -> None:
        """Do not wait any longer for what is under way. Its outcome is unknown."""
        for batch in self._queue.window:
            if batch.attempt in self._under_way:
                batch.maybe_written = True
                batch.attempt = 0
        self._under_way.clear()
        self._cause = self._cause or self._silence()

    def _tidy(self, now_s: float) -> None:
        """Drop what is settled or too late. Nothing is under way."""
        self._expire(now_s)
        self._queue.tidy()

    # -- a full partition ----------------------------------------------------------------

    def _ask_room(self, now_s: float) -> None:
        wanted = list(islice(self._queue.window, self._limits.max_batches))
        head = wanted[0]
        least_records, least_bytes = (len(head), len(head.encoded)) if head.reported else head.least()
        left_ms = max(1, round((head.deadline_s - now_s) * 1000))
        wait_ms = 0 if self._limits.raises_full else min(_ROOM_WAIT_MS, left_ms)
        self._asked = head, now_s + wait_ms / 1000
        self._become(State.WAITING)
        self._actions.append(
            AskRoom(
                AwaitRoom(
                    producer_id=BatchHeader.parse(head.encoded).producer_id,
                    records=sum(map(len, wanted)),
                    size_bytes=sum(len(batch.encoded) for batch in wanted),
                    least_bytes=least_bytes,
                    least_records=least_records,
                    wait_ms=wait_ms,
                )
            )
        )

    def _send_into(self, room: Room, now_s: float) -> None:
        """As much as there is room for."""
        records, size_bytes = room.records, room.size_bytes
        for batch in list(islice(self._queue.window, self._limits.max_batches)):
            piece = self._cut(batch, records, size_bytes)
            if len(piece) > records or len(piece.encoded) > size_bytes:
                return
            records -= len(piece)
            size_bytes -= len(piece.encoded)
            self._transmit(piece, now_s)

    def _cut(self, batch: Outgoing, records: int, size_bytes: int) -> Outgoing:
        """The head of the batch that fits into this, cut off; the batch itself if all of it does, or nothing can be."""
        if batch.reported or (len(batch) <= records and len(batch.encoded) <= size_bytes):
            return batch
        pieces = batch.cut(records, size_bytes)
        if pieces is None:
            return batch
        self._actions.append(Split(batch, pieces))
        self._queue.split(batch, pieces)
        return pieces[0]

    # -- time ----------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        """Report what has waited for too long."""
        every = [batch for batch in self._queue if not batch.reported]
        late = [batch for batch in every if batch.deadline_s <= now_s]
        for batch in every if late and self._limits.numbering is not Numbering.OWN else late:
            batch.maybe_written = batch.maybe_written or batch.attempt in self._under_way
            self._report(batch, self._too_late(unsure=batch.maybe_written))

    def _too_late(self, *, unsure: bool) -> RayQueueError:
        timeout_ms = self._limits.delivery_timeout_ms
        why = f"; last error: {self._last_error}" if self._last_error is not None else ""
        if unsure:
            return DeliveryTimeoutError(
                f"not acknowledged by {self._name} within {timeout_ms} ms; it may be written{why}"
            )
        if self._full is not None:
            return self._full
        if self._last_error is not None and not isinstance(self._last_error, OutcomeUnknownError):
            return self._last_error
        return DeliveryTimeoutError(f"not sent to {self._name} within {timeout_ms} ms; it is not written{why}")

    def _silence(self) -> OutcomeUnknownError:
        return OutcomeUnknownError(f"the leader of {self._name} has not answered")

    # -- outcomes ------------------------------------------------------------------------

    def _fail_all(self, error: RayQueueError) -> None:
        self._under_way.clear()
        self._cause = self._stale = self._full = None
        self._become(State.IDLE)
        for batch in self._queue.clear():
            self._settle(batch, error)
        self._actions.append(FailWaiting(error))

    def _settle(self, batch: Outgoing, outcome: Appended | RayQueueError) -> None:
        batch.settled = True
        self._report(batch, outcome)

    def _report(self, batch: Outgoing, outcome: Appended | RayQueueError) -> None:
        if not batch.reported:
            batch.reported = True
            self._actions.append(Resolve(batch, outcome))


def _is_bounded(error: RayQueueError) -> bool:
    """The partition's backlog has reached its bound; not a queue that is full for a moment."""
    return isinstance(error, QueueFullError) and "bound" in error.details


def _no_room(name: str) -> QueueFullError:
    return QueueFullError(f"{name} has no room")
