"""Transcripts of a writer's window: events in, actions out, as text that can be read in review.

A line that begins at the margin is an event; the indented lines after it are what
the window made of it: actions, ``= state`` when that changes, ``~ wake`` when the
time changes at which it wants to be woken. ``after 20ms`` lets time pass and is no
event. A line that begins with ``#`` is a remark.
"""

from __future__ import annotations

from random import Random
from typing import Any

from rayqueue import errors
from rayqueue.config import ClientSettings
from rayqueue.errors import RayQueueError
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
from rayqueue.net.write_window import WriteWindow
from rayqueue.protocol.calls import Room
from rayqueue.protocol.data import Appended
from rayqueue.records import BatchHeader, RecordBatch

DEFAULTS: dict[str, Any] = {"max_batches": 5, "max_bytes": 10**6, "stall_s": 1.0, "delivery_timeout_ms": 10_000}
START_S = 100.0


class NamedBatch(Outgoing):
    """Records of one byte each. The writer numbers and cuts it; or it comes numbered, and stays as it is."""

    __slots__ = ("name",)

    def __init__(self, name: str, count: int, deadline_s: float) -> None:
        super().__init__(None, count, deadline_s)
        self.name = name
        self.size_bytes = count

    def stamp(self, producer_id: int, sequence: int, epoch: int) -> None:
        self.sequence = sequence
        self.payload = RecordBatch.encode(
            [b"x"] * self.count, timestamps=1, producer_id=producer_id, sequence=sequence, epoch=epoch
        )

    def least(self) -> tuple[int, int]:
        return 1, 1

    def cut(self, records: int, size_bytes: int) -> tuple[NamedBatch, NamedBatch] | None:
        if not 0 < records < self.count:
            return None
        header = BatchHeader.parse(self.encoded)
        pieces = (
            NamedBatch(self.name + "1", records, self.deadline_s),
            NamedBatch(self.name + "2", self.count - records, self.deadline_s),
        )
        for piece, sequence in zip(pieces, (header.sequence, header.sequence + records), strict=True):
            piece.stamp(header.producer_id, sequence, header.epoch)
            piece.maybe_written = self.maybe_written
        return pieces


class FixedBatch(NamedBatch):
    __slots__ = ("_first",)

    def __init__(self, name: str, count: int, deadline_s: float, producer_id: int, first: int) -> None:
        super().__init__(name, count, deadline_s)
        super().stamp(producer_id, first, 0)

    def stamp(self, producer_id: int, sequence: int, epoch: int) -> None:
        pass

    def least(self) -> tuple[int, int]:
        return Outgoing.least(self)

    def cut(self, records: int, size_bytes: int) -> None:
        return None


class Transcript:
    """One window, and what was said to it and by it."""

    def __init__(self) -> None:
        self._limits: dict[str, Any] = dict(DEFAULTS)
        self._window: WriteWindow | None = None
        self._now_s = START_S
        self._batches: dict[str, NamedBatch] = {}
        self._state = State.IDLE
        self._wake_s: float | None = None
        self._following = 0
        self.resolved: list[str] = []

    def play(self, text: str) -> str:
        """The same text, with what the window makes of its events now."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("  "):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                lines += ["  " + each for each in self._take(line.split())]
        return "\n".join(lines) + "\n"

    def _take(self, words: list[str]) -> list[str]:
        name, *rest = words
        if name == "limits":
            for each in rest:
                key, _, value = each.partition("=")
                self._limits[key] = Numbering(value) if key == "numbering" else float(value)
            return []
        if name == "after":
            self._now_s = round(self._now_s + _duration_s(rest[0]), 6)
            return []
        if self._window is None:
            client = ClientSettings(retry_min_ms=10, retry_max_ms=100)
            self._window = WriteWindow("orders-0", WriteLimits(**self._limits), Backoff(client, Random(7)))
        actions = self._event(self._window, name, rest)
        return [self._text(action) for action in actions] + self._changes(self._window)

    def _event(self, window: WriteWindow, name: str, rest: list[str]) -> list[Action]:
        now_s = self._now_s
        if name == "offered":
            return window.offered(self._batch(*rest), now_s)
        if name == "answered":
            batch, _, attempt = rest[0].partition("#")
            return window.answered(self._batches[batch], int(attempt), _answer(rest[1:]), now_s)
        if name == "connected":
            return window.connected(int(rest[0]) if rest else None, now_s)
        if name == "granted":
            return window.granted(Room(int(rest[0]), 10**6), now_s)
        if name == "replaced":
            return window.replaced(_error(rest) if rest else None, now_s)
        if name in ("not_connected", "not_granted", "aborted"):
            happened: list[Action] = getattr(window, name)(_error(rest), now_s)
            return happened
        if name == "tick":
            return window.tick(now_s, [self._batch(*each.split(":")) for each in rest])
        if name == "closed":
            return window.closed()
        if name == "timer":
            assert now_s >= (window.wake_s or float("inf")), "nobody has asked for it yet"
        happened = getattr(window, name)(now_s)
        return happened  # noqa: RET504  # typed above

    def _batch(self, name: str, count: str, patience: str = "10s") -> NamedBatch:
        deadline_s = self._now_s + _duration_s(patience)
        if self._limits.get("numbering", Numbering.OWN) is Numbering.OWN:
            batch = NamedBatch(name, int(count), deadline_s)
        else:
            numbered = self._limits["numbering"] is Numbering.FIXED
            batch = FixedBatch(name, int(count), deadline_s, 77 if numbered else 0, self._following * numbered)
            self._following += int(count)
        self._batches[name] = batch
        return batch

    def _changes(self, window: WriteWindow) -> list[str]:
        told = []
        if window.state is not self._state:
            self._state = window.state
            told.append(f"= {window.state.value}")
        if window.wake_s != self._wake_s:
            self._wake_s = window.wake_s
            if window.wake_s is not None:
                told.append(f"~ wake after {(window.wake_s - self._now_s) * 1000:.4g}ms")
        return told

    def _text(self, action: Action) -> str:
        match action:
            case Transmit(batch, attempt):
                header = BatchHeader.parse(batch.encoded)
                last = header.sequence + header.count - 1
                numbers = f"{header.producer_id}/{header.epoch} sequence {header.sequence}-{last}"
                return f"transmit {_name(batch)}#{attempt}: producer {numbers}"
            case Resolve(batch, outcome):
                self.resolved.append(_name(batch))
                if isinstance(outcome, RayQueueError):
                    return f"resolve {_name(batch)}: {type(outcome).__name__}: {outcome}"
                return f"resolve {_name(batch)}: offset {outcome.base_offset}"
            case Split(batch, pieces):
                self._batches |= {_name(each): each for each in pieces if isinstance(each, NamedBatch)}
                return f"split {_name(batch)} into " + " and ".join(f"{_name(each)} ({len(each)})" for each in pieces)
            case FailWaiting(error):
                return f"fail what waits: {type(error).__name__}: {error}"
            case Connect(stale, identity):
                doubtful = f"; {type(stale).__name__}: {stale}" if stale is not None else ""
                wanted = f" with {identity.value} producer id" if identity is not Identity.NONE else ""
                return f"connect{wanted}{doubtful}"
            case AskRoom(call):
                least = f"at least {call.least_records}"
                return f"ask for room for {call.records} records, {least}, within {call.wait_ms} ms"
            case Doubt(error):
                return f"doubt: {error}"


def _name(batch: Outgoing) -> str:
    assert isinstance(batch, NamedBatch)
    return batch.name


def _answer(words: list[str]) -> Appended | RayQueueError:
    if words[0] in ("ok", "duplicate"):
        return Appended(int(words[1]), 1, words[0] == "duplicate")
    return _error(words)


def _error(words: list[str]) -> RayQueueError:
    details = dict(each.split("=") for each in words[1:])
    made: RayQueueError = getattr(errors, words[0])("no", **{key: _number(value) for key, value in details.items()})
    return made


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _duration_s(text: str) -> float:
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text[:-1])
