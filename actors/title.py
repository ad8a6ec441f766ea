"""The title of a replica's process: ``ray::orders-3 r2 leader`` in ``ps``, ``top`` and the Ray dashboard's workers.

Ray titles a process after the call that began last, so the title is set again
about once a second. It names the role and nothing that changes more often: Ray
tags its figures of memory and CPU with the title, and each new one would leave
a series behind.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from rayqueue.actors._ray import set_process_title
from rayqueue.actors.names import readable
from rayqueue.replica.replica import Replica
from rayqueue.replica.status import Status

EVERY_S = 1.0


def title_of(status: Status) -> str:
    trouble = " damaged" if status.damaged is not None else " disk full" if status.read_only else ""
    return f"ray::{readable(status.group_id, status.replica_id)} {status.role}{trouble}"


async def keep_title(replica: Replica[Any]) -> NoReturn:
    """Until it is cancelled."""
    while True:
        set_process_title(title_of(replica.status))
        await asyncio.sleep(EVERY_S)
