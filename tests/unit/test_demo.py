"""The demo's judgement: it must notice whatever could have gone wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from rich.console import Console
from typer.testing import CliRunner

import rayqueue.demo
from rayqueue.cli import app
from rayqueue.demo.story import Kill, Outcome, Plan, Sprint
from rayqueue.demo.traffic import RECORD_BYTES, Check, Consumed, Rate, Sum, add_up, key_of, value_of
from rayqueue.demo.view import verdict
from rayqueue.errors import InvalidInputError, InvariantBrokenError
from rayqueue.records import Record

PLAN = Plan(records=10, kills=1)
SOUND = Outcome(
    plan=PLAN,
    acknowledged=10,
    read=10,
    lost=0,
    duplicated=0,
    out_of_order=0,
    stored=10,
    lag=0,
    kills=(Kill(0, "r1", 4711, 1.0, 1, "r2", 0.25, 2.0),),
    sprint=Sprint(10, 0.1, 0.1),
)


def seen_by(*members: list[tuple[int, int, int]]) -> Sum:
    """Each member is told records as partition, producer, number."""
    reports: list[Consumed] = []
    for records in members:
        check = Check(2, 3)
        for partition, producer, number in records:
            record = Record(0, 0, key_of(number), value_of(producer, number), topic="orders", partition=partition)
            check.take(record)
        reports.append(check.told)
    return add_up(reports, 2, 3)


def test_what_the_consumers_saw_is_added_up() -> None:
    first = [(0, 0, 0), (0, 0, 2), (0, 1, 0)]
    second = [(1, 0, 1), (1, 1, 1), (1, 1, 2)]
    assert seen_by(first, second) == Sum(read=6, lost=0, duplicated=0, out_of_order=0)
    assert seen_by(first, second[:2]) == Sum(read=5, lost=1, duplicated=0, out_of_order=0)
    assert seen_by(first, [*second, (0, 0, 2)]) == Sum(read=7, lost=0, duplicated=1, out_of_order=0)
    assert seen_by([(0, 0, 2), (0, 0, 0), (0, 1, 0)], second) == Sum(read=6, lost=0, duplicated=0, out_of_order=1)
    assert seen_by([*first, first[-1]], second) == Sum(read=7, lost=0, duplicated=1, out_of_order=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key_of(0), b"short"),
        (key_of(0), value_of(0, 3)),
        (key_of(0), value_of(2, 0)),
        (key_of(1), value_of(0, 0)),
        (key_of(0), None),
        (key_of(0), b"x" * RECORD_BYTES),
        (key_of(0), value_of(0, 0)[:-1] + b"x"),
    ],
)
def test_check_refuses_what_nobody_wrote(key: bytes, value: bytes | None) -> None:
    with pytest.raises((InvariantBrokenError, ValueError)):
        Check(2, 3).take(Record(0, 0, key, value))


def test_a_directory_in_which_something_is_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").touch()
    with pytest.raises(InvalidInputError, match=r"is not empty.*rayqueue up --data-dir"):
        CliRunner().invoke(app, ["demo", "--data-dir", str(tmp_path)], catch_exceptions=False)
    assert not ray.is_initialized()


def test_rate() -> None:
    rate = Rate(looks=3)
    assert rate.per_s == 0
    for second in range(5):
        rate.add(float(second), second * second)
    assert rate.per_s == (16 - 4) / 2


@pytest.mark.parametrize(
    "defect",
    [
        {"acknowledged": 9},
        {"read": 9},
        {"stored": 11},
        {"lost": 1},
        {"duplicated": 1},
        {"out_of_order": 1},
        {"lag": 1},
        {"kills": ()},
        {"kills": (replace(SOUND.kills[0], rejoined_s=None),)},
        {"sprint": None},
    ],
    ids=lambda defect: next(iter(defect)),
)
def test_any_defect_is_seen_and_is_exit_code_1(defect: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert SOUND.sound
    found = replace(SOUND, **defect)  # type: ignore[arg-type]
    assert not found.sound
    monkeypatch.setattr(rayqueue.demo, "run", lambda *_, **__: found)
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["sound"]) == (1, False)


def test_verdict_fits_a_terminal_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, sentence in ((SOUND, "once and in order"), (replace(SOUND, lost=1), "should not have happened")):
        console = Console(record=True, width=80, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
        console.print(verdict(outcome))
        text = console.export_text()
        assert sentence in text
        assert max(map(len, text.splitlines())) <= 80
    monkeypatch.setattr(rayqueue.demo, "run", lambda *_, **__: SOUND)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
