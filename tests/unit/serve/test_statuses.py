"""Statuses of tasks, as the adapter tells them, on the queue in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: scripts/setup installs the extra 'serve'")

from ray.serve.schema import TaskProcessorConfig

from rayqueue.serve import RayQueueTaskProcessorAdapter, config
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        monkeypatch.setattr(config, "connect", lambda **_: made)
        yield made


def test_a_task_that_has_ended_is_not_pending_once_its_result_is_gone(rq: memory.MemoryQueue) -> None:
    tasks = RayQueueTaskProcessorAdapter(
        TaskProcessorConfig(
            queue_name="tasks",
            adapter="rayqueue.serve.RayQueueTaskProcessorAdapter",
            adapter_config={"result_ttl_ms": 1, "max_results_bytes": 2_000_000},
        )
    )
    tasks.initialize()
    (info,) = [each for each in rq.topics() if each.name == "tasks"]
    assert info.settings.max_results_bytes == 2_000_000
    task = tasks.enqueue_task_sync("t")
    assert tasks.get_task_status_sync(task.id).status == "PENDING"
    queue = rq.queue("tasks")
    (job,) = queue.get(timeout_ms=5_000)
    job.ack()
    wait_for(lambda: tasks.get_task_status_sync(task.id).status == "GONE", "its result to be gone")
    assert tasks.get_task_status_sync("0-99").status == "PENDING"
