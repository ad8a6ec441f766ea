"""Asking Ray from threads beside: never after Ray was shut down, and never while it is."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import ray

from rayqueue.actors import directory
from rayqueue.errors import OutcomeUnknownError


def test_ray_is_not_started_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OutcomeUnknownError), directory._asking():
        pytest.fail("it must not come to this")


def test_whoever_shuts_ray_down_can_wait_for_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        with directory._asking():
            asked.set()
            answered.wait(10)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(10)
    assert not directory.wait_for_answers(0.05)
    answered.set()
    assert directory.wait_for_answers(10)
    thread.join(10)


_SILENT_RAY = """
import asyncio, threading
import ray
from rayqueue.actors import directory
from rayqueue.errors import OutcomeUnknownError

ray.is_initialized = lambda: True
ray.get_actor = lambda *_: threading.Event().wait()
directory._SILENT_S = 0.1

async def ask():
    found = directory.RayDirectory("rayqueue")
    for _ in range(directory._MAX_ASKING + 1):
        try:
            await found.endpoint("t-0", "t-0-a")
        except OutcomeUnknownError as error:
            said = error
    print(said)

asyncio.run(ask())
"""


@pytest.mark.slow
def test_a_ray_that_never_answers_holds_up_neither_calls_nor_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", _SILENT_RAY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "has not answered 32 questions" in done.stdout
