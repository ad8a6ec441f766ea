"""Topics as a gateway knows them: looked up one by one, and again after a moment.

What was altered, or made anew, is so known within ``_LOOK_EVERY_S``. Who must not
be wrong about it for so long says ``fresh``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from rayqueue.client.handle import RayQueue
from rayqueue.errors import RayQueueError, UnknownTopicError
from rayqueue.protocol.topics import TopicInfo

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_MAX_KNOWN = 1000


class TopicCache:
    """Belongs to the gateway's event loop."""

    def __init__(self, rq: RayQueue, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._rq = rq
        self._clock_s = clock_s
        self._known: OrderedDict[str, tuple[TopicInfo, float]] = OrderedDict()

    async def get(self, name: str, *, fresh: bool = False) -> TopicInfo:
        """``UnknownTopicError``. While the coordinator is away a topic is as it was, unless it must be ``fresh``."""
        now_s = self._clock_s()
        info, looked_s = self._known.get(name, (None, 0.0))
        if info is not None and not fresh and now_s - looked_s < _LOOK_EVERY_S:
            return info
        try:
            info = await asyncio.wrap_future(self._rq.io.run(self._rq.routes.topic(name, refresh=True)))
        except UnknownTopicError:
            self._known.pop(name, None)
            raise UnknownTopicError(f"there is no topic {name!r}; create it first", topic=name) from None
        except RayQueueError as error:
            if info is None or fresh or not error.retriable:
                raise
            _log.info("topic %s is taken as it was, the coordinator does not answer: %s", name, error)
        self._known[name] = info, now_s
        self._known.move_to_end(name)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return info
