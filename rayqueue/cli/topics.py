"""`rayqueue topics`: create, list, describe, alter, delete."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    ShowAll,
    add,
    connected,
    console,
    given,
    print_json,
    progress_console,
    size,
    table,
)
from rayqueue.errors import InvalidInputError, UnknownTopicError
from rayqueue.protocol.topics import Declared, TopicSettings, declared

if TYPE_CHECKING:
    from rich.progress import Progress

    from rayqueue.client.admin.admin import PartitionDescription, TopicDescription
    from rayqueue.client.handle import RayQueue

app = typer.Typer(help="Topics: create, list, describe, alter, delete.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The topic.")]


def with_settings(
    settings: Iterable[Declared], *, defaults: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings; those that were named it gets as ``settings``."""
    wanted = tuple(settings)

    def of(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            flags = given(**{setting.name: arguments.pop(setting.name) for setting in wanted})
            values = {each.name: _value(each, flags[each.name]) for each in wanted if each.name in flags}
            command(settings=values, **arguments)

        own = inspect.signature(command, eval_str=True).parameters
        name, *rest = (each for each in own.values() if each.name != "settings")
        by_name = inspect.Parameter.KEYWORD_ONLY
        flags = [
            inspect.Parameter(each.name, by_name, default=None, annotation=_flag(each, defaults)) for each in wanted
        ]
        shown = [name, *flags, *(each.replace(kind=by_name) for each in rest)]
        # Typer reads both.
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in shown}
        return run

    return of


def _flag(setting: Declared, defaults: bool) -> Any:
    doc = f"{setting.doc} Default: {setting.default}." if defaults and setting.default else setting.doc
    flag = f"--{setting.name.replace('_', '-')}"
    if setting.kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=doc)]
    if setting.optional:
        metavar = "|".join((*setting.choices, "none")) if setting.choices else "NUMBER|none"
        return Annotated[str | None, typer.Option(flag, metavar=metavar, help=doc)]
    return Annotated[int | None, typer.Option(flag, help=doc)]


def _value(setting: Declared, given: Any) -> Any:
    """Typer has read the rest; what can be none is still a text."""
    if not isinstance(given, str) or given in setting.choices:
        return given
    if given == "none":
        return None
    if setting.choices or not given.isdigit():
        flag, kind = setting.name.replace("_", "-"), " or ".join(setting.choices) or "a number"
        raise InvalidInputError(f"--{flag} is {kind} or none, not {given!r}", key=setting.name)
    return int(given)


_SETTINGS = declared(TopicSettings).values()


@app.command()
@with_settings(_SETTINGS, defaults=True)
def create(
    name: Name,
    settings: dict[str, Any],
    if_missing: Annotated[bool, typer.Option("--if-missing", help="No error if it exists like this.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Make a topic, and wait until each partition has a leader."""
    with connected(address, data_dir, namespace) as rq, _progress(as_json) as bar:
        task = bar.add_task(f"creating {name}", total=settings.get("partitions", 1))
        info = rq.create_topic(
            name,
            if_missing=if_missing,
            on_progress=lambda led, total: bar.update(task, completed=led, total=total),
            **settings,
        )
    if as_json:
        print_json(info)
    else:
        console().print(
            f"{name}: {info.settings.partitions} partitions, {info.settings.replication} replicas each", style="green"
        )


@app.command("list")
def list_topics(
    show_all: ShowAll = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """All topics, their size and their leaders' health."""
    with connected(address, data_dir, namespace) as rq:
        topics = described(rq, include_internal=show_all)
    if as_json:
        print_json(topics)
    elif topics:
        console().print(topics_table(topics))
    else:
        console().print("There is no topic. `rayqueue topics create NAME` makes one.")


@app.command()
def describe(
    name: Name, address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """A topic's settings, and each partition with its replicas."""
    with connected(address, data_dir, namespace) as rq:
        topic = rq.topic(name)
    if as_json:
        print_json(topic)
        return
    out = console()
    settings = table("setting", "value", title=f"{name} (topic {topic.topic_id})")
    for key in topic.settings.__struct_fields__:
        add(settings, key, getattr(topic.settings, key))
    out.print(settings)
    columns = ("partition", "leader", "term", "start", "end", "size", "in sync", "replicas")
    partitions = table(*columns, title="Partitions", right=("term", "start", "end", "size", "in sync"))
    for each in topic.partitions:
        cells = (each.number, each.leader or "none", each.term, each.start_offset, each.end_offset)
        style = None if each.leader and each.healthy == len(each.replicas) else "red"
        in_sync = f"{each.in_sync} of {len(each.replicas)}"
        add(partitions, *cells, size(each.size_bytes), in_sync, _replicas(each), style=style)
    out.print(partitions)
    for trouble in troubles_of(topic):
        out.print(trouble, style="red")


@app.command()
@with_settings(each for each in _SETTINGS if each.changes != "never")
def alter(
    name: Name,
    settings: dict[str, Any],
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """More partitions, other retention, other limits. `none` takes a limit away."""
    if not settings:
        raise InvalidInputError("nothing to change: name a setting, such as --retention-ms 60000")
    with connected(address, data_dir, namespace) as rq:
        info = rq.alter_topic(name, **settings)
    if as_json:
        print_json(info)
    else:
        told = ", ".join(f"{key} = {getattr(info.settings, key)}" for key in settings)
        console().print(f"{name}: {told}", style="green")


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Delete a topic with all its records."""
    if not yes:
        typer.confirm(f"Delete {name} with all its records?", abort=True)
    with connected(address, data_dir, namespace) as rq:
        existed = rq.delete_topic(name)
    if not existed:
        raise UnknownTopicError(f"there is no topic {name!r}", name=name)
    if as_json:
        print_json({"deleted": name})
    else:
        console().print(f"{name} is deleted", style="green")


# -- shared with `rayqueue status` --------------------------------------------------------------


def described(rq: RayQueue, *, include_internal: bool) -> list[TopicDescription]:
    """As they are now. One that is deleted meanwhile is not among them."""
    found: list[TopicDescription] = []
    for each in rq.topics(include_internal=include_internal):
        with suppress(UnknownTopicError):
            found.append(rq.topic(each.name))
    return found


def topics_table(topics: Sequence[TopicDescription]) -> Table:
    columns = ("topic", "partitions", "replication", "records", "size", "state")
    made = table(*columns, title="Topics", right=columns[1:5])
    for topic in topics:
        troubled = any(True for _ in troubles_of(topic))
        add(
            made,
            topic.name,
            topic.settings.partitions,
            topic.settings.replication,
            topic.records,
            size(topic.size_bytes),
            "impaired" if troubled else "well",
            style="red" if troubled else None,
        )
    return made


def troubles_of(topic: TopicDescription) -> Iterator[str]:
    """Troubles that somebody should look at."""
    for partition in topic.partitions:
        if partition.leader is None:
            yield f"{topic.name}-{partition.number} has no leader"
        for replica in partition.replicas:
            if replica.problem is not None:
                where = f"{replica.replica_id} of {topic.name}-{partition.number} on {replica.broker}"
                yield f"{where}: {replica.problem}"
            elif partition.leader is not None and not replica.in_sync and replica.lag:
                where = f"{replica.replica_id} of {topic.name}-{partition.number} on {replica.broker}"
                yield f"{where} is not in sync: it lacks {replica.lag} entries of its leader's log"


def sharing_of(topic: TopicDescription, brokers: int) -> tuple[list[str], list[str]]:
    """Copies that share a node: those that need not, for there are enough brokers, and those that must."""
    needless = [
        f"{topic.name}-{partition.number} has several copies on {', '.join(partition.shared_brokers)}, "
        f"though there are {brokers} brokers: they survive that node's processes, not the node"
        for partition in topic.partitions
        if partition.shared_brokers and len({each.broker for each in partition.replicas}) < brokers
    ]
    sharing = sum(bool(partition.shared_brokers) for partition in topic.partitions) - len(needless)
    told = (
        f"{topic.name}: copies of {sharing} of {len(topic.partitions)} partitions share a node, for there are too few"
    )
    return needless, [told] if sharing else []


def _replicas(partition: PartitionDescription) -> str:
    return "\n".join(f"{each.replica_id} {each.role} on {each.broker}" for each in partition.replicas)


def _progress(as_json: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("partitions lead"))
    return Progress(*columns, transient=True, disable=as_json, console=progress_console())
