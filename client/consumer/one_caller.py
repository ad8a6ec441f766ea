"""A guard of what one caller uses at a time, callers being told apart by thread and asyncio task."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from rayqueue.client.forks import forked
from rayqueue.client.twins import beside
from rayqueue.errors import InvalidInputError


class OneCaller:
    """The same caller may enter again, as a listener does that is called from a poll."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._free = threading.Condition()
        self._caller: tuple[int, Any] | None = None
        self._depth = 0

    @property
    def is_inside(self) -> bool:
        """The caller is in a call already: a listener of its poll, or a signal handler that interrupts it."""
        return self._caller == _this_caller()

    def check_process(self) -> None:
        """``ForkedError`` in a forked child, before any lock: another thread of the parent may have held it."""
        if self._pid != os.getpid():
            raise forked(f"this {self._what}")

    def enter(self) -> None:
        """``InvalidInputError`` if somebody else is inside."""
        self.check_process()
        caller = _this_caller()
        with self._free:
            if self._caller not in (None, caller):
                raise InvalidInputError(
                    f"a {self._what} is used by one thread, or one task, at a time: another one is in a call of it"
                )
            self._caller = caller
            self._depth += 1

    def leave(self) -> None:
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._caller = None
                self._free.notify_all()

    async def enter_when_free(self, timeout_s: float) -> None:
        """Within a body of ``rayqueue.client.twins``. ``InvalidInputError`` if somebody else stays inside so long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.enter()
            except InvalidInputError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
            await beside(self._wait_until_free, left_s)

    def _wait_until_free(self, timeout_s: float) -> None:
        with self._free:
            self._free.wait_for(lambda: self._caller is None, timeout_s)


def _this_caller() -> tuple[int, Any]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task
