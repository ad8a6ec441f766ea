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
    lock, over = threading.Lock(), False

    async def tell() -> None:
        began_s, wait_s = time.monotonic(), FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            try:
                text = reason()
                if not isinstance(text, str):
                    text = await text
            except Exception as error:  # noqa: BLE001  # the wait itself says what failed
                text = f"still waiting, without knowing for what: {error}"
            with lock:
                if not over:
                    log.warning("%s (for %.0f s)", text, time.monotonic() - began_s)
            wait_s = AGAIN_S

    telling = IoThread.shared().run(tell())
    try:
        yield
    finally:
        with lock:
            over = True
        telling.cancel()
