"""The inbox of the engine's thread: work that other threads want done there.

Queued from any thread, taken by one. Whatever was let in is done, or whoever
asked is told that it will not be: also if the thread ends meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rayqueue.errors import ReplicaClosedError
from rayqueue.replica.answers import Answer, Deliver


class Inbox:
    def __init__(self, name: str, wake: Callable[[], None], deliver: Deliver) -> None:
        """``wake`` ends the thread's sleep; ``deliver`` gives the answers of what is refused."""
        self._name = name
        self._wake = wake
        self._deliver = deliver
        self._work: deque[tuple[Callable[[], None], Answer | None]] = deque()
        self._woken = False
        self.closed = False
        """Nothing more is let in."""
        self.ended = False
        """The thread has looked for the last time."""

    def put(self, work: Callable[[], None], refused: Answer | None) -> None:
        """``ReplicaClosedError``, raised or given to ``refused``, if it will not be done any more."""
        if self.closed:
            raise self._closed_error()
        self._work.append((work, refused))
        # One wake-up is enough for everything queued before the thread looks.
        if not self._woken:
            self._woken = True
            self._wake()
        if self.ended:
            self._refuse_all()

    def close(self) -> None:
        """Let nothing more in, and wake the thread so that it sees it."""
        self.closed = True
        self._wake()

    # -- the engine's thread -----------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._work)

    def awake(self) -> None:
        """The thread is about to look: what is put from now on must wake it again."""
        self._woken = False

    def take(self) -> Callable[[], None]:
        return self._work.popleft()[0]

    def end(self) -> None:
        self.ended = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        """Answer what nobody will take any more. From any thread: what is popped is answered once."""
        refused: list[Answer | None] = []
        with suppress(IndexError):
            while True:
                refused.append(self._work.popleft()[1])
        error = self._closed_error()
        self._deliver([(answer, error) for answer in refused if answer is not None])

    def _closed_error(self) -> ReplicaClosedError:
        return ReplicaClosedError(f"{self._name} is closed")
