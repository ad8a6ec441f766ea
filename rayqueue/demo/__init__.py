"""``rayqueue demo``: a partition whose leader is killed while it is written and read, and the proof that this did
no harm. ``traffic`` writes and reads, ``story`` kills and compares, ``view`` shows it."""

from __future__ import annotations

from rayqueue.demo.run import run
from rayqueue.demo.story import Outcome, Plan

__all__ = ["Outcome", "Plan", "run"]
