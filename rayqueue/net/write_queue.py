"""The batches of a writer in their order: those in the window, numbered, and those held for the next epoch.

Owns the numbers: producer id, epoch and sequences. It knows nothing of leaders and
answers; ``rayqueue.net.write_window`` says what became of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from rayqueue.net.outgoing import Outgoing
from rayqueue.net.write_actions import Numbering, WriteLimits


class WriteQueue:
    def __init__(self, limits: WriteLimits) -> None:
        self.window: deque[Outgoing] = deque()
        self.producer_id: int | None = None if limits.numbering is Numbering.OWN else 0
        self.new_epoch = False
        """There is a hole in the numbers: nothing is added until ``begin_epoch``."""
        self._limits = limits
        self._held: deque[Outgoing] = deque()
        self._size_bytes = 0
        self._epoch = 0
        self._sequence = 0

    def __len__(self) -> int:
        return len(self.window) + len(self._held)

    def __iter__(self) -> Iterator[Outgoing]:
        yield from self.window
        yield from self._held

    @property
    def head(self) -> Outgoing | None:
        return self.window[0] if self.window else None

    @property
    def numbered(self) -> int:
        """Records that were numbered since the epoch began."""
        return self._sequence

    @property
    def has_room(self) -> bool:
        return len(self.window) < self._limits.max_batches and self._size_bytes < self._limits.max_bytes

    def add(self, batch: Outgoing) -> None:
        """Number it."""
        assert self.producer_id is not None  # noqa: S101  # connected before
        batch.stamp(self.producer_id, self._sequence, self._epoch)
        if self._limits.numbering in (Numbering.OWN, Numbering.GIVEN):
            self._sequence += len(batch)
        self.window.append(batch)
        self._size_bytes += batch.size_bytes

    def pop_settled(self) -> None:
        """From the head of the window."""
        window = self.window
        while window and window[0].settled:
            self._size_bytes -= window.popleft().size_bytes

    def take_from(self, batch: Outgoing) -> list[Outgoing]:
        """This one and all behind it, out of the window."""
        window = list(self.window)
        at = window.index(batch)
        self._put_back(window[:at])
        return window[at:]

    def split(self, batch: Outgoing, pieces: Iterable[Outgoing]) -> None:
        """These in its place."""
        _, *behind = self.take_from(batch)
        self._put_back([*self.window, *pieces, *behind])

    def hold(self, batches: list[Outgoing]) -> None:
        """These are surely not written, and go with a new epoch."""
        for batch in batches:
            batch.attempt = 0  # an attempt under way can only come back with the gap before it
            batch.maybe_written = False
        self._held.extendleft(reversed(batches))
        self.new_epoch = self._limits.numbering is not Numbering.GIVEN

    def tidy(self) -> None:
        """Drop what is settled, and what is reported and cannot be waited for. Nothing is under way.

        What may be written stays for as long as somebody waits for one of the same: nothing of it can be numbered
        again. Behind the first that is surely not written nothing is, so that these may be. But as long as they keep
        their numbers, an attempt whose outcome is unknown may arrive once the first one is written.
        """
        window = [batch for batch in self.window if not batch.settled]
        sure_from = next((at for at, batch in enumerate(window) if not batch.maybe_written), len(window))
        unsure, sure = window[:sure_from], window[sure_from:]
        if all(batch.reported for batch in unsure):
            unsure = []
        left = [batch for batch in sure if not batch.reported]
        if len(unsure) + len(left) < len(window):
            window = unsure
            self.hold(left)
        for batch in window:
            batch.answer = None  # one before it was not acknowledged: another copy will count
        self._put_back(window)
        self._held = deque(batch for batch in self._held if not batch.reported)

    def begin(self, producer_id: int, epoch: int) -> None:
        """Count all that is added from now on to this transaction. The queue is empty."""
        assert not len(self)  # noqa: S101  # the one before has ended
        self.producer_id, self._epoch, self._sequence = producer_id, epoch, 0

    def begin_epoch(self) -> None:
        """For what is held. The window is empty."""
        held, self._held = self._held, deque()
        self._epoch += 1
        self._sequence = 0
        self.new_epoch = False
        for batch in held:
            self.add(batch)

    def clear(self) -> list[Outgoing]:
        """Everything, out of here. What was numbered may be written, so the next has a new epoch."""
        every = list(self)
        self._put_back(())
        self._held.clear()
        if self._limits.numbering is not Numbering.GIVEN:
            self.new_epoch = self.new_epoch or self._sequence > 0
        return every

    def _put_back(self, batches: Iterable[Outgoing]) -> None:
        self.window = deque(batches)
        self._size_bytes = sum(batch.size_bytes for batch in self.window)
