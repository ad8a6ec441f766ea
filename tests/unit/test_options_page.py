"""The pages that scripts/options writes from the declarations of settings are up to date."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def options() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("options", str(ROOT / "scripts" / "options"))
    spec = importlib.util.spec_from_loader("options", loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


def test_the_page_of_options_is_up_to_date() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == options().page(), "run scripts/options"


def test_the_signatures_are_up_to_date() -> None:
    handle: str = (ROOT / "client" / "handle.py").read_text()
    assert handle == options().signatures(handle), "run scripts/options"
    without = handle.replace("        max_backlog_records: int | None = None,\n", "", 1)
    assert without != handle
    assert options().signatures(without) == handle
