"""docs/options.md says what the code says."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_options_is_up_to_date() -> None:
    loader = importlib.machinery.SourceFileLoader("options", str(ROOT / "scripts" / "options"))
    spec = importlib.util.spec_from_loader("options", loader)
    assert spec is not None
    options = importlib.util.module_from_spec(spec)
    loader.exec_module(options)
    assert (ROOT / "docs" / "options.md").read_text() == options.page(), "run scripts/options"
