"""Ray Serve's tasks on RayQueue, on a real Serve: the example application, failures, all operations of the adapter."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: scripts/setup installs the extra 'serve'")

from ray import serve
from ray.serve.task_consumer import instantiate_adapter_from_config

from examples import serve_tasks
from rayqueue.client.handle import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.serve import RayQueueTaskProcessorAdapter
from rayqueue.serve.config import decode_task
from rayqueue.testing import wait_for
from tests.integration.consumers import running_queue

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        for name in (serve_tasks.QUEUE, f"{serve_tasks.QUEUE}-failed", f"{serve_tasks.QUEUE}-unprocessable"):
            # One copy each, for a small machine: the adapter takes queues that are there as they are.
            queue.queue(name, replication=1, max_deliveries=3, retry_backoff_ms=50)
        yield queue


@pytest.fixture(scope="module")
def url(rq: RayQueue) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(serve_tasks.app)
    yield f"http://127.0.0.1:{port}/"
    serve.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def tasks(rq: RayQueue) -> RayQueueTaskProcessorAdapter:
    adapter: Any = instantiate_adapter_from_config(serve_tasks.CONFIG)
    return adapter  # type: ignore[no-any-return]


def status(tasks: RayQueueTaskProcessorAdapter, task_id: str, *wanted: str) -> Any:
    def there() -> Any:
        found = tasks.get_task_status_sync(task_id)
        return found if found.status in wanted else None

    return wait_for(there, f"task {task_id} to be {wanted}", PATIENCE_S)


def test_the_example_application(url: str) -> None:
    assert serve_tasks.main(url)["result"] == {"name": "cat-20.png", "width": 20, "height": 15}


def test_functions_bytes_and_celerys_options(url: str, tasks: RayQueueTaskProcessorAdapter) -> None:
    task = tasks.enqueue_task_sync("checksum", args=[b"\x01\x02"], countdown=0.2, expires=600)
    assert task.status == "PENDING"
    assert task.created_at is not None
    assert status(tasks, task.id, "SUCCESS").result == 3
    with pytest.raises(InvalidInputError, match="did you mean countdown"):
        tasks.enqueue_task_sync("checksum", args=[b"x"], count_down=1)


def test_what_always_fails_and_what_nobody_can_do(url: str, rq: RayQueue, tasks: RayQueueTaskProcessorAdapter) -> None:
    fails = tasks.enqueue_task_sync("checksum", args=[b""])
    unknown = tasks.enqueue_task_sync("no such task")
    found = status(tasks, fails.id, "FAILURE")
    assert found.result == "ValueError: there is nothing to sum up"
    assert "no such task" in status(tasks, unknown.id, "FAILURE").result
    (failed,) = rq.queue(f"{serve_tasks.QUEUE}-failed", create=False).get(timeout_ms=20_000)
    moved = decode_task(failed.value)
    assert moved.task == "checksum"
    assert moved.args[:4] == [fails.id, "there is nothing to sum up", "[b'']", "{}"]
    assert "in checksum" in moved.args[4]
    (aside,) = rq.queue(f"{serve_tasks.QUEUE}-unprocessable", create=False).get(timeout_ms=20_000)
    moved = decode_task(aside.value)
    assert (moved.task, moved.args[:2]) == ("no such task", ["no such task", unknown.id])
    with pytest.raises(InvalidInputError, match="args of a task"):
        tasks.enqueue_task_sync("checksum", args="not a list")
    dead = {str(each.id): each for each in rq.queue(serve_tasks.QUEUE, create=False).dead.list()}
    assert dead[fails.id].deliveries == 3  # max_retries=2, and the first


def test_cancelled_tasks_metrics_and_health(url: str, tasks: RayQueueTaskProcessorAdapter) -> None:
    async def main() -> None:
        task = await tasks.enqueue_task_async("resize", kwargs={"name": "x", "width": 1}, countdown=3600)
        assert (await tasks.get_task_status_async(task.id)).status == "PENDING"
        assert (await tasks.get_metrics_async())["delayed"] == 1
        assert await tasks.cancel_task_async(task.id)
        assert (await tasks.get_task_status_async(task.id)).status == "REVOKED"
        assert not await tasks.cancel_task_async(task.id)
        elsewhere: Any = await asyncio.to_thread(instantiate_adapter_from_config, serve_tasks.CONFIG)
        assert (await elsewhere.get_task_status_async(task.id)).status == "REVOKED"
        (told,) = await tasks.health_check_async()
        assert list(told.values()) == [{"ok": "pong"}]

    asyncio.run(main())
    assert tasks.get_metrics_sync()["delayed"] == 0


def test_a_consumer_of_its_own_stops_and_leaves_the_rest_to_others(rq: RayQueue) -> None:
    config = serve_tasks.CONFIG.model_copy(update={"queue_name": "own"})
    rq.queue("own", replication=1, retry_backoff_ms=0)
    adapter = RayQueueTaskProcessorAdapter(config)
    with pytest.raises(InvalidInputError, match="initialize"):
        adapter.enqueue_task_sync("slow")
    adapter.initialize(2)
    began: list[float] = []

    def slow(seconds: float) -> str:
        began.append(time.monotonic())
        time.sleep(seconds)
        return "done"

    adapter.register_task_handle(slow, "slow")
    short = adapter.enqueue_task_sync("slow", args=[0.1])
    adapter.start_consumer()
    adapter.start_consumer()
    status(adapter, short.id, "SUCCESS")
    long = adapter.enqueue_task_sync("slow", args=[5])
    wait_for(lambda: len(began) == 2, "the long task to begin", PATIENCE_S)
    assert adapter.get_task_status_sync(long.id).status == "STARTED"
    adapter.stop_consumer(timeout=0.2)
    wait_for(lambda: adapter.get_task_status_sync(long.id).status == "RETRY", "it to be given back", PATIENCE_S)
    adapter.stop_consumer()


def test_a_task_that_fails_while_it_is_asked_for_has_its_reason(rq: RayQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = rq.queue("between", replication=1)
    adapter = RayQueueTaskProcessorAdapter(serve_tasks.CONFIG.model_copy(update={"queue_name": "between"}))
    adapter.initialize(1)
    task = adapter.enqueue_task_sync("resize")
    ask = adapter._queue.ask_partition

    def fail() -> None:
        for job in queue.get(timeout_ms=5000):
            job.reject("it broke")

    async def ask_and_fail(*args: Any) -> Any:
        answer = await ask(*args)
        monkeypatch.setattr(adapter._queue, "ask_partition", ask)
        fail()
        return answer

    monkeypatch.setattr(adapter._queue, "ask_partition", ask_and_fail)
    found = adapter.get_task_status_sync(task.id)
    assert (found.status, found.result) == ("FAILURE", "it broke")
