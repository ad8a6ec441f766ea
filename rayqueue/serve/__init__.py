"""Ray Serve's asynchronous tasks on RayQueue: ``@task_consumer`` and ``@task_handler`` without Celery and its broker.

    from ray.serve.schema import TaskProcessorConfig
    from ray.serve.task_consumer import task_consumer, task_handler
    from rayqueue.serve import RayQueueAdapterConfig

    config = TaskProcessorConfig(
        queue_name="images",
        adapter="rayqueue.serve.RayQueueTaskProcessorAdapter",
        adapter_config=RayQueueAdapterConfig(),
        max_retries=3,
    )

Needs ``rayqueue[serve]``. See docs/jobs.md.
"""

from __future__ import annotations

from rayqueue.serve.adapter import RayQueueTaskProcessorAdapter
from rayqueue.serve.autoscaling import RayQueueAutoscalingPolicy
from rayqueue.serve.config import RayQueueAdapterConfig

__all__ = ["RayQueueAdapterConfig", "RayQueueAutoscalingPolicy", "RayQueueTaskProcessorAdapter"]
