"""`rayqueue groups`: list, describe, reset, delete."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table
from rayqueue.cli.consume import milliseconds
from rayqueue.errors import InvalidInputError, UnknownGroupError

if TYPE_CHECKING:
    from rayqueue.client.admin.admin import GroupDescription
    from rayqueue.client.admin.group_reset import GroupReset
    from rayqueue.client.handle import RayQueue

app = typer.Typer(help="Consumer groups: list, describe, reset, delete.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The group.")]


@app.command("list")
def list_groups(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """All groups, and how far they are behind."""
    with connected(address, data_dir, namespace) as rq:
        groups = described(rq)
    if as_json:
        print_json(groups)
    elif groups:
        console().print(groups_table(groups))
    else:
        console().print("There is no group. A consumer with group=NAME makes one.")


@app.command()
def describe(
    name: Name, address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """A group's members, and each partition with its position and lag."""
    with connected(address, data_dir, namespace) as rq:
        group = rq.group(name)
    if as_json:
        print_json(group)
        return
    out = console()
    out.print(f"{name}: {group.state}, generation {group.generation}, assignor {group.assignor}, lag {group.lag:,}")
    if group.expires_at_ms is not None:
        out.print(f"empty since {moment(group.empty_since_ms)}, expires {moment(group.expires_at_ms)}")
    members = table("member", "runs at", "instance", "reads", title="Members")
    for member in group.members:
        reads = ", ".join(str(grant.topic_partition) for grant in member.grants)
        add(members, member.member, member.client, member.instance or "", reads)
    partitions = table("partition", "committed", "lag", "read by", "pinned", title="Partitions", right=("lag",))
    for each in group.partitions:
        cells = (f"{each.topic}-{each.partition}", _offsets(each.committed), each.lag, each.member or "nobody")
        add(partitions, *cells, each.pinned, style=None if each.member else "yellow")
    out.print(members)
    out.print(partitions)


@app.command()
def reset(
    name: Name,
    topic: Annotated[
        str | None, typer.Option(help="Only this one, also where nothing is committed. Else all that it has read.")
    ] = None,
    partition: Annotated[list[int] | None, typer.Option(help="Only this one of --topic. May be repeated.")] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="Behind the last record.")] = False,
    to_offset: Annotated[int | None, typer.Option(min=0, help="To this offset.")] = None,
    to_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="To the first record that is not older: 2026-01-31T12:00, milliseconds, or -15m."
        ),
    ] = None,
    by: Annotated[int | None, typer.Option(help="So many offsets forward, or with -N back.")] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it. Without this nothing is changed.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Move the positions of a group without members. A dry run, unless --execute is given."""
    wanted = (to_earliest or None, to_latest or None, to_offset, to_time, by)
    if sum(each is not None for each in wanted) != 1:
        raise InvalidInputError("name one of --to-earliest, --to-latest, --to-offset, --to-time and --by")
    if partition and topic is None:
        raise InvalidInputError("--partition is of a topic: give --topic too")
    anchor: Any = "earliest" if to_earliest else "latest" if to_latest else to_offset
    time_ms = None if to_time is None else milliseconds(to_time, time.time())
    with connected(address, data_dir, namespace) as rq:
        done = rq.reset_group(
            name, to=anchor, to_time_ms=time_ms, by=by, topic=topic, partitions=partition or None, dry_run=not execute
        )
    if as_json:
        print_json(done)
        return
    out = console()
    if not done.positions:
        out.print(f"{name} has no position to move; name a --topic to give it some")
        return
    out.print(_moves_table(done))
    if execute:
        out.print(f"{sum(each.moves for each in done.positions):,} positions of {name} were moved", style="green")
    else:
        out.print("A dry run: nothing was changed. Add --execute to do it.", style="yellow")


def _moves_table(done: GroupReset) -> Table:
    made = table("partition", "from", "to", "log", "", title=f"Positions of {done.group}", right=("from", "to", "log"))
    for each in done.positions:
        cells = (f"{each.topic}-{each.partition}", _offsets(each.before), _offsets(each.after))
        note = each.note or ("" if each.moves else "stays")
        add(made, *cells, f"{each.start:,} to {each.end:,}", note, style="yellow" if each.note else None)
    return made


def _offsets(lanes: Mapping[int, int]) -> str:
    """Of each lane, the most urgent first; once, if they are all the same."""
    offsets = [offset for _, offset in sorted(lanes.items(), reverse=True)]
    shown = offsets[:1] if len(set(offsets)) == 1 else offsets
    return ", ".join(f"{offset:,}" for offset in shown) or "nothing"


@app.command()
def delete(
    name: Name, address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Forget a group that has no members, and its positions."""
    with connected(address, data_dir, namespace) as rq:
        existed = rq.delete_group(name)
    if not existed:
        raise UnknownGroupError(f"there is no group {name!r}", group=name)
    if as_json:
        print_json({"deleted": name})
    else:
        console().print(f"{name} is forgotten", style="green")


def described(rq: RayQueue) -> list[GroupDescription]:
    """As they are now. One that is deleted meanwhile is not among them."""
    found: list[GroupDescription] = []
    for each in rq.groups():
        with suppress(UnknownGroupError):
            found.append(rq.group(each.group))
    return found


def groups_table(groups: Sequence[GroupDescription]) -> Table:
    columns = ("group", "state", "members", "generation", "partitions", "lag", "empty since", "expires")
    made = table(*columns, title="Groups", right=columns[2:6])
    for group in groups:
        cells = (group.group, group.state, len(group.members), group.generation, len(group.partitions), group.lag)
        add(made, *cells, moment(group.empty_since_ms), moment(group.expires_at_ms))
    return made


def moment(when_ms: int | None) -> str:
    return "" if when_ms is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(when_ms / 1000))
