"""Forks of a process that is connected: the child is refused, and the parent notices nothing.

A forked child has none of its parent's threads, so nobody would send what it
gives to a producer; it has copies of its parent's sockets and locks, which it
must not touch; and Ray works in no child of the process that it was started in
(``ray.shutdown()`` never returns there, ``ray.init()`` refuses). So whatever
was made before the fork raises ``ForkedError`` at once in the child, closing it
does nothing, and so does the end of the child.

Each module of the client mends its own globals by ``os.register_at_fork``; this
one has what they share.
"""

from __future__ import annotations

import atexit
import ctypes

from rayqueue.errors import ForkedError


def forked(what: str) -> ForkedError:
    """``what`` was made before this process was forked."""
    return ForkedError(
        f"{what} belongs to the process from which this one was forked, and stays there, as Ray does. Start the child "
        'by spawn (multiprocessing.get_context("spawn"), subprocess) or as a Ray task, or fork before anything is '
        "connected; then make a new connection in the child: rayqueue.connect()"
    )


def leave_ray_alone() -> None:
    """In a child of a process that has Ray: what Ray does at the end of a process, by ``atexit``, when its objects are
    collected and when C++ takes down its statics, waits for threads that the child does not have, or crashes.
    """
    import ray

    from rayqueue.actors import _ray

    atexit.unregister(ray.shutdown)
    _ray.keep_forever()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc. Called by exit() with the status, when Python has finished
        libc.on_exit(libc._exit, None)
