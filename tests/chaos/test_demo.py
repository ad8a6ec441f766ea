"""``rayqueue demo`` as a process: it shows what it should, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

_MARK = "DEMO_TEST_RUN"


def processes_with(mark: str) -> list[str]:
    """Command lines of what runs with this mark in its environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone meanwhile, or not ours
            continue
    return found


def test_demo(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "rayqueue.cli", "demo", "--records", "6000", "--kills", "1", "--seconds", "3"]
    files = ["--data-dir", str(tmp_path / "data"), "--svg", str(tmp_path / "demo.svg")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAYQUEUE_")}
    done = subprocess.run(
        [*command, *files],
        env=environment | {_MARK: mark, "COLUMNS": "80"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("killed r" in line and "orders-0, term 1, pid" in line for line in lines)
    assert any("is back and whole after" in line for line in lines)
    assert "All 6,000 records of 100 bytes were read by billing, once and in order." in lines
    assert "(raylet)" not in done.stdout + done.stderr
    assert "<svg" in (tmp_path / "demo.svg").read_text()
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o777 == 0o600
    assert processes_with(mark) == []
