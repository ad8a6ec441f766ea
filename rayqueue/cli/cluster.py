"""`rayqueue up`, `down` and `status`."""

from __future__ import annotations

from typing import Annotated

import typer

from rayqueue.cli import ray_head
from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    Overrides,
    add,
    connected,
    console,
    print_json,
    settings_of,
    table,
)
from rayqueue.cli.groups import groups_table
from rayqueue.cli.topics import topics_table, troubles_of
from rayqueue.errors import ClusterNotFoundError

_DASHBOARD_PORT = 8265


def up(
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    overrides: Overrides = None,
    dashboard: Annotated[bool, typer.Option(help="Run Ray's dashboard, if a Ray has to be started.")] = True,
    dashboard_port: Annotated[int, typer.Option(help="Where.")] = _DASHBOARD_PORT,
    as_json: AsJson = False,
) -> None:
    """Start a RayQueue on a Ray cluster, or find the one that runs. Without --address a Ray is started, on loopback.

    Everything goes on when the command has ended, until `rayqueue down`.
    """
    from rayqueue.client.connection import connect

    settings = settings_of(data_dir, namespace, overrides)
    with console().status("") as doing:
        head = ray_head.find(settings)
        if address is None and head is None:
            doing.update("starting Ray on this machine")
            head = ray_head.start(settings, dashboard_port=dashboard_port if dashboard else None)
        doing.update("starting RayQueue")
        with ray_head.quiet():
            rq = connect(ray_head.address_of(settings, address), settings=settings)
            try:
                info = rq.cluster()
            finally:
                rq.close()
    where = address or (head.address if head else "")
    if as_json:
        print_json({"address": where, "dashboard": head.dashboard if head else None, "cluster": info})
        return
    out = console()
    out.print(f"RayQueue {info.cluster_id} runs on the Ray at {where}, with its data in {settings.data_dir}.")
    if head is not None and head.dashboard:
        out.print(f"Ray's dashboard: {head.dashboard}")
    out.print(f"In Python: rayqueue.connect({where!r}, data_dir={str(settings.data_dir)!r})")


def down(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Stop RayQueue in good order, and the Ray that `rayqueue up` started. The data stays."""
    settings = settings_of(data_dir, namespace)
    head = ray_head.find(settings)
    stopped = False
    with console().status("stopping"):
        try:
            with connected(address, data_dir, namespace) as rq:
                rq.shutdown()
                stopped = True
        except ClusterNotFoundError:
            if head is None:
                raise
        if head is not None and address in (None, head.address):
            ray_head.stop(settings, head)
    if as_json:
        print_json({"stopped": stopped, "ray_stopped": head is not None})
    else:
        console().print("RayQueue has stopped. `rayqueue up` finds everything again.")


def status(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Is all well? Brokers, topics, partitions without a leader, groups that lag."""
    with connected(address, data_dir, namespace) as rq:
        info = rq.cluster()
        topics = [rq.topic(each.name) for each in rq.topics()]
        groups = [rq.group(each.group) for each in rq.groups()]
    if as_json:
        print_json({"cluster": info, "topics": topics, "groups": groups})
        return
    out = console()
    out.print(f"cluster {info.cluster_id}, coordinator {info.coordinator} of term {info.term}")
    brokers = table("broker", "host", "state", "replicas", title="Brokers", right=("replicas",))
    for broker in info.brokers:
        state = "alive" if broker.alive else "gone"
        add(brokers, broker.broker, broker.host, state, broker.replicas, style=None if broker.alive else "red")
    out.print(brokers)
    if topics:
        out.print(topics_table(topics))
    if groups:
        out.print(groups_table(groups))
    troubles = [trouble for topic in topics for trouble in troubles_of(topic)]
    for trouble in troubles:
        out.print(trouble, style="red")
    if not troubles:
        out.print("All partitions have a leader and all their replicas.", style="green")
