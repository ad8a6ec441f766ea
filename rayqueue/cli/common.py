"""The common part of all commands: their options, how they connect, and how they print."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from rayqueue.cli import streams
from rayqueue.errors import ClusterNotFoundError, ConfigError, RayQueueError

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue
    from rayqueue.config import Settings

ConfigPath = Annotated[
    Path | None, typer.Option("--config", help="A .toml or .yaml file, instead of rayqueue.toml in this directory.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as raft.heartbeat_ms=50.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Address = Annotated[
    str | None, typer.Option(help="Of the Ray cluster. Without it: the one that `rayqueue up` started, or any here.")
]
DataDir = Annotated[Path | None, typer.Option(help="Where the data is; the setting data_dir.")]
ShowAll = Annotated[bool, typer.Option("--all", help="Also topics that RayQueue made for itself: the gateway's.")]
Namespace = Annotated[str | None, typer.Option(help="The Ray namespace of the actors; the setting namespace.")]


def flags(overrides: Sequence[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` as arguments of ``Settings``."""
    found: dict[str, Any] = {}
    for override in overrides or ():
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override} (--set): must be KEY=VALUE, such as raft.heartbeat_ms=50")
        if key == "config_path":
            raise ConfigError("config_path (--set): is not a setting; name the file by --config")
        found[key] = None if value == "none" else value
    return found


def settings_of(data_dir: Path | None, namespace: str | None, overrides: Sequence[str] | None = None) -> Settings:
    from rayqueue.config import Settings

    given: dict[str, Any] = {"data_dir": data_dir, "namespace": namespace}
    return Settings(**{key: value for key, value in given.items() if value is not None} | flags(overrides))


@contextmanager
def connected(address: str | None, data_dir: Path | None, namespace: str | None) -> Iterator[RayQueue]:
    """The RayQueue that runs; ``ClusterNotFoundError`` if none does."""
    streams.claim()
    from rayqueue.cli import ray_head
    from rayqueue.client.connect import connect

    settings = settings_of(data_dir, namespace)
    with spinner("connecting"):
        rq = connect(ray_head.address_of(settings, address), create=False, settings=settings)
    with rq:
        yield rq


# -- printing ------------------------------------------------------------------------------------


def print_json(facts: Any) -> None:
    """One line, whatever the facts are made of."""
    print(json.dumps(_named(facts), default=str), file=streams.stdout())


def _named(value: Any) -> Any:
    """Every field by its name, also where it travels without (``array_like``)."""
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value):
        return {field.name: _named(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def console() -> Console:
    """For a command's outcome."""
    return Console(file=streams.stdout(), highlight=False)


def progress_console() -> Console:
    """For what is shown while a command works: never among its data."""
    return Console(file=streams.stderr(), highlight=False)


@contextmanager
def spinner(text: str) -> Iterator[Status]:
    """Shown on standard error, if that is a terminal, while a command works; with what a long wait waits for."""
    with progress_console().status(text) as doing:
        shown = _Shown(doing)
        waiting = logging.getLogger("rayqueue.client.waiting")
        waiting.addHandler(shown)
        waiting.propagate = False  # it is shown here
        try:
            yield doing
        finally:
            waiting.removeHandler(shown)
            waiting.propagate = True


class _Shown(logging.Handler):
    def __init__(self, doing: Status) -> None:
        super().__init__()
        self._doing = doing

    def emit(self, record: logging.LogRecord) -> None:
        if self._doing.console.is_terminal:
            self._doing.update(escape(record.getMessage()))
        else:
            self._doing.console.print(record.getMessage(), markup=False, soft_wrap=True)


def say_error(error: RayQueueError) -> None:
    """One sentence, and what to do if the command knows it."""
    words = Console(file=streams.stderr(), highlight=False)
    words.print(f"rayqueue: {error}", markup=False, style="red", soft_wrap=True)
    if isinstance(error, ClusterNotFoundError):
        words.print("Start one by `rayqueue up`, or say where it runs: --address HOST:PORT, --data-dir, --namespace.")


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    return made


def add(made: Table, *cells: Any, style: str | None = None) -> None:
    made.add_row(*(escape(text(cell)) for cell in cells), style=style)


def text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "none"
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:,.0f} {units[0]}" if units[0] == "B" else f"{number:,.1f} {units[0]}"


def given(**options: Any) -> dict[str, Any]:
    """The options that were named on the command line."""
    return {key: value for key, value in options.items() if value is not None}
