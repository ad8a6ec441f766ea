"""`rayqueue events`: what happened to brokers and replicas."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table
from rayqueue.cli.groups import moment

_LOOK_EVERY_S = 1.0


def events(
    last: Annotated[int, typer.Option("--last", min=1, help="So many, the newest.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Events of brokers and replicas: lost, replaced, moved."""
    with connected(address, data_dir, namespace) as rq:
        told = rq.events()[-last:]
        if as_json and not follow:
            print_json(told)
            return
        if not follow:
            found = table("time", "event", "of", "text", title="Events")
            for each in told:
                add(found, moment(each.at_ms), each.kind, each.subject, each.text)
            console().print(found)
            return
        seen = 0
        while True:
            for each in told:
                seen = each.number
                if as_json:
                    print_json(each)
                else:
                    console().print(f"{moment(each.at_ms)} {each.kind} {each.subject} {each.text}", markup=False)
            time.sleep(_LOOK_EVERY_S)
            told = rq.events(after=seen)
