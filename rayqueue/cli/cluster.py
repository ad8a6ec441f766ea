"""`rayqueue up`, `down` and `status`."""

from __future__ import annotations

from typing import Annotated

import typer

from rayqueue.cli import ray_head, streams
from rayqueue.cli.brokers import brokers_table, moves_table
from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    Overrides,
    ShowAll,
    connected,
    console,
    print_json,
    say_error,
    settings_of,
    spinner,
)
from rayqueue.cli.gateway import start_on
from rayqueue.cli.groups import described as groups_now
from rayqueue.cli.groups import groups_table, moment
from rayqueue.cli.health import drained, full_disks, losses, shortfalls
from rayqueue.cli.topics import described as topics_now
from rayqueue.cli.topics import sharing_of, topics_table, troubles_of
from rayqueue.errors import ClusterNotFoundError, NotLeaderError, OutcomeUnknownError
from rayqueue.protocol.topics import is_internal

_DASHBOARD_PORT = 8265
_EXIT_CODES = {"well": 0, "impaired": 1, "down": 2}


def up(
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    overrides: Overrides = None,
    dashboard: Annotated[bool, typer.Option(help="Run Ray's dashboard, if a Ray has to be started.")] = True,
    dashboard_port: Annotated[int, typer.Option(help="Where.")] = _DASHBOARD_PORT,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Start a gateway on each node, too: REST and gRPC.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a RayQueue on a Ray cluster, or find the one that runs. Without --address a Ray is started, on loopback.

    Everything goes on when the command has ended, until `rayqueue down`.
    """
    streams.claim()
    from rayqueue.client.connect import connect

    settings = settings_of(data_dir, namespace, overrides)
    with spinner("") as doing:
        head = ray_head.find(settings)
        if address is None and head is None:
            doing.update("starting Ray on this machine")
            head = ray_head.start(settings, dashboard_port=dashboard_port if dashboard else None)
        doing.update("starting RayQueue")
        with connect(ray_head.address_of(settings, address), settings=settings) as rq:
            info = rq.cluster()
            if gateway:
                doing.update("starting gateways")
            gateways = start_on(rq, None, {}) if gateway else []
    where = address or (head.address if head else "")
    if as_json:
        print_json(
            {"address": where, "dashboard": head.dashboard if head else None, "cluster": info, "gateways": gateways}
        )
        return
    out = console()
    out.print(f"RayQueue {info.cluster_id} runs on the Ray at {where}, with its data in {settings.data_dir}.")
    if head is not None and head.dashboard:
        out.print(f"Ray's dashboard: {head.dashboard} (it asks for a token: `ray get-auth-token` prints it)")
    if head is not None and not head.command:
        out.print(f"That Ray, and the queue with it, ends with process {head.pid}, which started it.")
    for each in gateways:
        out.print(f"Gateway {each['gateway']}: REST at {each['rest']} (documents: /docs), gRPC at {each['grpc']}")
    out.print(f"In Python: rayqueue.connect({where!r}, data_dir={str(settings.data_dir)!r})")


def down(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Stop RayQueue, and the Ray that `rayqueue up` started. In good order: the data stays."""
    settings = settings_of(data_dir, namespace)
    head = ray_head.find(settings)
    stopped = False
    try:
        with connected(address, data_dir, namespace) as rq, spinner("stopping RayQueue") as doing:
            rq.shutdown(on_progress=lambda ended, total: doing.update(f"stopping replicas, {ended} of {total} have"))
            stopped = True
    except ClusterNotFoundError:
        if head is None:
            raise
    if head is not None and head.command and address in (None, head.address):
        from rayqueue.client.shared import leave_ray

        with spinner("stopping Ray"):
            leave_ray()  # Ray ends a process that it finds connected to a cluster which is gone
            ray_head.stop(settings, head)
    if as_json:
        print_json({"stopped": stopped, "ray_stopped": head is not None and head.command})
    else:
        console().print("RayQueue has stopped. `rayqueue up` finds everything again.")


def status(
    show_all: ShowAll = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Whether all is well: brokers, topics, leaders, groups.

    Exit codes: 0 all is well, 1 impaired (it works, and somebody should look), 2 down: no queue runs, or a partition
    has no leader.
    """
    try:
        with connected(address, data_dir, namespace) as rq:
            info = rq.cluster()
            topics = topics_now(rq, include_internal=True)
            groups = groups_now(rq)
    except (ClusterNotFoundError, NotLeaderError, OutcomeUnknownError) as error:
        if as_json:
            print_json({"state": "down", "why": str(error), "troubles": [str(error)]})
        else:
            say_error(error)
        raise typer.Exit(_EXIT_CODES["down"]) from None
    troubles = [
        f"broker {each.broker} on {each.host} is gone"
        for each in info.brokers
        if not each.alive and (each.holds or not each.draining)
    ]
    troubles += losses(info, topics)
    troubles += [trouble for topic in topics for trouble in troubles_of(topic)]
    troubles += [*full_disks(info), *drained(info)]
    repairs = list(shortfalls(info, topics))
    alive = sum(each.alive for each in info.brokers)
    sharing = [sharing_of(topic, alive) for topic in topics]
    troubles += [trouble for needless, _ in sharing for trouble in needless]
    notes = [note for _, told in sharing for note in told]
    notes += [
        f"{each.group_id} went on without a majority at {moment(each.at_ms)}, in epoch {each.epoch}: {each.said}"
        for each in info.recoveries
    ]
    led = all(partition.leader is not None for topic in topics for partition in topic.partitions)
    state = "down" if not led else "impaired" if troubles else "well"
    # What is troubled is shown, whosever it is: it counts.
    topics = [each for each in topics if show_all or not is_internal(each.name) or any(troubles_of(each))]
    if as_json:
        facts = {"cluster": info, "topics": topics, "groups": groups}
        print_json({"state": state, "troubles": troubles, "repairs": repairs, "notes": notes, **facts})
        raise typer.Exit(_EXIT_CODES[state])
    out = console()
    out.print(f"cluster {info.cluster_id}, coordinator {info.coordinator} of term {info.term}")
    out.print(brokers_table(info))
    if info.rebalance is not None:
        left = sum(share.moves for share in info.rebalance.waiting)
        out.print(f"A rebalance is under way: {left} of {info.rebalance.moves} moves are still to be begun.")
    if info.moves:
        out.print(moves_table(info))
    if topics:
        out.print(topics_table(topics))
    if groups:
        out.print(groups_table(groups))
    for trouble in troubles:
        out.print(trouble, style="red", markup=False)
    for repair in repairs:
        out.print(repair, style="yellow", markup=False, soft_wrap=True)
    for note in notes:
        out.print(note, style="yellow", markup=False)
    if not troubles:
        out.print("All partitions have a leader and all their replicas.", style="green")
    raise typer.Exit(_EXIT_CODES[state])
