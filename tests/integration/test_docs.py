"""The examples of the documentation, run as they stand: each page in one process of its own, on a Ray of its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/guide.md", "docs/transactions.md")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(240)


def examples(page: str | Path) -> str:
    """All examples of a page, at the lines where they stand, so that an error names the line."""
    text = (ROOT / page).read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines()):
            lines[first + number] = line
    return "\n".join(lines)


def test_every_example_that_makes_a_topic_can_be_run_again() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [*map(examples, pages), *(each.read_text() for each in (ROOT / "examples").glob("*.py"))]
    calls = [call for text in texts for call in ast.walk(ast.parse(text)) if _makes_a_topic(call)]
    assert len(calls) > 4
    for call in calls:
        assert "if_missing=True" in ast.unparse(call), ast.unparse(call)


def _makes_a_topic(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "create_topic"


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str, tmp_path: Path) -> None:
    run(page, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_again_on_the_same_data(page: str, tmp_path: Path) -> None:
    for _ in range(2):
        run(page, tmp_path)


def run(page: str, home: Path) -> None:
    code = examples(page)
    assert "rayqueue.connect(" in code
    script = home / Path(page).with_suffix(".py").name
    script.write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAYQUEUE_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, str(script)],
        # A Ray of its own, whatever else runs on this machine: see rayqueue.client.connect.
        env=environment | {"RAYQUEUE_DATA_DIR": str(home / "data"), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
