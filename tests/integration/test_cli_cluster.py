"""The command against a queue that it has started: every step is a process of its own, as on a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


class Shell:
    """Runs the command on one data directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RAYQUEUE_")}

    def __call__(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rayqueue.cli", *arguments, "--data-dir", str(self.home)],
            input=stdin,
            env=self._environment | {"COLUMNS": "120"},
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "data")
    yield shell
    head = shell.home / "ray.json"
    if head.exists():  # a test failed before it came to `down`
        os.kill(json.loads(head.read_text())["pid"], signal.SIGTERM)


def test_a_day_at_the_terminal(shell: Shell) -> None:
    up = json.loads(shell("up", "--no-dashboard", "--json"))
    pid = json.loads((shell.home / "ray.json").read_text())["pid"]

    assert "orders: 1 partitions, 3 replicas each" in shell("topics", "create", "orders", "--lanes", "2")
    assert "3 records acknowledged" in shell("produce", "orders", "--key-separator", ":", stdin="a:1\nb:2\nc:3\n")
    shell("produce", "orders", "urgent", "--priority", "1", "--header", "who=me")
    told = [json.loads(line) for line in shell("consume", "orders", "--group", "billing", "--json").splitlines()]
    assert [(each["key"], each["value"]) for each in told] == [(None, "urgent"), ("a", "1"), ("b", "2"), ("c", "3")]
    assert told[0]["headers"] == [["who", "me"]]

    facts = json.loads(shell("status", "--json"))
    assert facts["cluster"]["cluster_id"] == up["cluster"]["cluster_id"]
    assert [(topic["name"], topic["partitions"][0]["end_offset"]) for topic in facts["topics"]] == [("orders", 4)]
    (group,) = facts["groups"]
    assert (group["group"], group["partitions"][0]["lag"]) == ("billing", 0)

    assert "RayQueue has stopped" in shell("down")
    assert not Path(f"/proc/{pid}").exists()
    assert "no Ray runs here" in shell("status", code=1)
