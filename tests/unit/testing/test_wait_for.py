"""``wait_for``: what counts as found."""

from __future__ import annotations

from typing import Any

import pytest

from rayqueue.testing import wait_for


@pytest.mark.parametrize("nothing", [None, False, [], (), {}, "", b""])
def test_nothing_yet_is_waited_for(nothing: Any) -> None:
    answers = iter([nothing, nothing, ["a record"]])
    assert wait_for(lambda: next(answers), "a record") == ["a record"]
    with pytest.raises(TimeoutError, match=r"waited 0.02 s for it"):
        wait_for(lambda: nothing, "it", 0.02)


@pytest.mark.parametrize("something", [True, 0, 0.0, 7, ["a"], object()])
def test_something_is_found_at_once(something: Any) -> None:
    assert wait_for(lambda: something, "it", 0.0) is something
