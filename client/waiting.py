"""Long waits say what they wait for: after some seconds, and again while they last.

The lines are warnings of this module's logger, so that they are seen on
standard error where nobody has set up logging, and a program can show them
elsewhere. The commands show them beside their spinner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

FIRST_S = 5.0
AGAIN_S = 10.0


@contextmanager
def telling(reason: Callable[[], str]) -> Iterator[None]:
    """Around a wait. ``reason`` is asked in a thread of its own, which has ended when the block has; it may take a
    moment, as if it asks replicas how far they are.
    """
    began_s, over = time.monotonic(), threading.Event()

    def tell() -> None:
        wait_s = FIRST_S
        while not over.wait(wait_s):
            try:
                text = reason()
            except Exception as error:  # noqa: BLE001  # the wait itself says what failed
                text = f"still waiting, without knowing for what: {error}"
            if not over.is_set():
                log.warning("%s (for %.0f s)", text, time.monotonic() - began_s)
            wait_s = AGAIN_S

    teller = threading.Thread(target=tell, name="rayqueue waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
