"""A Python process of Spark: what it does once, so that its many tasks are cheap.

Spark's daemon runs ``gc.collect()`` after every task. With Ray, Arrow and Spark
loaded that is a walk over some hundred thousand objects, none of which is ever
garbage, and was measured to take more of a worker's time than all tasks of a
streaming query. So what is there once the modules are loaded is taken out of it.
"""

from __future__ import annotations

import gc
import sys

from rayqueue.bridge import connection
from rayqueue.bridge.connection import Where
from rayqueue.client.handle import RayQueue

_DAEMON = "pyspark.daemon"

_modules_settled = 0


def connected(place: Where) -> RayQueue:
    """This process's connection, as ``rayqueue.bridge.connection.connected``; its objects are there to stay."""
    rq = connection.connected(place)
    settle()
    return rq


def settle() -> None:
    """In a worker of Spark: leave what is there out of all later collections.

    Only if modules were loaded since the last time, not at each task: what is garbage by then would stay too.
    """
    global _modules_settled
    if len(sys.modules) != _modules_settled and _in_worker():
        gc.freeze()
        _modules_settled = len(sys.modules)


def _in_worker() -> bool:
    """A driver's objects are none of our business."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _DAEMON
