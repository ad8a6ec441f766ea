"""The ``rayqueue`` command.

Owns the words on the terminal and the exit codes: 0 all is well, 1 a
``RayQueueError``, 2 wrong usage. Every command prints a table for people and,
with ``--json``, the same facts for programs. Importing this package stays
cheap: a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from rayqueue.cli import cluster, groups, local, topics, traffic
from rayqueue.errors import RayQueueError

__all__ = ["app", "main"]

app = typer.Typer(
    name="rayqueue",
    help="A fault-tolerant, Kafka-like message queue made of Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold secrets
)
for command in (
    local.demo,
    cluster.up,
    cluster.down,
    cluster.status,
    traffic.produce,
    traffic.consume,
    local.config,
    local.version,
):
    app.command()(command)
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")


def main() -> None:
    """The entry point: an error of ours is one sentence, not a traceback."""
    try:
        app()
    except RayQueueError as error:
        Console(stderr=True, highlight=False).print(f"rayqueue: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(1)
