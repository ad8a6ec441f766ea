"""Requests that must be answered in time, and whose caller may be cancelled."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.net.requests import in_time


def test_an_answer_in_time_and_one_that_comes_too_late() -> None:
    async def test() -> None:
        assert await in_time(asyncio.sleep(0.001, "answer"), 5) == "answer"
        late = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await in_time(late, 0.01)
        assert late.cancelled()

        async def fail() -> None:
            raise ValueError

        with pytest.raises(ValueError):
            await in_time(fail(), 5)

    asyncio.run(test())


@pytest.mark.parametrize("in_one_moment", [False, True])
def test_a_loop_that_is_cancelled_ends_also_if_its_answer_comes_in_the_same_moment(in_one_moment: bool) -> None:
    """With ``asyncio.wait_for`` it goes on, before Python 3.12: a consumer that was closed then never was."""

    async def test() -> None:
        answers: list[asyncio.Future[None]] = []

        async def loop() -> None:
            while True:
                answers.append(asyncio.get_running_loop().create_future())
                await in_time(answers[-1], 60)

        running = asyncio.ensure_future(loop())
        await asyncio.sleep(0.001)
        if in_one_moment:
            answers[0].set_result(None)
        running.cancel()
        done, _ = await asyncio.wait((running,), timeout=5)
        assert done, "it goes on"
        assert running.cancelled()
        assert len(answers) == 1
        assert answers[0].done()

    asyncio.run(test())
