"""The leadership as a service hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rayqueue.replica.tenure import Tenure


class Heard:
    """A service that notes the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def won(self) -> None:
        self.events.append("won")

    def lead(self, now_s: float) -> None:
        self.events.append("lead")

    def lost(self, now_s: float) -> None:
        self.events.append("lost")

    def since(self) -> list[str]:
        events, self.events = self.events, []
        return events


def test_a_leadership_is_won_then_taken_up_once_all_before_it_is_applied_then_lost() -> None:
    engine: Any = SimpleNamespace(took_over=False, is_leader=False, applied=3, noop_index=0)
    service: Any = Heard()
    leadership = Tenure(engine, service)
    leadership.look(0.0)
    assert service.since() == []
    engine.is_leader, engine.noop_index = True, 5
    leadership.look(0.0)
    leadership.look(0.0)
    assert service.since() == ["won"]
    engine.applied = 5
    leadership.look(0.0)
    leadership.look(0.0)
    assert service.since() == ["lead"]
    engine.is_leader = False
    leadership.look(0.0)
    leadership.look(0.0)
    assert service.since() == ["lost"]
    assert leadership.elected == 1


def test_one_that_is_lost_before_it_was_taken_up_is_told_too() -> None:
    """Whoever asked the leader in between waits for an answer."""
    engine: Any = SimpleNamespace(took_over=False, is_leader=True, applied=3, noop_index=9)
    service: Any = Heard()
    leadership = Tenure(engine, service)
    leadership.look(0.0)
    engine.is_leader = False
    leadership.look(0.0)
    assert service.since() == ["won", "lost"]
    engine.is_leader, engine.applied = True, 9
    leadership.look(0.0)
    assert service.since() == ["won", "lead"]
    assert leadership.elected == 2
