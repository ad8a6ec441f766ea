"""The command's words, without a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rayqueue import __version__
from rayqueue.cli import app
from rayqueue.errors import ConfigError, InvalidInputError

runner = CliRunner()


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.upper().startswith("RAYQUEUE_")]:
        monkeypatch.delenv(name)


def test_version() -> None:
    told = json.loads(runner.invoke(app, ["version", "--json"], catch_exceptions=False).output)
    assert told["rayqueue"] == __version__
    assert told["pysyncobj"] == "0.3.17"
    assert f"rayqueue {__version__}" in runner.invoke(app, ["version"]).output


@pytest.mark.slow
def test_help_is_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the names of options nor the sentences about commands are cut at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    pages = 0

    def look(command: Any, words: list[str]) -> None:
        nonlocal pages
        told = runner.invoke(app, [*words, "--help"]).output
        lines = [line for line in told.splitlines() if not line.startswith("Usage: ")]
        assert not [line for line in lines if len(line) > 80 or line.endswith("...") or "…" in line], words
        for option in (name for each in command.params for name in each.opts if name.startswith("--")):
            assert option in told
        pages += 1
        for name, below in getattr(command, "commands", {}).items():
            look(below, [*words, name])

    look(typer.main.get_command(app), [])
    assert pages > 15
    assert "--install-completion" in runner.invoke(app, ["--help"]).output
    assert runner.invoke(app, ["--version"]).output == f"rayqueue {__version__}\n"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([], "name one of"),
        (["--to-earliest", "--by", "3"], "name one of"),
        (["--to-latest", "--partition", "1"], "give --topic"),
        (["--to-time", "soon"], "no time"),
    ],
)
def test_a_reset_says_what_is_missing_before_it_connects(wrong: list[str], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        runner.invoke(app, ["groups", "reset", "g", *wrong], catch_exceptions=False)


def test_config_tells_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rayqueue.toml").write_text("[raft]\nleader_fallback_ms = 3000\n")
    monkeypatch.setenv("RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS", "9")
    arguments = ["config", "--json", "--set", "raft.heartbeat_ms=50", "--set", "log.retention_ms=none"]
    rows = json.loads(runner.invoke(app, arguments, catch_exceptions=False).output)
    told = {row["key"]: (row["value"], row["source"]) for row in rows}
    assert told["raft.leader_fallback_ms"] == (3000, "rayqueue.toml")
    assert told["raft.snapshot_retry_ms"] == (9, "RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS")
    assert told["raft.heartbeat_ms"] == (50, "argument")
    assert told["log.retention_ms"] == (None, "argument")
    assert told["namespace"] == ("rayqueue", "default")


def test_config_table_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("RAYQUEUE_TRANSPORT__SECRET", "correct horse battery")
    output = runner.invoke(app, ["config"], catch_exceptions=False).output
    assert "RAYQUEUE_TRANSPORT__SECRET" in output
    assert "horse" not in output


def test_config_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "steps down" in runner.invoke(app, ["config", "--explain"], catch_exceptions=False).output
    assert "steps down" not in runner.invoke(app, ["config"], catch_exceptions=False).output


def test_config_file_by_option(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("namespace: blue\n")
    rows = json.loads(runner.invoke(app, ["config", "--json", "--config", "other.yaml"], catch_exceptions=False).output)
    assert {"key": "namespace", "value": "blue", "source": "other.yaml"} in rows


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("nonsense", "must be KEY=VALUE"),
        ("=1", "must be KEY=VALUE"),
        ("config_path=x", "name the file by --config"),
        ("raft.nonsense=1", "raft.nonsense (argument): unknown key"),
    ],
)
def test_a_wrong_override(override: str, text: str) -> None:
    error = runner.invoke(app, ["config", "--set", override]).exception
    assert isinstance(error, ConfigError)
    assert text in str(error)
