"""``rayqueue demo``: a topic, producers and a consumer group in Ray tasks, and leaders killed on the way."""

from __future__ import annotations

from rayqueue.demo.run import run
from rayqueue.demo.story import Outcome, Plan

__all__ = ["Outcome", "Plan", "run"]
