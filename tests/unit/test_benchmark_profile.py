"""The stopwatches of `benchmarks/log_path.py --profile` are around steps that exist."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import pytest

from benchmarks._profile import STEPS


@pytest.mark.parametrize(("module", "path"), [(module, path) for module, path, _ in STEPS])
def test_the_step_is_there(module: str, path: str) -> None:
    assert callable(attrgetter(path)(import_module(module)))
