"""The frame of every world's tests: a slice of its campaign, the same schedule in every process, and mutations.

A mutation is a rule of the product, switched off. The product has no switches for
its own safety, so one method is replaced while a schedule runs, and the simulator
must notice: by the invariant that the rule is for, in one of the first schedules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

from typing_extensions import Self

from tests.sim.campaign import replay_command, run_campaign
from tests.sim.invariants import BrokenRule, Invariant, first_broken


class Mutation:
    """``faults`` and whatever else narrows the world keep to what the rule is for, so that few schedules show it.

    ``first_seed`` is where the search begins: somewhat before the first schedule that shows it, if that is far.
    """

    make: ClassVar[Callable[..., Any]]
    """The world, of a seed, its faults and what else narrows it. The subclass's."""

    def __init__(
        self,
        name: str,
        finding: str,
        rule: BrokenRule,
        target: Any,
        attribute: str,
        replacement: Any,
        faults: Iterable[str],
        *,
        first_seed: int = 0,
        **narrowed: Any,
    ) -> None:
        self.name = name
        self.finding = finding
        self.rule = rule
        self.first_seed = first_seed
        self._replaced = target, attribute, replacement
        self._faults = frozenset(faults)
        self._narrowed = narrowed

    @classmethod
    def of(
        cls,
        name: str,
        finding: str,
        breaks: Invariant,
        target: Any,
        attribute: str,
        replacement: Any,
        *faults: str,
        also: tuple[Invariant, ...] = (),
        **narrowed: Any,
    ) -> Self:
        rule = BrokenRule(breaks, frozenset(also))
        return cls(name, finding, rule, target, attribute, replacement, faults, **narrowed)

    def world(self, seed: int) -> Any:
        return self.make(seed, self._faults, **self._narrowed)

    @contextmanager
    def active(self) -> Iterator[None]:
        with patch.object(*self._replaced):
            yield

    def check_noticed(self, schedules: int) -> None:
        with self.active():
            seed = first_broken(self.world, range(self.first_seed, self.first_seed + schedules), self.rule)
        assert seed is not None, f"nobody noticed: {self.finding}"
        self.world(seed).run()  # it is the mutation that fails, not the schedule


def check_campaign(world: str, schedules: int, *, acked_each: float, snapshots_each: float = 0.0) -> None:
    """Nothing is lost and nothing sticks; and something happens, without which that says nothing."""
    results = list(run_campaign(1, schedules, os.cpu_count() or 1, world))
    failed = [
        f"{result.kind}: {result.text}\n  {replay_command(result.seed, world)}" for result in results if result.kind
    ]
    assert not failed, "\n".join(failed)
    assert len(results) == schedules
    assert sum(result.acked for result in results) > acked_each * schedules
    assert sum(result.snapshots for result in results) >= snapshots_each * schedules


def check_same_in_every_process(world: str) -> None:
    code = f"from tests.sim.campaign import WORLDS; print(*(WORLDS[{world!r}](seed).run() for seed in range(6)))"
    outcomes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1
