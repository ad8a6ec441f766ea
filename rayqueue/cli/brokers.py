"""`rayqueue brokers`: list, decommission, restart, join-status; and `rayqueue partitions`: move, transfer-leader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    add,
    connected,
    console,
    print_json,
    size,
    spinner,
    table,
)

if TYPE_CHECKING:
    from rayqueue.protocol.calls import Broker, ClusterInfo, MoveInfo

app = typer.Typer(help="Brokers: list, restart, hand over, decommission.", no_args_is_help=True, rich_markup_mode=None)
partitions = typer.Typer(help="Partitions: move a replica, or who leads.", no_args_is_help=True, rich_markup_mode=None)

_LOOK_EVERY_S = 0.5


@app.command("list")
def list_brokers(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Every broker, what it holds, and what is being moved."""
    with connected(address, data_dir, namespace) as rq:
        info = rq.cluster()
    if as_json:
        print_json({"brokers": info.brokers, "moves": info.moves, "lost": info.lost})
        return
    console().print(brokers_table(info))
    if info.moves:
        console().print(moves_table(info))


@app.command()
def decommission(
    broker: Annotated[str, typer.Argument(help="The broker that is to be emptied.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it be used again.")] = False,
    wait: Annotated[bool, typer.Option(help="Until it is empty. Ctrl-C only ends the waiting.")] = True,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Move everything away from a broker, while it serves. Then its node can be stopped."""
    with connected(address, data_dir, namespace) as rq:
        info = rq.decommission(broker, cancel=cancel)
        if wait and not cancel:
            with spinner("") as doing:
                while (told := _of(info, broker)) is not None and told.holds:
                    doing.update(_left(told, info))
                    time.sleep(_LOOK_EVERY_S)
                    info = rq.cluster()
    if as_json:
        print_json(_of(info, broker))
    elif cancel:
        console().print(f"{broker} is used again. What was moved stays where it is.")
    elif (told := _of(info, broker)) is not None and told.holds:
        console().print(f"{broker} is being emptied: {told.holds} replicas are still there.")
    elif told is None:
        console().print(f"{broker} is empty and, as its node is gone, forgotten.")
    else:
        console().print(f"{broker} is empty. Its node can be stopped; the broker is forgotten then.")


@app.command("hand-over")
def hand_over(
    broker: Annotated[str, typer.Argument(help="The broker whose node is to be stopped.")],
    timeout_s: Annotated[int, typer.Option(min=1, help="How long that may take.")] = 60,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Let others lead, before a node is stopped."""
    with connected(address, data_dir, namespace) as rq:
        told = rq.hand_over(broker, timeout_ms=timeout_s * 1000)
    if as_json:
        print_json(told)
        return
    console().print(f"{broker} has handed over {told.handed_over} groups. Stop its node now.")
    if told.still_leads:
        console().print(f"These have all their copies there, and stop with it: {', '.join(told.still_leads)}")


@app.command()
def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which brokers; all that are alive, if none is named.")
    ] = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One after the other, each once the one before has caught up.")
    ] = False,
    timeout_s: Annotated[
        int, typer.Option(min=1, help="How long one broker may take to be spared, and to be back.")
    ] = 120,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Restart brokers while the queue serves.

    Their replicas stop in good order, those that lead hand over first, and are started again.

    Without --rolling it takes one broker. A restart that was interrupted can be begun again.
    """
    with connected(address, data_dir, namespace) as rq:
        wanted = names or [each.broker for each in rq.cluster().brokers if each.alive]
        if len(wanted) > 1 and not rolling:
            raise typer.BadParameter("several brokers are restarted one after the other: say --rolling")
        done = []
        for broker in wanted:
            with spinner(f"restarting {broker}") as doing:
                told = rq.restart_broker(
                    broker,
                    timeout_ms=timeout_s * 1000,
                    on_progress=lambda back, total, broker=broker: doing.update(  # type: ignore[misc]
                        f"restarting {broker}: {back} of {total} replicas are back"
                    ),
                )
            done.append(told)
            if not as_json:
                left = f"; without a leader meanwhile: {', '.join(told.left_without)}" if told.left_without else ""
                console().print(
                    f"{broker}: {told.replicas} replicas restarted in {told.seconds:.1f} s, "
                    f"{told.handed_over} led and handed over{left}"
                )
    if as_json:
        print_json(done)


@partitions.command()
def move(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    partition: Annotated[int, typer.Argument(min=0, help="The partition's number.")],
    source: Annotated[str, typer.Option("--from", help="The broker that has a replica of it.")],
    target: Annotated[str, typer.Option("--to", help="A broker that has none.")],
    wait: Annotated[bool, typer.Option(help="Until it is done. Ctrl-C only ends the waiting.")] = True,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Move a replica of a partition, while it serves."""
    with connected(address, data_dir, namespace) as rq:
        begun = rq.move_replica(topic, partition, source=source, target=target)
        if wait:
            with spinner(f"moving {topic}-{partition} from {source} to {target}"):
                while any(_same(each, begun) for each in rq.cluster().moves):
                    time.sleep(_LOOK_EVERY_S)
    if as_json:
        print_json(begun)
    else:
        done = f"{begun.add} is on {target} now" if wait else f"{begun.add} is being made on {target}"
        console().print(f"{topic}-{partition}: {done}, instead of {begun.remove} on {source}.")


@partitions.command()
def transfer_leader(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    partition: Annotated[int, typer.Argument(min=0, help="The partition's number.")],
    target: Annotated[str, typer.Option("--to", help="A broker that has a replica of it.")],
    timeout_ms: Annotated[int, typer.Option(min=1, help="How long to try.")] = 5_000,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Let the replica on another broker lead a partition."""
    with connected(address, data_dir, namespace) as rq:
        rq.transfer_leader(topic, partition, target, timeout_ms=timeout_ms)
    if as_json:
        print_json({"topic": topic, "partition": partition, "leader": target})
    else:
        console().print(f"{topic}-{partition} is led by {target} now.")


@app.command("join-status")
def join_status(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Brokers that have joined, and replicas on their way to them."""
    with connected(address, data_dir, namespace) as rq:
        found = rq.join_status()
    if as_json:
        print_json(found)
        return
    columns = ("broker", "host", "rack", "state", "replicas", "leads", "arriving", "planned", "left")
    made = table(*columns, title="Brokers", right=columns[4:])
    for each in found:
        state = "to be emptied" if each.draining else "joined" if each.joined else "gone"
        copied = sum(move.copied_bytes for move in each.arriving)
        total = sum(move.size_bytes or 0 for move in each.arriving)
        arriving = f"{len(each.arriving)} ({size(copied)} of {size(total)})" if each.arriving else "0"
        planned = f"{each.planned} ({size(each.planned_bytes)})" if each.planned else "0"
        cells = (each.broker, each.host, each.rack, state, each.replicas, _count(each.leaders), arriving, planned)
        add(made, *cells, duration(each.left_ms), style=None if each.joined else "red")
    console().print(made)


def brokers_table(info: ClusterInfo) -> Table:
    columns = ("broker", "host", "rack", "state", "replicas", "leads", "more fit", "disk free")
    brokers = table(*columns, title="Brokers", right=columns[4:])
    for broker in info.brokers:
        fit = "" if broker.room is None or broker.draining else broker.room
        free = f"{100 * broker.disk_free_bytes // broker.disk_bytes} %" if broker.disk_bytes else ""
        warned = broker.draining or broker.leaving or broker.nearly_full
        style = "red" if not broker.alive else "yellow" if warned else None
        cells = (broker.broker, broker.host, broker.rack, state_of(broker), broker.replicas, _count(broker.leaders))
        add(brokers, *cells, fit, free, style=style)
    return brokers


def _count(told: int | None) -> str | int:
    return "" if told is None else told


def state_of(broker: Broker) -> str:
    if broker.leaving:
        return f"drained by Ray, {broker.holds} left"
    if not broker.draining:
        full = "alive, disk nearly full" if broker.nearly_full else "alive"
        return full if broker.alive else "gone"
    left = f"being emptied, {broker.holds} left" if broker.holds else "empty, can be stopped"
    return left if broker.alive else f"gone, {left}"


def moves_table(info: ClusterInfo) -> Table:
    columns = ("partition", "old", "new", "on", "reason", "copied", "left")
    moves = table(*columns, title="Being moved", right=columns[5:])
    for move in info.moves:
        copied = "" if move.size_bytes is None else f"{size(move.copied_bytes)} of {size(move.size_bytes)}"
        cells = (f"{move.topic}-{move.partition}", move.remove, move.add, move.broker, move.why, copied)
        add(moves, *cells, duration(move.left_ms))
    return moves


def duration(left_ms: int | None) -> str:
    """As people read it; nothing if nothing can be said."""
    if left_ms is None:
        return ""
    seconds = -(-left_ms // 1000)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _left(told: Broker, info: ClusterInfo) -> str:
    """What is still to be done; and, if nothing is being done, the first thing that it waits for."""
    text = f"{told.holds} replicas are still on {told.broker}, {len(info.moves)} are being moved"
    if info.moves or not info.waiting:
        return text
    each, more = info.waiting[0], len(info.waiting) - 1
    return f"{text}; {each.topic}-{each.partition}: {each.why}" + (f" (and {more} more)" if more else "")


def _of(info: ClusterInfo, broker: str) -> Broker | None:
    return next((each for each in info.brokers if each.broker == broker), None)


def _same(one: MoveInfo, other: MoveInfo) -> bool:
    return (one.topic, one.partition, one.add) == (other.topic, other.partition, other.add)
