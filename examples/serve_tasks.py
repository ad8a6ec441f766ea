"""Asynchronous tasks of Ray Serve on RayQueue: an HTTP front, workers that scale, and nothing else to run.

    pip install 'rayqueue[serve]'
    python examples/serve_tasks.py

``POST /`` enqueues a task and answers with its id at once; ``GET /?id=...`` tells
its status and result. A task whose handler fails is tried again; one that
always fails ends in the queue ``thumbnails-failed``.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler
from starlette.requests import Request

from rayqueue.serve import RayQueueAdapterConfig, RayQueueAutoscalingPolicy

QUEUE = "thumbnails"

CONFIG = TaskProcessorConfig(
    queue_name=QUEUE,
    adapter="rayqueue.serve.RayQueueTaskProcessorAdapter",
    adapter_config=RayQueueAdapterConfig(retry_backoff_ms=100),
    max_retries=2,
    failed_task_queue_name=f"{QUEUE}-failed",
    unprocessable_task_queue_name=f"{QUEUE}-unprocessable",
)


@serve.deployment(
    max_ongoing_requests=4,
    ray_actor_options={"num_cpus": 0},
    autoscaling_config=AutoscalingConfig(
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=4,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=RayQueueAutoscalingPolicy, policy_kwargs={"queue_name": QUEUE}
        ),
    ),
)
@task_consumer(task_processor_config=CONFIG)
class Thumbnails:
    """The workers."""

    @task_handler(name="resize")
    async def resize(self, name: str, width: int) -> dict[str, Any]:
        """A coroutine: several at a time in each replica."""
        await asyncio.sleep(0.01)
        return {"name": name, "width": width, "height": width * 3 // 4}

    @task_handler(name="checksum")
    def checksum(self, data: bytes) -> int:
        """A function: in a thread."""
        if not data:
            raise ValueError("there is nothing to sum up")
        return sum(data)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    """The HTTP side. ``workers`` keeps the deployment of the workers in the same application."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self._tasks = instantiate_adapter_from_config(CONFIG)

    async def __call__(self, request: Request) -> dict[str, Any]:
        if request.method == "POST":
            asked = await request.json()
            task = await self._tasks.enqueue_task_async(asked["task"], kwargs=asked["arguments"])
        else:
            task = await self._tasks.get_task_status_async(request.query_params["id"])
        return {"id": task.id, "status": task.status, "result": task.result}


app = Front.bind(Thumbnails.bind())  # type: ignore[attr-defined]


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def main(url: str = "http://127.0.0.1:8000/") -> dict[str, Any]:
    """Enqueue some, and wait for the last."""
    ids = [
        ask(url, {"task": "resize", "arguments": {"name": f"cat-{number}.png", "width": number}})["id"]
        for number in range(1, 21)
    ]
    for _ in range(600):
        told = [ask(f"{url}?id={each}") for each in ids]
        if all(each["status"] == "SUCCESS" for each in told):
            print(f"{len(told)} thumbnails; the last: {told[-1]['result']}")
            return told[-1]
        time.sleep(0.1)
    raise SystemExit(f"not done in time: {told}")


if __name__ == "__main__":
    serve.run(app)
    main()
    serve.shutdown()  # type: ignore[no-untyped-call]
