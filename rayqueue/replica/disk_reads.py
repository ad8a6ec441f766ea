"""Reads of a replica's disk, by a few threads beside the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rayqueue.errors import QueueFullError, RayQueueError, ReplicaClosedError, StorageError

_log = logging.getLogger(__name__)


class DiskReads:
    """``run`` brings what was read back to the engine's thread. The rest is called there."""

    def __init__(self, run: Callable[[Callable[[], None]], None], threads: int, most: int) -> None:
        """``most``: so many may be under way."""
        self._run = run
        self._most = most
        self._under_way = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="client disk")

    def read(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """``work`` is done in another thread; ``done`` gets its result, or the error, on this one."""
        if self._under_way >= self._most:
            done(QueueFullError(f"{self._under_way} reads wait for the disk already, which is the limit"))
            return
        self._under_way += 1

        def finish(result: Any) -> None:
            self._under_way -= 1
            done(result)

        def read() -> None:
            result: Any
            try:
                result = work()
            except RayQueueError as error:
                result = error
            except Exception as error:  # noqa: BLE001  # whoever waits must learn it
                _log.exception("a read failed")
                result = StorageError(f"the disk could not be read: {error}")
            with suppress(ReplicaClosedError):  # with the replica all connections end
                self._run(lambda: finish(result))

        self._pool.submit(read)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
