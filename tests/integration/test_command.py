"""The installed ``rayqueue`` command, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ([str(Path(sys.executable).with_name("rayqueue"))], [sys.executable, "-m", "rayqueue.cli"])


def run(command: list[str], *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAYQUEUE_")} | variables
    return subprocess.run(
        [*command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", COMMANDS, ids=["script", "module"])
def test_config(command: list[str], tmp_path: Path) -> None:
    done = run(command, "config", "--json", cwd=tmp_path, RAYQUEUE_NAMESPACE="blue")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"key": "namespace", "value": "blue", "source": "RAYQUEUE_NAMESPACE"} in json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS, ids=["script", "module"])
def test_an_error_is_a_sentence_and_exit_code_1(command: list[str], tmp_path: Path) -> None:
    done = run(command, "config", cwd=tmp_path, RAYQUEUE_NAMESPAEC="blue")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rayqueue: namespaec (RAYQUEUE_NAMESPAEC): unknown key. did you mean namespace?")
    assert done.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert run(COMMANDS[0], "nonsense", cwd=tmp_path).returncode == 2
