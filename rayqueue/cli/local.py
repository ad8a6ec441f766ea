"""Commands that need no running queue: `version`, `config`, `demo`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rayqueue import __version__
from rayqueue.cli.common import AsJson, ConfigPath, Overrides, flags


def version(as_json: AsJson = False) -> None:
    """Versions of RayQueue and of what it stands on."""
    from importlib.metadata import version as installed

    versions = {"rayqueue": __version__, "python": platform.python_version()}
    versions |= {name: installed(name) for name in ("ray", "pysyncobj", "lmdb", "pyarrow")}
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        typer.echo("\n".join(f"{name} {number}" for name, number in versions.items()))


def config(
    config_path: ConfigPath = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also say what each setting is for.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every setting in force, and where its value comes from. Secrets are masked."""
    from rayqueue.config import DEFAULT, Settings, descriptions, effective

    rows = effective(Settings(config_path=config_path, **flags(overrides)))
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
        return
    meaning = descriptions()
    table = Table("setting", "value", "source", *(["what it is"] if explain else []))
    for row in rows:
        value = "none" if row.value is None else str(row.value)
        cells = [row.key, value, row.source, *([meaning[row.key]] if explain else [])]
        table.add_row(*map(escape, cells), style=None if row.source == DEFAULT else "bold")
    Console().print(table)


def demo(
    records: Annotated[int, typer.Option(min=100, max=10_000_000, help="How many records to produce.")] = 100_000,
    partitions: Annotated[int, typer.Option(min=1, max=16, help="Of the topic.")] = 2,
    kills: Annotated[int, typer.Option(min=0, max=20, help="How often a leader is killed.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to take for producing, if nothing fails.")] = 15.0,
    data_dir: Annotated[Path | None, typer.Option(help="Keep the data, in this new directory.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Save a picture of the demo to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Records on their way while leaders are killed: none is lost. In tasks of a Ray of its own."""
    from rayqueue.demo import Plan, run

    plan = Plan(records=records, partitions=partitions, kills=kills, seconds=seconds)
    outcome = run(plan, data_dir=data_dir, svg=svg, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(outcome.facts()))
    if not outcome.sound:
        raise typer.Exit(1)
