"""A forked child for tests: it runs one function, and must come to its end by itself."""

from __future__ import annotations

import faulthandler
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_PATIENCE_S = 20.0


def in_child(work: Callable[[], None]) -> None:
    """Fork, run it there, and fail unless it returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
            work()
            code = 0
        except BaseException:  # noqa: BLE001  # nothing of the child may get into the parent's test run
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed, or hung: its output says where"


@contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Another thread holds these, as it may at any fork."""
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        yield
    finally:
        leave.set()
        holder.join()
