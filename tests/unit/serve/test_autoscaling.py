"""The autoscaling policy, as Serve's controller calls it: in a loop, with a real context, and never waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: scripts/setup installs the extra 'serve'")


from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from rayqueue.errors import RayQueueError, UnknownTopicError
from rayqueue.serve import RayQueueAutoscalingPolicy, autoscaling
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        monkeypatch.setattr(autoscaling, "connect", lambda **_: made)
        yield made


def context(replicas: int, requests: float = 0.0, *, target: float = 5, config: bool = True) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID("d", "a"),
        deployment_name="d",
        app_name="a",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=requests,
        total_queued_requests=0,
        aggregated_metrics={},
        raw_metrics={},
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(min_replicas=0, max_replicas=10, target_ongoing_requests=target) if config else None,
    )


def policy(poll_interval_s: float = 0.0) -> RayQueueAutoscalingPolicy:
    return RayQueueAutoscalingPolicy("images", poll_interval_s=poll_interval_s)


async def decided(asked: RayQueueAutoscalingPolicy, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """What it says once it has an answer."""
    asked(ctx)
    assert asked._asking is not None
    await asyncio.wait_for(asked._asking, 20)
    return asked(ctx)


@pytest.mark.parametrize(
    ("length", "requests", "replicas", "expected"),
    [
        (0, 0, 0, 0.0),
        (1, 0, 0, 1.0),
        (500, 0, 0, 1.0),
        (0, 2, 0, 1.0),
        (0, 0, 3, 0.0),
        (10, 0, 1, 2.0),
        (10, 5, 4, 3.0),
    ],
    ids=["nothing", "first task", "many from none", "a request", "down to none", "double", "tasks and requests"],
)
def test_decisions(length: int, requests: float, replicas: int, expected: float) -> None:
    assert RayQueueAutoscalingPolicy.replicas(length, context(replicas, requests)) == expected


def test_without_a_configuration_it_only_wakes_up() -> None:
    assert RayQueueAutoscalingPolicy.replicas(7, context(3, config=False)) == 1.0


def test_it_counts_what_waits_and_what_runs_and_not_what_is_delayed(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("images")
    queue.put_many([b"x"] * 9)
    queue.put(b"later", delay_ms=3_600_000)
    queue.put(b"y")
    jobs = queue.get(4, timeout_ms=5_000)
    assert len(jobs) == 4
    assert asyncio.run(decided(policy(), context(1))) == (2.0, {"queue_length": 10})


def test_it_wakes_a_deployment_that_has_no_replica(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("images")

    async def main() -> None:
        asked = policy()
        assert await decided(asked, context(0)) == (0.0, {"queue_length": 0})
        await queue.put_async(b"x")
        assert await decided(asked, context(0)) == (1.0, {"queue_length": 1})

    asyncio.run(main())


def test_a_question_that_fails_leaves_what_was_answered_last(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = rq.queue("images")
    queue.put_many([b"x"] * 10)

    async def main() -> None:
        asked = policy()
        assert await decided(asked, context(1)) == (2.0, {"queue_length": 10})
        opened = asked._queue
        assert opened is not None
        size_async = opened.size_async

        async def fails() -> Any:
            raise RayQueueError("nobody leads")

        monkeypatch.setattr(opened, "size_async", fails)
        assert await decided(asked, context(1)) == (2.0, {"queue_length": 10})
        assert "the length of queue images is not known, 10 is assumed: nobody leads" in caplog.text
        monkeypatch.setattr(opened, "size_async", size_async)
        await queue.put_async(b"y")
        assert (await decided(asked, context(1)))[1] == {"queue_length": 11}

    asyncio.run(main())


def test_a_queue_that_is_not_there_yet_is_looked_for_again(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        asked = policy()
        assert await decided(asked, context(0)) == (0.0, {"queue_length": 0})
        await asyncio.to_thread(lambda: rq.queue("images").put(b"x"))
        assert await decided(asked, context(0)) == (1.0, {"queue_length": 1})

    asyncio.run(main())


def test_serve_makes_it_of_its_configuration() -> None:
    told = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=RayQueueAutoscalingPolicy, policy_kwargs={"queue_name": "images"}
    )
    config = AutoscalingConfig(min_replicas=0, max_replicas=3, policy=told)
    made: Any = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert (made._queue_name, made._poll_interval_s) == ("images", 1.0)
    assert made.replicas(5, context(0)) == 1.0


def test_serve_never_waits_and_one_question_is_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = policy()
    opened: list[int] = []
    go_on = threading.Event()

    def open_later() -> Any:
        opened.append(1)
        go_on.wait(20)
        raise UnknownTopicError("no")

    monkeypatch.setattr(asked, "_open", open_later)

    async def main() -> None:
        assert [asked(context(0)) for _ in range(5)] == [(0.0, {"queue_length": 0})] * 5
        await asyncio.to_thread(wait_for, lambda: bool(opened), "the question")
        asked(context(0))
        go_on.set()
        assert asked._asking is not None
        await asyncio.wait_for(asked._asking, 20)
        assert len(opened) == 1

    asyncio.run(main())


def test_it_asks_no_more_often_than_it_is_told_to(rq: memory.MemoryQueue) -> None:
    rq.queue("images")

    async def main() -> None:
        asked = policy(poll_interval_s=3_600.0)
        asked(context(0))
        first = asked._asking
        assert first is not None
        await asyncio.wait_for(first, 20)
        asked(context(0))
        assert asked._asking is first

    asyncio.run(main())
