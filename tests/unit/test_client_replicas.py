"""Asking Ray from threads beside: never after Ray was shut down, and never while it is."""

from __future__ import annotations

import threading

import pytest
import ray

from rayqueue.client import replicas
from rayqueue.errors import OutcomeUnknownError


def test_ray_is_not_started_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OutcomeUnknownError), replicas._asking():
        pytest.fail("it must not come to this")


def test_whoever_shuts_ray_down_can_wait_for_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        with replicas._asking():
            asked.set()
            answered.wait(10)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(10)
    assert not replicas.wait_for_answers(0.05)
    answered.set()
    assert replicas.wait_for_answers(10)
    thread.join(10)
