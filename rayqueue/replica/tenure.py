"""A replica's tenure: the leadership as its service sees it, won, taken up and lost."""

from __future__ import annotations

from rayqueue.raft.engine import RaftEngine
from rayqueue.replica.service import Events


class Tenure:
    """Looks at the engine, and tells the service what has changed."""

    def __init__(self, engine: RaftEngine, service: Events) -> None:
        self.elected = 0
        """How often it was won."""
        self.handed_over = 0
        """How often of these because the leader before made way."""
        self._engine = engine
        self._service = service
        self._won = False
        self._taken_up = False

    def look(self, now_s: float) -> None:
        engine = self._engine
        if engine.is_leader != self._won:
            self._won = engine.is_leader
            self._taken_up = False
            if self._won:
                self.elected += 1
                self.handed_over += engine.took_over
                self._service.won()
            else:
                self._service.lost(now_s)
        if self._won and not self._taken_up and engine.applied >= engine.noop_index:
            self._taken_up = True
            self._service.lead(now_s)
