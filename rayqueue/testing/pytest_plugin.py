"""Fixtures for pytest: ``pytest_plugins = ["rayqueue.testing.pytest_plugin"]`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rayqueue.testing import memory


@pytest.fixture
def memory_queue() -> Iterator[memory.MemoryQueue]:
    """An empty queue in memory, for one test."""
    with memory.connect() as rq:
        yield rq
