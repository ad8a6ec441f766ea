"""`rayqueue recover`: go on without a majority that is lost for good."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    connected,
    console,
    print_json,
    settings_of,
    spinner,
)
from rayqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from rayqueue.protocol.calls import RecoveryInfo

_LOOK_EVERY_S = 0.5
_SETTLE_S = 120.0


def recover(
    topic: Annotated[str | None, typer.Argument(help="The topic, of a partition that has lost its majority.")] = None,
    partition: Annotated[int | None, typer.Argument(min=0, help="The partition's number.")] = None,
    coordinator: Annotated[
        bool, typer.Option("--coordinator", help="The coordinator's own group, in the data directory of this node.")
    ] = False,
    survivor: Annotated[str | None, typer.Option(help="The replica that goes on; else the one that has most.")] = None,
    begin_at: Annotated[
        int | None,
        typer.Option(min=0, help="The offset at which a partition of which nothing is left begins anew, empty."),
    ] = None,
    broker: Annotated[str | None, typer.Option(help="Where it begins anew; else where it was.")] = None,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Do it; else it is only said what would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask again.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Go on without a majority that is lost for good. Records may be lost.

    Says in figures what is kept and what may be lost, and leaves a record of it. A partition of which no replica is
    left begins anew, empty, behind the offsets that it had given. A partition is recovered while the
    queue runs, the coordinator itself (--coordinator) while nothing runs, on the node that has what is left of it.
    """
    if coordinator and topic is None:
        _coordinator(survivor, unsafe, yes, data_dir, as_json)
        return
    if coordinator or topic is None or partition is None:
        raise typer.BadParameter("name a topic and a partition, or --coordinator")
    with connected(address, data_dir, namespace) as rq:
        plan = rq.recover_partition(topic, partition, survivor=survivor, begin_at=begin_at, broker=broker)
        if unsafe:
            _confirm(plan.said, yes)
            chosen = plan.survivor or None
            plan = rq.recover_partition(
                topic, partition, survivor=chosen, unsafe=True, begin_at=plan.begins_at, broker=broker
            )
            with spinner(f"waiting for {plan.survivor} to lead {topic}-{partition}"):
                deadline_s = time.monotonic() + _SETTLE_S
                while not _settled(rq.cluster().recoveries, plan.done) and time.monotonic() < deadline_s:
                    time.sleep(_LOOK_EVERY_S)
    if as_json:
        print_json(plan)
    elif unsafe:
        console().print(f"Done: {plan.said}.", markup=False)
    else:
        console().print(f"This would be done with --unsafe: {plan.said}.", markup=False)


def _settled(recoveries: Iterable[RecoveryInfo], done: RecoveryInfo | None) -> bool:
    return done is None or any(
        each.settled and each.epoch >= done.epoch for each in recoveries if each.group_id == done.group_id
    )


def _coordinator(survivor: str | None, unsafe: bool, yes: bool, data_dir: DataDir, as_json: bool) -> None:
    from rayqueue.actors.keeper.rescue import recover_coordinator

    settings = settings_of(data_dir, None)
    plan = recover_coordinator(settings.data_dir, survivor, unsafe=False)
    if unsafe:
        _confirm(plan.said, yes)
        plan = recover_coordinator(settings.data_dir, plan.survivor, unsafe=True)
    if as_json:
        print_json(plan)
    elif unsafe:
        console().print(f"Done: {plan.said}. `rayqueue up` starts it.", markup=False)
    else:
        console().print(f"This would be done with --unsafe: {plan.said}.", markup=False)


def _confirm(said: str, yes: bool) -> None:
    if yes:
        return
    console().print(f"{said}.", markup=False)
    if not typer.confirm("Give up what is lost?"):
        raise InvalidInputError("nothing was done")
