"""Answers on their way from the engine's thread to the event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any

import pytest

from rayqueue.actors.base import _mark_logs
from rayqueue.actors.replies import Reply, deliver
from rayqueue.errors import NotLeaderError


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop in a thread of its own, which counts how often it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0
        self._own_thread = threading.Thread(target=self.run_forever, daemon=True)

    def __enter__(self) -> CountingLoop:
        self._own_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        super().call_soon_threadsafe(self.stop)
        self._own_thread.join()
        self.close()

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(callback, *args, context=context)

    def make(self, build: Callable[[], Any]) -> Any:
        async def built() -> Any:
            return build()

        return asyncio.run_coroutine_threadsafe(built(), self).result()

    def result_of(self, future: asyncio.Future[Any]) -> Any:
        async def awaited() -> Any:
            return await future

        return asyncio.run_coroutine_threadsafe(awaited(), self).result(5)


def test_one_wake_for_all_answers_of_a_step() -> None:
    with CountingLoop() as control, CountingLoop() as keeper:
        asked = [control.make(Reply) for _ in range(50)]
        kept = [keeper.make(Reply) for _ in range(20)]
        control.wakes = keeper.wakes = 0
        deliver([(reply, number) for number, reply in enumerate([*asked, *kept])])
        assert (control.wakes, keeper.wakes) == (1, 1)
        assert [control.result_of(reply.future) for reply in asked] == list(range(50))
        assert [keeper.result_of(reply.future) for reply in kept] == list(range(50, 70))
        deliver([])


def test_error_is_raised_and_a_late_answer_ignored() -> None:
    with CountingLoop() as loop:
        reply = loop.make(Reply)
        deliver([(reply, NotLeaderError("no", leader="n2")), (reply, 1)])
        with pytest.raises(NotLeaderError) as caught:
            loop.result_of(reply.future)
        assert caught.value.details == {"leader": "n2"}


@pytest.fixture
def package_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("rayqueue")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def test_every_log_line_says_whose_it_is(package_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    _mark_logs("orders-3 n1")
    logging.getLogger("rayqueue.raft.tcp").warning("first")
    logging.getLogger("rayqueue.replica").info("second")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(" orders-3 n1 " in line for line in lines)
    assert len(package_logger.handlers) == 1
