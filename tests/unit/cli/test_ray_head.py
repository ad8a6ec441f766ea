"""The Ray of `rayqueue up`: what has to be there before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayqueue.cli.ray_head import see_to_token
from rayqueue.errors import ClusterNotFoundError


def environment(home: Path, **others: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return kept | {"HOME": str(home), "RAY_AUTH_MODE": "token"} | others


@pytest.mark.slow
def test_a_user_who_never_had_a_ray_gets_a_token_once_and_for_himself(tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    see_to_token(environment(tmp_path))
    made = token.read_text()
    assert len(made) >= 32
    assert token.stat().st_mode & 0o077 == 0
    see_to_token(environment(tmp_path))
    assert token.read_text() == made


def test_a_token_named_otherwise_is_not_replaced(tmp_path: Path) -> None:
    see_to_token(environment(tmp_path, RAY_AUTH_TOKEN="x" * 32))
    see_to_token(environment(tmp_path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "elsewhere")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_token_that_cannot_be_made_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("no directory")
    with pytest.raises(ClusterNotFoundError, match=r"auth_token cannot be made"):
        see_to_token(environment(tmp_path))
