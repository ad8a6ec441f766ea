"""The writer's window without a loop: any order of events, with the real partition at the other end.

First everything goes wrong, then all is well, and everything must be resolved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.client.producer.batch import Batch
from rayqueue.client.producer.delivery import Outcome
from rayqueue.config import ClientSettings
from rayqueue.errors import (
    DiskFullError,
    InvalidInputError,
    InvariantBrokenError,
    LeadershipLostError,
    NotLeaderError,
    OutcomeUnknownError,
    QueueFullError,
    RayQueueError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.net.outgoing import Outgoing
from rayqueue.net.write_actions import (
    Action,
    AskRoom,
    Connect,
    Doubt,
    Identity,
    Numbering,
    Resolve,
    Split,
    State,
    Transmit,
    WriteLimits,
)
from rayqueue.net.write_window import _TAKES, WriteWindow
from rayqueue.partition import Admission, PartitionSettings, commit_command
from rayqueue.protocol.calls import Room
from rayqueue.protocol.data import Appended
from rayqueue.records import RecordBatch
from tests.unit.net.transcript import DEFAULTS, NamedBatch
from tests.unit.partition.partition_log import Log

STATES: dict[State, Callable[[WriteWindow], object]] = {
    State.IDLE: lambda window: None,
    State.CONNECTING: lambda window: window.wanted(0),
    State.OPEN: lambda window: (window.wanted(0), window.connected(7, 0)),
    State.SETTLING: lambda window: (
        *(window.wanted(0), window.connected(7, 0), window.offered(one := NamedBatch("a", 1, 9), 0)),
        *(window.offered(NamedBatch("b", 1, 9), 0), window.answered(one, 1, NotLeaderError("no"), 0)),
    ),
    State.PAUSING: lambda window: (window.wanted(0), window.not_connected(NotLeaderError("no"), 0)),
    State.WAITING: lambda window: (
        *(window.wanted(0), window.connected(7, 0), window.offered(one := NamedBatch("a", 1, 9), 0)),
        *(window.answered(one, 1, QueueFullError("no", bound=1), 0), window.connected(None, 0)),
    ),
    State.DOUBTING: lambda window: (
        *(window.wanted(0), window.connected(7, 0), window.offered(NamedBatch("a", 1, 9), 0), window.tick(2)),
    ),
    State.CLOSED: lambda window: window.closed(),
}
EVENTS: dict[str, Callable[[WriteWindow], object]] = {
    "wanted": lambda window: window.wanted(3),
    "offered": lambda window: window.offered(NamedBatch("z", 1, 9), 3),
    "lost": lambda window: window.lost(3),
    "connected": lambda window: window.connected(None, 3),
    "not_connected": lambda window: window.not_connected(NotLeaderError("no"), 3),
    "granted": lambda window: window.granted(Room(1, 1000), 3),
    "not_granted": lambda window: window.not_granted(NotLeaderError("no"), 3),
    "timer": lambda window: window.timer(3),
    "confirmed": lambda window: window.confirmed(3),
    "replaced": lambda window: window.replaced(None, 3),
    "tick": lambda window: window.tick(3),
    "aborted": lambda window: window.aborted(OutcomeUnknownError("no"), 3),
    "closed": lambda window: window.closed(),
}


@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_a_state_does_not_take_is_an_error_with_its_story(state: State, event: str) -> None:
    window = WriteWindow("orders-0", WriteLimits(**DEFAULTS), Backoff(ClientSettings(), Random(1)))
    STATES[state](window)
    assert window.state is state
    if event in _TAKES[state]:
        EVENTS[event](window)
        return
    with pytest.raises(InvariantBrokenError, match=f"orders-0 cannot take '{event}' in state '{state.value}'") as error:
        EVENTS[event](window)
    story = error.value.details["story"]
    assert story[-1].startswith(f"{state.value} {event}")
    assert len(story) == 1 or story[0].startswith(("idle wanted", "idle closed"))


# -- any order of events -----------------------------------------------------------------

PASSING = (NotLeaderError, QueueFullError, DiskFullError, LeadershipLostError)


class World:
    """A window, its batches, a connection that may break, and the partition behind it."""

    def __init__(self, seed: int, numbering: Numbering, *, most_records: int | None, raises_full: bool) -> None:
        self.rng = Random(seed)
        self.now_s = 50.0
        self.healed = False
        self.numbering = numbering
        self.log = Log(PartitionSettings(max_backlog_records=most_records))
        self.admission = Admission(self.log.partition)
        self.records: list[int] = []
        limits = WriteLimits(
            max_batches=self.rng.choice([1, 2, 5, 9]),
            max_bytes=10**6,
            stall_s=1.0,
            delivery_timeout_ms=1000,
            numbering=numbering,
            raises_full=raises_full,
        )
        self.window = WriteWindow("orders-0", limits, Backoff(ClientSettings(), self.rng))
        if numbering is Numbering.GIVEN:
            self.window.begun(9, 4)
        self.wire: list[tuple[Outgoing, int, bytes]] = []  # sent and not there yet
        self.old_wire: list[tuple[Outgoing, int, bytes]] = []  # to a leader that was given up
        self.answers: list[tuple[Outgoing, int, Appended | RayQueueError]] = []
        self.stray: list[bytes] = []  # of broken connections; they may arrive still
        self.asked: Action | None = None
        self.room: list[Room | RayQueueError] = []
        self.offered: list[Outgoing] = []
        self.outcomes: dict[Outgoing, Appended | RayQueueError] = {}
        self.values: dict[Outgoing, list[int]] = {}
        self.ids = 0

    # what the driver does

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Transmit):
                self.wire.append((action.batch, action.attempt, action.batch.encoded))
            elif isinstance(action, Resolve):
                assert action.batch not in self.outcomes, "told twice"
                self.outcomes[action.batch] = action.outcome
            elif isinstance(action, Split):
                whole, first = self.values.pop(action.batch), len(action.pieces[0])
                self.values |= dict(zip(action.pieces, (whole[:first], whole[first:]), strict=True))
                at = self.offered.index(action.batch)
                self.offered[at : at + 1] = action.pieces
            elif isinstance(action, Connect | AskRoom | Doubt):
                assert self.asked is None
                self.asked = action
                if isinstance(action, AskRoom):
                    self.room = []
                    until_s = self.now_s + action.call.wait_ms / 1000
                    try:
                        self.admission.await_room(action.call, 1, until_s, self.room.append)
                    except RayQueueError as error:
                        self.room.append(error)

    def offer(self) -> None:
        count = self.rng.choice([1, 1, 2, 5])
        first = sum(map(len, self.values.values()))
        values = list(range(first, first + count))
        encoded = [b"%d" % value for value in values]
        deadline_s = self.now_s + self.rng.choice([0.1, 2.0, 30.0, 1000.0])
        batch: Outgoing
        if self.numbering in (Numbering.OWN, Numbering.GIVEN):
            batch = Batch(
                buffer=None,  # type: ignore[arg-type]  # a window does not ask for it
                outcome=Outcome("orders", 0, 1),
                lane=0,
                values=list(encoded),
                timestamps=[1] * count,
                opened_s=0.0,
                deadline_s=deadline_s,
                serial=0,
            )
        else:
            fixed = self.numbering is Numbering.FIXED
            payload = RecordBatch.encode(encoded, timestamps=1, producer_id=9 * fixed, sequence=first * fixed)
            batch = Outgoing(payload, count, deadline_s)
        self.values[batch] = values
        self.offered.append(batch)
        self.do(self.window.offered(batch, self.now_s))

    # what happens

    def write(self, payload: bytes) -> Appended:
        known = self.admission.admit(payload)
        answer = self.log.apply(payload) if known is None else known
        if isinstance(answer, RayQueueError):
            raise answer
        if not answer.duplicate:
            assert answer.base_offset == len(self.records)
            self.records += [int(value or b"") for value in RecordBatch.decode(payload).values()]
        return Appended(*answer)

    def arrive(self, wire: list[tuple[Outgoing, int, bytes]]) -> None:
        batch, attempt, payload = wire.pop(0)
        refusal = None if self.healed or self.rng.random() < 0.7 else self.rng.choice([*PASSING, InvalidInputError])
        answer: Appended | RayQueueError
        try:
            if refusal is not None:
                if refusal is LeadershipLostError and self.rng.random() < 0.5:
                    with suppress(RayQueueError):
                        self.write(payload)
                raise refusal("no")
            answer = self.write(payload)
        except RayQueueError as error:
            answer = error
        self.answers.append((batch, attempt, answer))

    def break_off(self) -> None:
        broken = [*self.wire, *self.answers]
        self.stray += [payload for _, _, payload in self.wire[: self.rng.randrange(len(self.wire) + 1)]]
        self.wire, self.answers = [], []
        for batch, attempt, _ in broken:
            self.do(self.window.answered(batch, attempt, OutcomeUnknownError("it broke"), self.now_s))
        if self.window.state is State.OPEN:
            self.do(self.window.lost(self.now_s))

    def reply(self) -> None:
        """To what the window has asked for."""
        asked, window, now_s = self.asked, self.window, self.now_s
        fails = not self.healed and self.rng.random() < 0.3
        if isinstance(asked, AskRoom):
            self.admission.advance(now_s)
            if not self.room and not fails:
                return
            room = NotLeaderError("no") if fails else self.room[0]
            self.asked = None
            self.do(window.not_granted(room, now_s) if isinstance(room, RayQueueError) else window.granted(room, now_s))
        elif isinstance(asked, Connect):
            self.asked = None
            if fails:
                self.do(window.not_connected(NotLeaderError("no"), now_s))
                return
            self.ids += asked.identity is not Identity.NONE
            self.do(window.connected(self.ids if asked.identity is not Identity.NONE else None, now_s))
        elif isinstance(asked, Doubt):
            self.asked = None
            if fails:
                self.old_wire, self.wire = self.wire, []
                self.do(window.replaced(None, now_s))
            else:
                self.do(window.confirmed(now_s))

    def consume(self) -> None:
        known = self.log.partition.position("g")
        done = 0 if known is None else known.offsets[0]
        to = min(self.log.partition.next_offset, done + 3)
        self.log.apply(commit_command("g", 1, {0: to}))

    def step(self) -> None:
        window, offers = self.window, not self.ended
        may: list[tuple[int, Callable[[], None]]] = [(2, self.pass_time)]
        if window.state is State.IDLE and offers:
            may.append((4, lambda: self.do(window.wanted(self.now_s))))
        if window.has_room and offers:
            may.append((6, self.offer))
        if self.asked is not None:
            may.append((4, self.reply))
        may += [(4, partial(self.arrive, wire)) for wire in (self.wire, self.old_wire) if wire]
        if self.answers:
            may.append((4, self.hear))
        if self.stray:
            may.append((2, self.go_astray))
        if not self.healed:
            may.append((1, self.break_off))
        weights, steps = zip(*may, strict=True)
        self.rng.choices(steps, weights)[0]()
        if window.wake_s is not None and self.now_s >= window.wake_s:
            self.do(window.timer(self.now_s))

    def hear(self) -> None:
        batch, attempt, answer = self.answers.pop(self.rng.randrange(len(self.answers)))
        self.do(self.window.answered(batch, attempt, answer, self.now_s))

    def go_astray(self) -> None:
        with suppress(RayQueueError):
            self.write(self.stray.pop(0))

    def pass_time(self) -> None:
        self.now_s += self.rng.choice([0.001, 0.01, 0.05, 0.3, 1.1])
        self.consume()
        self.do(self.window.tick(self.now_s))

    @property
    def ended(self) -> bool:
        """A writer of fixed batches ends with its first error, and everybody stops offering some time."""
        failed = any(isinstance(outcome, RayQueueError) for outcome in self.outcomes.values())
        return self.healed or len(self.offered) > 60 or (failed and self.numbering is not Numbering.OWN)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    numbering=st.sampled_from(Numbering),
    most_records=st.sampled_from([None, None, 6]),
    raises_full=st.booleans(),
)
def test_whatever_happens_each_batch_has_one_true_outcome(
    seed: int, numbering: Numbering, most_records: int | None, raises_full: bool
) -> None:
    raises_full = raises_full and numbering is Numbering.OWN
    world = World(seed, numbering, most_records=most_records, raises_full=raises_full)
    for _ in range(400):
        world.step()
    world.healed = True
    for _ in range(5000):
        if len(world.outcomes) == len(world.offered):
            break
        world.step()
    assert len(world.outcomes) == len(world.offered), "no progress though all is well"
    records = world.records
    if numbering is not Numbering.NONE:
        assert records == sorted(set(records)), "each once, and in order"
    offsets = []
    for batch in world.offered:
        outcome, values = world.outcomes[batch], world.values[batch]
        if isinstance(outcome, Appended):
            assert outcome.base_offset is not None
            assert records[outcome.base_offset : outcome.base_offset + len(values)] == values, "where it says"
            offsets.append(outcome.base_offset)
        elif not isinstance(outcome, OutcomeUnknownError) and numbering is Numbering.OWN:
            assert not set(values) & set(records), f"reported as not written: {outcome!r}"
    assert offsets == sorted(offsets), "the copies that count are in order"
