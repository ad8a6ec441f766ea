"""Transactional ids of read-process-write loops: given back, and told of when there is no room for another one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rayqueue import RayQueue
from rayqueue.config import Settings
from rayqueue.errors import QueueFullError, TooManyTransactionsError
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[RayQueue]:
    settings = Settings()
    updates: dict[str, Any] = {
        "cluster": settings.cluster.model_copy(update={"join_window_ms": 0, "max_transactional_ids": 2}),
        "client": settings.client.model_copy(update={"call_timeout_ms": 1_000, "retry_max_ms": 50}),
        "producer": settings.producer.model_copy(update={"delivery_timeout_ms": 300}),
    }
    with memory.connect(settings=settings.model_copy(update=updates)) as queue:
        for name in ("orders", "invoices"):
            queue.create_topic(name)
        yield queue


def ids(rq: RayQueue) -> list[str]:
    return [each.transactional_id for each in rq.transactions()]


def process(rq: RayQueue, **options: Any) -> Any:
    return rq.process("orders", "invoices", lambda record: record.value, group="g", **options)


def feed(rq: RayQueue) -> None:
    with rq.producer() as producer:
        producer.send("orders", b"1").result(timeout_ms=5000)


def processed(run: Any, count: int) -> None:
    wait_for(lambda: run.figures().records >= count, f"{count} records")


@pytest.mark.slow
def test_each_run_gives_its_id_back_and_a_producer_s_stays(rq: RayQueue) -> None:
    with rq.producer(transactional_id="billing") as producer, producer.transaction() as tx:
        tx.send("orders", b"1")
    for _ in range(3):
        with process(rq) as run:
            processed(run, 1)
            assert len(ids(rq)) == 2
        assert ids(rq) == ["billing"], "it names work, and fences whoever was at it before"
        feed(rq)


@pytest.mark.slow
def test_a_loop_that_gets_no_id_says_so(rq: RayQueue, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        with rq.producer(transactional_id=name) as producer, producer.transaction() as tx:
            tx.send("orders", b"1")
    caplog.set_level(logging.WARNING, logger="rayqueue")
    run = process(rq, idle_ms=10)  # it is not idle: there is something to do
    with pytest.raises(TooManyTransactionsError, match="max_transactional_ids"):
        run.wait(timeout_ms=20_000)
    assert "max_transactional_ids" in caplog.text


@pytest.mark.slow
def test_what_goes_wrong_again_and_again_is_told_until_it_is_over(rq: RayQueue) -> None:
    feed(rq)
    rq.fail_next("append", QueueFullError("no room in the sink"), topic="invoices", times=30)  # type: ignore[attr-defined]
    with process(rq, idle_ms=10) as run:
        assert "aborted" in wait_for(lambda: run.figures().trouble, "trouble")
        assert run.wait(timeout_ms=30_000)
        figures = run.figures()
    assert (figures.records, figures.trouble) == (1, ""), "what could not be done for long is not idle"
    assert figures.aborted > 0
