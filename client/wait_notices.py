"""Notices of long waits: what is waited for, after some seconds, and again while it lasts.

The lines are warnings of this module's logger, so that they are seen on
standard error where nobody has set up logging, and a program can show them
elsewhere. The commands show them beside their spinner.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rayqueue.client.io import IoThread

log = logging.getLogger(__name__)

FIRST_S = 5.0
AGAIN_S = 10.0

Reason = Callable[[], str | Awaitable[str]]


@contextmanager
def telling(reason: Reason) -> Iterator[None]:
    """Around a wait, of a thread or a coroutine. ``reason`` is asked in the I/O thread; if it takes a moment, as when
    it asks replicas how far they are, it is a coroutine. Nothing is told any more when the block has ended.
    """
    notices = _Notices(reason)
    telling = IoThread.shared().run(notices.tell())
    try:
        yield
    finally:
        notices.end()
        telling.cancel()


class _Notices:
    def __init__(self, reason: Reason) -> None:
        self._reason = reason
        self._lock = threading.Lock()
        self._over = False

    async def tell(self) -> None:
        began_s, wait_s = time.monotonic(), FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            try:
                text = self._reason()
                if not isinstance(text, str):
                    text = await text
            except Exception as error:  # noqa: BLE001  # the wait itself says what failed
                text = f"still waiting, without knowing for what: {error}"
            with self._lock:
                if not self._over:
                    log.warning("%s (for %.0f s)", text, time.monotonic() - began_s)
            wait_s = AGAIN_S

    def end(self) -> None:
        with self._lock:
            self._over = True
