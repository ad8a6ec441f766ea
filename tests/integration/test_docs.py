"""The examples of the documentation, run as they stand: each page in one process of its own, on a Ray of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/guide.md")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(240)


def examples(page: str) -> str:
    """All examples of a page, at the lines where they stand, so that an error names the line."""
    text = (ROOT / page).read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines()):
            lines[first + number] = line
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str, tmp_path: Path) -> None:
    code = examples(page)
    assert "rayqueue.connect(" in code
    script = tmp_path / Path(page).with_suffix(".py").name
    script.write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAYQUEUE_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, str(script)],
        # A Ray of its own, whatever else runs on this machine: see rayqueue.client.connection.
        env=environment
        | {"RAYQUEUE_DATA_DIR": str(tmp_path / "data"), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
