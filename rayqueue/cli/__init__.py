"""The ``rayqueue`` command.

Owns the words on the terminal and the exit codes: 0 all is well, 1 a
``RayQueueError``, 2 wrong usage, 130 interrupted (`rayqueue status` has codes of
its own). Every command prints a table for people and, with ``--json``, the same
facts for programs. Standard output is data only (``streams``). Importing this
package stays cheap: a command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import traceback
from typing import Annotated, NoReturn

import typer

from rayqueue import __version__
from rayqueue.cli import brokers, cluster, gateway, groups, keys, local, queues, streams, topics, transactions
from rayqueue.cli.common import say_error
from rayqueue.cli.consume import consume
from rayqueue.cli.events import events
from rayqueue.cli.produce import produce
from rayqueue.cli.rebalancing import rebalance
from rayqueue.cli.recover import recover
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
    rebalance,
    events,
    recover,
    produce,
    consume,
    local.config,
    local.version,
):
    app.command()(command)
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")
app.add_typer(transactions.app, name="transactions")
app.add_typer(queues.app, name="queues")
app.add_typer(queues.dlq, name="dlq")
app.add_typer(brokers.app, name="brokers")
app.add_typer(gateway.app, name="gateway")
app.add_typer(keys.app, name="keys")
app.add_typer(brokers.partitions, name="partitions")


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


def main() -> NoReturn:
    """The entry point: an error of ours is one sentence, not a traceback.

    The process ends here, and not by taking down the interpreter with Ray and its threads in it, which takes half a
    second. Whatever has to be done at the end of a command is done by the command.
    """
    streams.allow()
    code = _run()
    streams.flush()
    os._exit(code)


def _run() -> int:
    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except RayQueueError as error:
        say_error(error)
        return 1
    except Exception:  # noqa: BLE001  # nobody foresaw it: all that is known is shown
        print(traceback.format_exc(), streams.last_words(), sep="", end="", file=streams.stderr())
        return 1
    return 0
