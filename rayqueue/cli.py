"""The ``rayqueue`` command.

Owns the words on the terminal and the exit codes: 0 all is well, 1 a
``RayQueueError``, 2 wrong usage. Every command prints a table for people and,
with ``--json``, the same facts for programs. Importing this module stays
cheap: a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rayqueue import __version__
from rayqueue.errors import ConfigError, RayQueueError

app = typer.Typer(
    name="rayqueue",
    help="A fault-tolerant, Kafka-like message queue made of Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold secrets
)

ConfigPath = Annotated[
    Path | None, typer.Option("--config", help="A .toml or .yaml file, instead of rayqueue.toml in this directory.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as raft.heartbeat_ms=50.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def version(as_json: AsJson = False) -> None:
    """Versions of RayQueue and of what it stands on."""
    from importlib.metadata import version as installed

    versions = {"rayqueue": __version__, "python": platform.python_version()}
    versions |= {name: installed(name) for name in ("ray", "pysyncobj", "lmdb", "pyarrow")}
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in versions.items()))


@app.command()
def config(
    config_path: ConfigPath = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also say what each setting is for.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every setting in force, and where its value comes from. Secrets are masked."""
    from rayqueue.config import DEFAULT, Settings, descriptions, effective

    rows = effective(Settings(config_path=config_path, **_flags(overrides or [])))
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
        return
    meaning = descriptions()
    table = Table("setting", "value", "source", *(["what it is"] if explain else []))
    for row in rows:
        cells = [row.key, _text(row.value), row.source, *([meaning[row.key]] if explain else [])]
        table.add_row(*map(escape, cells), style=None if row.source == DEFAULT else "bold")
    Console().print(table)


@app.command()
def demo(
    records: Annotated[int, typer.Option(min=100, max=10_000_000, help="How many records to write.")] = 100_000,
    kills: Annotated[int, typer.Option(min=0, max=20, help="How often the leader is killed.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to take for writing, if nothing fails.")] = 15.0,
    data_dir: Annotated[Path | None, typer.Option(help="Keep the data here, instead of deleting it.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Save a picture of the demo to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """A partition on three replicas loses its leader, again and again, and no record. Starts its own Ray."""
    from rayqueue.demo import Plan, run

    outcome = run(Plan(records=records, kills=kills, seconds=seconds), data_dir=data_dir, svg=svg, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(outcome.facts()))
    if not outcome.sound:
        raise typer.Exit(1)


def _flags(overrides: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override} (--set): must be KEY=VALUE, such as raft.heartbeat_ms=50")
        if key == "config_path":
            raise ConfigError("config_path (--set): is not a setting; name the file by --config")
        flags[key] = None if value == "none" else value
    return flags


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def main() -> None:
    """The entry point: an error of ours is one sentence, not a traceback."""
    try:
        app()
    except RayQueueError as error:
        Console(stderr=True, highlight=False).print(f"rayqueue: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
