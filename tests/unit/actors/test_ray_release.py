"""The check of Ray's release, whose insides ``rayqueue.actors._ray`` uses."""

from __future__ import annotations

import pytest

from rayqueue.actors import _ray


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "2.6.0", "3.0.0"])
def test_another_release_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"written for ray 2.60, found {version}"):
        _ray.check(version)


def test_a_release_without_one_of_the_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _ray.check()
    monkeypatch.delattr("ray._private.state.actors")
    with pytest.raises(ImportError, match=r"has no ray\._private\.state\.actors"):
        _ray.check()
