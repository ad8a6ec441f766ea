"""What a Python process of Spark keeps out of the collections that run after every task."""

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


def test_once_until_more_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_run_as(monkeypatch, "pyspark.daemon")
    before = gc.get_freeze_count()
    worker.settle()
    settled = gc.get_freeze_count()
    assert settled > before
    garbage = [[] for _ in range(1000)]  # type: list[list[object]]
    worker.settle()
    assert gc.get_freeze_count() <= settled, "what a later task leaves must stay collectable"
    monkeypatch.setitem(sys.modules, "a_module_that_came_later", types.ModuleType("later"))
    worker.settle()
    assert gc.get_freeze_count() >= settled + len(garbage)


def test_a_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_run_as(monkeypatch, "somebody.elses.program")
    before = gc.get_freeze_count()
    worker.settle()
    assert gc.get_freeze_count() == before
