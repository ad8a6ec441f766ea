"""A topic's settings: declared once; checks, flags, the wire, partitions and docs/options.md follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from rayqueue.cli.topics import with_settings
from rayqueue.errors import InvalidInputError
from rayqueue.partition import PartitionSettings
from rayqueue.protocol.topics import Setting, SharedSettings, TopicSettings, declared

ROOT = Path(__file__).resolve().parents[3]


class More(TopicSettings, frozen=True, kw_only=True):
    """What a release with one setting more would declare, and nothing else."""

    delay_ms: Annotated[int | None, Setting("Records wait this long.", least=0, most=1000)] = None


def test_golden_bytes_of_the_wire_and_of_the_coordinators_log() -> None:
    settings = TopicSettings(retention_ms=7)
    assert msgspec.msgpack.encode(settings) == bytes.fromhex("de0001ac726574656e74696f6e5f6d7307")
    all_written = bytes.fromhex(  # as releases before work queues did
        "89aa706172746974696f6e7301ab7265706c69636174696f6e03a56c616e657301ac726574656e74696f6e5f6d7307"
        "af726574656e74696f6e5f6279746573c0b2726574656e74696f6e5f636f6e73756d6564c2"
        "b06d61785f7265636f72645f6279746573ce000f4240b16d61785f6261636b6c6f675f6279746573c0"
        "b36d61785f6261636b6c6f675f7265636f726473c0"
    )
    assert msgspec.msgpack.decode(all_written, type=TopicSettings) == settings


def test_every_bound_holds() -> None:
    for name, setting in declared(TopicSettings).items():
        impossible: list[Any] = ["1", 1.0]
        impossible += [1] if setting.kind is bool or setting.choices else [setting.least - 1, setting.most + 1, True]
        impossible += [] if setting.optional else [None]
        for value in impossible:
            with pytest.raises(InvalidInputError) as refused:
                TopicSettings(**{name: value}).check()
            assert refused.value.details["key"] == name
        possible: list[Any] = [True, False] if setting.kind is bool else [setting.least, setting.most]
        for value in [*(setting.choices or possible), setting.default]:
            assert getattr(TopicSettings(**{name: value}).check(), name) == value


def test_what_is_fixed_and_what_only_grows() -> None:
    settings = TopicSettings(partitions=3)
    for name, setting in declared(TopicSettings).items():
        before = getattr(settings, name)
        assert settings.changed({name: before}) == settings
        if setting.changes == "never":
            with pytest.raises(InvalidInputError, match=f"{name} cannot change"):
                settings.changed({name: before + 1})
        elif setting.changes == "up":
            assert getattr(settings.changed({name: before + 1}), name) == before + 1
            with pytest.raises(InvalidInputError, match=f"from {before} {name} to {before - 1}"):
                settings.changed({name: before - 1})
        else:
            other = not before if setting.kind is bool else (*setting.choices, setting.least)[0]
            assert getattr(settings.changed({name: other}), name) == other
    with pytest.raises(InvalidInputError, match="no setting 'partition'"):
        settings.changed({"partition": 4})


def test_a_partition_is_told_every_setting_that_it_shares() -> None:
    unlike: dict[str, Any] = {
        name: not setting.default if setting.kind is bool else (*setting.choices, setting.most)[0]
        for name, setting in declared(TopicSettings).items()
    }
    told = PartitionSettings.of(TopicSettings(**unlike).check(), 7)
    shared = SharedSettings.__struct_fields__
    assert {name: getattr(told, name) for name in shared} == {name: unlike[name] for name in shared}
    assert told.version == 7
    assert set(shared) | {"partitions", "replication", "prefer_leader"} == set(declared(TopicSettings))


def test_one_setting_more_is_one_entry() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(TopicSettings(lanes=2)), type=More) == More(lanes=2)
    with pytest.raises(InvalidInputError, match="delay_ms must be from 0 to 1000, or none, not 1001"):
        More(delay_ms=1001).check()
    app, got = typer.Typer(rich_markup_mode=None), {}

    @app.command()
    @with_settings(declared(More).values())
    def create(name: Annotated[str, typer.Argument()], settings: dict[str, Any]) -> None:
        got[name] = settings

    run = CliRunner().invoke
    assert "Records wait this long." in " ".join(run(app, ["--help"]).stdout.split())
    assert run(app, ["orders", "--delay-ms", "5", "--lanes", "2", "--no-retention-consumed"]).exit_code == 0
    assert run(app, ["rest", "--delay-ms", "none"]).exit_code == 0
    assert isinstance(run(app, ["wrong", "--delay-ms", "soon"]).exception, InvalidInputError)
    assert got == {"orders": {"delay_ms": 5, "lanes": 2, "retention_consumed": False}, "rest": {"delay_ms": None}}


@pytest.mark.parametrize("name", ["retention_consumed", "max_backlog_bytes", "max_backlog_records"])
def test_a_setting_stands_in_its_declaration_and_in_the_signatures_that_are_made_from_it(name: str) -> None:
    declares = re.compile(rf"^\s*{name}:", re.MULTILINE)
    files = [path for folder in ("rayqueue", "client", "actors", "scripts") for path in (ROOT / folder).rglob("*")]
    places = [str(path.relative_to(ROOT)) for path in files if path.suffix in ("", ".py") and path.is_file()]
    linked = ("rayqueue/client/", "rayqueue/actors/")
    places = [place for place in places if not place.startswith(linked) and declares.search((ROOT / place).read_text())]
    of_queues = {"client/factories.py"}  # rq.queue has those of them that a queue has
    assert sorted(set(places) - of_queues) == ["client/handle.py", "rayqueue/protocol/topics.py"]
