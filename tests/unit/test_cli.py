"""The command's words, without a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayqueue import __version__
from rayqueue.cli import app
from rayqueue.errors import ConfigError

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
