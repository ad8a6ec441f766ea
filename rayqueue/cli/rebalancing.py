"""`rayqueue rebalance`: the plan, then the moves with a progress bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    add,
    connected,
    console,
    print_json,
    progress_console,
    size,
    table,
)

if TYPE_CHECKING:
    from rayqueue.client.admin.rebalancing import RebalancePlan
    from rayqueue.client.handle import RayQueue

_LOOK_EVERY_S = 0.5
_INTERRUPTED = 130
_SHOWN = 40


def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the one that is under way.")] = False,
    wait: Annotated[bool, typer.Option(help="Until it is done. Ctrl-C stops it.")] = True,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Spread replicas and leaders over the brokers.

    Shows the plan first. What was stopped is continued by running this again: what is left is planned anew.
    """
    with connected(address, data_dir, namespace) as rq:
        if stop:
            before = rq.rebalance_progress()
            rq.stop_rebalance()
            _say_stopped(None if before is None else before.moves_left, as_json)
            return
        if rq.rebalance_progress() is None:
            plan = rq.plan_rebalance()
            if as_json and (dry_run or not plan.moves):
                print_json(plan)
            elif not as_json:
                _show(plan)
            if dry_run or not (plan.moves or plan.leaders):
                return
            if not yes:
                typer.confirm(f"Move {len(plan.moves)} replicas, about {size(plan.size_bytes)}?", abort=True)
            rq.rebalance(plan)
        elif not as_json:
            console().print("A rebalance is under way: this goes on with it.")
        if wait:
            _follow(rq, as_json)
        elif as_json:
            print_json(rq.rebalance_progress())


def _show(plan: RebalancePlan) -> None:
    out = console()
    if not (plan.moves or plan.leaders):
        out.print("Replicas and leaders are spread over the brokers as well as they can be.", style="green")
        return
    if plan.moves:
        moves = table("partition", "replica", "from", "to", "size", title="Plan", right=("size",))
        for move in plan.moves[:_SHOWN]:
            cells = (f"{move.topic}-{move.partition}", move.remove, move.source, move.target)
            add(moves, *cells, size(move.size_bytes))
        out.print(moves)
        if len(plan.moves) > _SHOWN:
            out.print(f"and {len(plan.moves) - _SHOWN} more")
    shares = table("broker", "replicas now", "then", right=("replicas now", "then"))
    for broker in sorted(plan.before):
        add(shares, broker, plan.before[broker], plan.after[broker])
    out.print(shares)
    if plan.leaders:
        told = ", ".join(f"{each.topic}-{each.partition} to {each.target}" for each in plan.leaders[:_SHOWN])
        out.print(f"Then leaders: {told}.", soft_wrap=True)


def _follow(rq: RayQueue, as_json: bool) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began_s = time.monotonic()
    done = 0
    try:
        with Progress(*columns, transient=True, disable=as_json, console=progress_console()) as bar:
            task = bar.add_task("moving", total=None, rate="")
            while (now := rq.rebalance_progress()) is not None:
                done = now.moves - now.moves_left
                words = f"{done} of {now.moves} moved" if now.moves_left else "leaders"
                rate = f"{now.bytes_per_s / 1e6:,.1f} MB/s"
                total = max(1, now.size_bytes)
                bar.update(task, description=words, total=total, completed=min(total, now.copied_bytes), rate=rate)
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        left = rq.rebalance_progress()
        rq.stop_rebalance()
        _say_stopped(0 if left is None else left.moves_left, as_json)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        print_json({"done": True, "seconds": round(time.monotonic() - began_s, 1)})
    else:
        console().print("Replicas and leaders are spread over the brokers.", style="green")


def _say_stopped(left: int | None, as_json: bool) -> None:
    if as_json:
        print_json({"stopped": left is not None, "moves_left": left})
    elif left is None:
        console().print("No rebalance is under way.")
    else:
        told = f"Stopped with {left} moves left: those under way are finished. `rayqueue rebalance` goes on."
        console().print(told, soft_wrap=True)
