"""`rayqueue up` where an earlier one has left its log and its data."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.test_cli import Shell

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_up_down_up(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "data")
    clusters = []
    try:
        for _ in range(2):
            began_s = time.monotonic()
            clusters.append(json.loads(shell("up", "--no-dashboard", "--json"))["cluster"]["cluster_id"])
            assert json.loads(shell("status", "--json"))["state"] == "well"
            assert time.monotonic() - began_s < 110
            log = (shell.home / "ray.log").read_text()
            assert log.count("block forever") == 1  # only of this start: an earlier one's would be taken for it
            shell("down")
            assert not (shell.home / "ray.json").exists()
    finally:
        head = shell.home / "ray.json"
        if head.exists():
            os.kill(json.loads(head.read_text())["pid"], signal.SIGTERM)
    assert clusters[0] == clusters[1]
