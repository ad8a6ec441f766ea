"""A Python process of Spark: what it keeps out of the collections that run after every task."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest

from rayqueue.spark import worker


@pytest.fixture(autouse=True)
def _thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker, "_modules_settled", 0)
    yield
    gc.unfreeze()


def as_if_run_as(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)


def collectable(thing: object) -> bool:
    """Whether a collection looks at it. (How many are frozen says nothing: a frozen object may be freed meanwhile.)"""
    return any(other is thing for other in gc.get_objects())


def test_once_until_more_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_run_as(monkeypatch, "pyspark.daemon")
    there_before: list[object] = []
    worker.settle()
    assert not collectable(there_before)
    left_by_a_task: list[object] = []
    worker.settle()
    assert collectable(left_by_a_task)
    monkeypatch.setitem(sys.modules, "a_module_that_came_later", types.ModuleType("later"))
    worker.settle()
    assert not collectable(left_by_a_task)


def test_a_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_run_as(monkeypatch, "somebody.elses.program")
    there_before: list[object] = []
    worker.settle()
    assert collectable(there_before)
