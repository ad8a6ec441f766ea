"""The ``rayqueue`` command.

Owns the words on the terminal and the exit codes: 0 all is well, 1 a
``RayQueueError``, 2 wrong usage, 130 interrupted (`rayqueue status` has codes of
its own). Every command prints a table for people and, with ``--json``, the same
facts for programs. Standard output is data only (``streams``). Importing this
package stays cheap: a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from rayqueue import __version__
from rayqueue.cli import cluster, groups, local, streams, topics
from rayqueue.cli.common import say_error
from rayqueue.cli.consume import consume
from rayqueue.cli.produce import produce
from rayqueue.errors import RayQueueError

__all__ = ["app", "main"]

app = typer.Typer(
    name="rayqueue",
    help="A fault-tolerant, Kafka-like message queue made of Ray actors.",
    no_args_is_help=True,
    rich_markup_mode=None,  # Typer's tables cut the names of options on a terminal of 80 columns
    pretty_exceptions_show_locals=False,  # locals may hold secrets
)
for command in (
    local.demo,
    cluster.up,
    cluster.down,
    cluster.status,
    produce,
    consume,
    local.config,
    local.version,
):
    app.command()(command)
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rayqueue {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and nothing else.")
    ] = False,
) -> None:
    """A fault-tolerant, Kafka-like message queue made of Ray actors."""


def main() -> None:
    """The entry point: an error of ours is one sentence, not a traceback."""
    streams.allow()
    try:
        app()
    except RayQueueError as error:
        say_error(error)
        sys.exit(1)
    except Exception:  # noqa: BLE001  # nobody foresaw it: all that is known is shown
        print(traceback.format_exc(), streams.last_words(), sep="", end="", file=streams.stderr())
        sys.exit(1)
