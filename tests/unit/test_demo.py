"""The demo's judgement: it must notice whatever could have gone wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import rayqueue.demo
from rayqueue.cli import app
from rayqueue.demo.story import Copy, Kill, Outcome, Plan, Sprint
from rayqueue.demo.traffic import RECORD_BYTES, Check, value_of
from rayqueue.demo.view import verdict
from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import NodeId, Offset
from rayqueue.partition import Fetched
from rayqueue.records import RecordBatch

PLAN = Plan(records=10, kills=1)
SOUND = Outcome(
    plan=PLAN,
    acknowledged=10,
    read=10,
    lost=0,
    duplicated=0,
    out_of_order=0,
    kills=(Kill(NodeId("n1"), 4711, 1.0, 1, NodeId("n2"), 0.25, 2.0),),
    copies=tuple(Copy(NodeId(f"n{number}"), 10, 0, "abc", 0.1) for number in (1, 2, 3)),
    sprint=Sprint(10, 0.1),
)


def batch(base_offset: int, *numbers: int) -> Fetched:
    payload = RecordBatch.encode(list(map(value_of, numbers)), timestamps=0)
    return Fetched(Offset(base_offset), len(numbers), payload)


def checked(*batches: Fetched) -> tuple[int, int, int, int, int]:
    check = Check(6)
    for each in batches:
        check.take(each)
    return check.read, check.missing, check.duplicated, check.out_of_order, check.gaps


def test_check() -> None:
    assert checked(batch(0, 0, 1, 2), batch(3, 3, 4, 5)) == (6, 0, 0, 0, 0)
    assert checked(batch(7, 0, 1, 2), batch(10, 3, 4, 5)) == (6, 0, 0, 0, 0)
    assert checked(batch(0, 0, 1, 2), batch(3, 4, 5)) == (5, 1, 0, 1, 0)
    assert checked(batch(0, 0, 1, 2), batch(3, 2, 3, 4, 5)) == (7, 0, 1, 1, 0)
    assert checked(batch(0, 0, 2, 1), batch(3, 3, 4, 5)) == (6, 0, 0, 3, 0)
    assert checked(batch(0, 0, 1, 2), batch(4, 3, 4, 5)) == (6, 0, 0, 0, 1)


@pytest.mark.parametrize("value", [b"short", value_of(6), None, b"x" * RECORD_BYTES])
def test_check_refuses_what_nobody_wrote(value: bytes | None) -> None:
    with pytest.raises((InvariantBrokenError, ValueError)):
        Check(6).take(Fetched(Offset(0), 1, RecordBatch.encode([value], timestamps=0)))


@pytest.mark.parametrize(
    "defect",
    [
        {"acknowledged": 9},
        {"read": 9},
        {"lost": 1},
        {"duplicated": 1},
        {"out_of_order": 1},
        {"kills": ()},
        {"kills": (replace(SOUND.kills[0], rejoined_s=None),)},
        {"copies": ()},
        {"copies": (*SOUND.copies[:2], replace(SOUND.copies[2], digest="abd"))},
        {"copies": (*SOUND.copies[:2], replace(SOUND.copies[2], records=9))},
        {"copies": (*SOUND.copies[:2], replace(SOUND.copies[2], missing=1))},
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
