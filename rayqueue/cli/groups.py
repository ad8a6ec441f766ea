"""`rayqueue groups`: list, describe, delete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table
from rayqueue.errors import UnknownGroupError

if TYPE_CHECKING:
    from rayqueue.client.admin import GroupDescription

app = typer.Typer(help="Consumer groups: list, describe, delete.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The group.")]


@app.command("list")
def list_groups(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """All groups, and how far they are behind."""
    with connected(address, data_dir, namespace) as rq:
        groups = [rq.group(each.group) for each in rq.groups()]
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
        out.print(f"empty since {_time(group.empty_since_ms)}, expires {_time(group.expires_at_ms)}")
    members = table("member", "runs at", "instance", "reads", title="Members")
    for member in group.members:
        reads = ", ".join(str(grant.topic_partition) for grant in member.grants)
        add(members, member.member, member.client, member.instance or "", reads)
    partitions = table("partition", "committed", "lag", "read by", "pinned", title="Partitions", right=("lag",))
    for each in group.partitions:
        committed = ", ".join(f"{offset:,}" for _, offset in sorted(each.committed.items(), reverse=True))
        cells = (f"{each.topic}-{each.partition}", committed or "nothing", each.lag, each.member or "nobody")
        add(partitions, *cells, each.pinned, style=None if each.member else "yellow")
    out.print(members)
    out.print(partitions)


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


def groups_table(groups: Sequence[GroupDescription]) -> Table:
    columns = ("group", "state", "members", "generation", "partitions", "lag", "empty since", "expires")
    made = table(*columns, title="Groups", right=columns[2:6])
    for group in groups:
        cells = (group.group, group.state, len(group.members), group.generation, len(group.partitions), group.lag)
        add(made, *cells, _time(group.empty_since_ms), _time(group.expires_at_ms))
    return made


def _time(when_ms: int | None) -> str:
    return "" if when_ms is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(when_ms / 1000))
