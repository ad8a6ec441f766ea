"""An autoscaling policy on the exact number of tasks: those that wait and those that run.

    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
    from rayqueue.serve import RayQueueAutoscalingPolicy

    AutoscalingConfig(
        min_replicas=0,
        max_replicas=10,
        target_ongoing_requests=5,
        policy=AutoscalingPolicy(
            policy_function=RayQueueAutoscalingPolicy, policy_kwargs={"queue_name": "images"}
        ),
    )

Serve calls the policy in its controller and must not wait for it: the queue is
asked beside it, one question at a time, and what was answered last counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from rayqueue.client.connect import connect
from rayqueue.client.queue.queue import JobQueue
from rayqueue.errors import RayQueueError

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_log = logging.getLogger(__name__)


class RayQueueAutoscalingPolicy:
    """``target_ongoing_requests`` of the deployment is how many tasks, waiting or running, one replica is meant for."""

    def __init__(self, queue_name: str, namespace: str | None = None, poll_interval_s: float = 1.0) -> None:
        self._queue_name = queue_name
        self._namespace = namespace
        self._poll_interval_s = poll_interval_s
        self._queue: JobQueue[Any, Any] | None = None
        self._length = 0
        self._asked_s = -poll_interval_s
        self._asking: asyncio.Task[None] | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        now_s = time.monotonic()
        if (self._asking is None or self._asking.done()) and now_s - self._asked_s >= self._poll_interval_s:
            self._asked_s = now_s
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return self.replicas(self._length, ctx), {"queue_length": self._length}

    @staticmethod
    def replicas(length: int, ctx: AutoscalingContext) -> float:
        """For so many tasks and what else is asked of the deployment."""
        work = ctx.total_num_requests + length
        if ctx.current_num_replicas == 0 or ctx.config is None:
            return 1.0 if work > 0 else 0.0
        return float(work / ctx.config.get_target_ongoing_requests())

    async def _ask(self) -> None:
        try:
            if self._queue is None:
                self._queue = await asyncio.to_thread(self._open)
            size = await self._queue.size_async()
            self._length = size.ready + size.leased
        except RayQueueError as error:
            _log.warning(
                "the length of queue %s is not known, %d is assumed: %s", self._queue_name, self._length, error
            )

    def _open(self) -> JobQueue[Any, Any]:
        return connect(namespace=self._namespace, create=False).queue(self._queue_name, create=False)
