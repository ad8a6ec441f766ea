"""The memory that received bytes wait in until a whole frame is there.

It grows with the bytes that have come, never with those that were announced:
whoever says that a frame has 64 MiB and sends eleven bytes costs eleven bytes,
rounded up. One piece of memory, so that a frame is one view, and it is at most
twice as large as what was in it at once.

After a large frame it stays large for a while: one is often followed by
another, and fresh memory costs more than copying into warm memory. ``release``
is for whoever knows better.
"""

from __future__ import annotations

_FIRST_BYTES = 4096
_RESTS_BEFORE_SHRINKING = 64


class ReceiveBuffer:
    """Read into ``space``, say how much by ``received``, look at ``unread``, ``take`` from its front.

    A view of ``unread`` is valid until the next call of ``space``.
    """

    __slots__ = ("_base_bytes", "_end", "_filled", "_memory", "_rests", "_start")

    def __init__(self, base_bytes: int) -> None:
        """``base_bytes``: how large it may become only to read more at a time."""
        self._base_bytes = base_bytes
        self._memory = memoryview(bytearray(min(base_bytes, _FIRST_BYTES)))
        self._start = 0
        self._end = 0
        self._filled = False
        self._rests = 0  # how often it was empty since it was last larger for a reason

    @property
    def size_bytes(self) -> int:
        return len(self._memory)

    @property
    def unread(self) -> memoryview:
        return self._memory[self._start : self._end]

    @property
    def unread_bytes(self) -> int:
        return self._end - self._start

    def space(self, frame_bytes: int) -> memoryview:
        """The memory for the next bytes, never empty. ``frame_bytes``: the length that the frame under way gives."""
        unread_bytes, size = self._end - self._start, len(self._memory)
        if not unread_bytes:
            self._start = self._end = 0
            self._rests += 1
            if self._filled and size < self._base_bytes:
                self._replace(min(2 * size, self._base_bytes))
            elif size > self._base_bytes and self._rests > _RESTS_BEFORE_SHRINKING:
                self._replace(self._base_bytes)
        elif unread_bytes == size:
            self._replace(min(2 * size, max(frame_bytes, self._base_bytes)))
        elif self._start + frame_bytes > size or self._end == size:
            self._memory[:unread_bytes] = self._memory[self._start : self._end]
            self._start, self._end = 0, unread_bytes
        if frame_bytes > self._base_bytes:
            self._rests = 0
        return self._memory[self._end :]

    def received(self, count: int) -> None:
        self._end += count
        self._filled = self._end == len(self._memory)

    def take(self, count: int) -> None:
        """These of ``unread`` are dealt with, or will be before the next ``space``."""
        self._start += count

    def release(self) -> None:
        """Nothing is expected to come soon: keep no more memory than at the beginning, or than there is in it."""
        if self._end == self._start and len(self._memory) > _FIRST_BYTES:
            self._replace(min(self._base_bytes, _FIRST_BYTES))

    def _replace(self, size: int) -> None:
        # A new one instead of a resize: the old memory may still be lent out.
        unread = self.unread
        fresh = memoryview(bytearray(size))
        fresh[: len(unread)] = unread
        self._memory, self._start, self._end = fresh, 0, len(unread)
        self._filled = False
