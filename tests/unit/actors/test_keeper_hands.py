"""The keeper's tasks: whoever ends wakes the keeper, but not at once if there was nothing to do."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.actors.keeper.hands import Hands


@pytest.mark.parametrize(("found", "wakes"), [(None, True), (True, True), (False, False)])
def test_a_step_that_found_nothing_to_do_does_not_make_the_keeper_look_again_at_once(
    found: bool | None, wakes: bool
) -> None:
    async def step() -> bool | None:
        return found

    async def look() -> None:
        hands = Hands("test")
        hands.begin("step", step())
        for _ in range(5):
            await asyncio.sleep(0)
        assert hands.woken.is_set() is wakes
        assert ("step" in hands.steps) is not wakes, "and it is not begun again before"
        for task in hands.steps.values():
            task.cancel()

    asyncio.run(look())


def test_a_step_that_fails_by_a_bug_says_so_and_is_not_begun_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def step() -> None:
        raise KeyError("b3")

    async def look() -> None:
        hands = Hands("test")
        hands.begin("step", step())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not hands.woken.is_set()
        assert "step" in hands.steps
        for task in hands.steps.values():
            task.cancel()

    asyncio.run(look())
    assert "KeyError: 'b3'" in caplog.text
