"""The campaign tells a broken invariant from a bug of the simulator."""

from __future__ import annotations

from typing import NoReturn

import pytest

from tests.sim import campaign
from tests.sim.invariants import BrokenError, Invariant


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (BrokenError(Invariant.ONE_LEADER, "two of them"), "lost"),
        (BrokenError(Invariant.PROGRESS, "nothing moves"), "stuck"),
        (TypeError("the simulator's own"), "error"),
    ],
)
def test_how_a_schedule_fails(monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: str) -> None:
    def fail(seed: int) -> NoReturn:
        raise raised

    monkeypatch.setitem(campaign.WORLDS, "partition", fail)
    result = campaign.run_seed(1)
    assert result.kind == kind
    assert str(raised) in result.text
