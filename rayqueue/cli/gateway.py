"""`rayqueue gateway`: start, list, stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayqueue.cli.common import (
    Address,
    AsJson,
    DataDir,
    Namespace,
    add,
    connected,
    console,
    given,
    print_json,
    spinner,
    table,
)
from rayqueue.errors import MissingDependencyError

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue

app = typer.Typer(
    help="REST and gRPC for callers outside of the Ray cluster.",
    no_args_is_help=False,
    invoke_without_command=True,
    rich_markup_mode=None,
)


def fleet() -> Any:
    """``MissingDependencyError`` says what to install."""
    try:
        from rayqueue.gateway import fleet as found
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rayqueue"):
            raise
        raise MissingDependencyError(
            f"the gateway needs {error.name}, on every node: pip install 'rayqueue[gateway]'"
        ) from None
    return found


@app.callback()
def start(
    context: typer.Context,
    count: Annotated[int | None, typer.Option(min=1, help="How many. Without it: one on each node.")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen. Beyond loopback only with keys and TLS.")] = None,
    rest_port: Annotated[int | None, typer.Option(help="Of REST.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Of gRPC.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The certificate (PEM), on every node.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Start gateways, and show where they listen. They go on when the command has ended."""
    if context.invoked_subcommand is not None:
        return
    with connected(address, data_dir, namespace) as rq:
        changes = given(
            host=host, rest_port=rest_port, grpc_port=grpc_port, tls_cert_path=tls_cert, tls_key_path=tls_key
        )
        with spinner("starting gateways"):
            found = start_on(rq, count, changes)
    if as_json:
        print_json(found)
    else:
        _show(found)


def start_on(rq: RayQueue, count: int | None, changes: dict[str, Any]) -> list[dict[str, Any]]:
    from rayqueue.config import GatewaySettings

    settings = GatewaySettings(**{**rq.settings.gateway.model_dump(), **changes})
    found: list[dict[str, Any]] = fleet().start(rq, settings, count=count)
    return found


@app.command("list")
def list_gateways(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Every gateway, and where it listens."""
    with connected(address, data_dir, namespace) as rq:
        found = fleet().running(rq)
    if as_json:
        print_json(found)
    else:
        _show(found)


@app.command()
def stop(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Stop all gateways in good order.

    What is under way is answered, and sessions leave their groups.
    """
    with connected(address, data_dir, namespace) as rq, spinner("stopping gateways"):
        count = fleet().stop(rq)
    if as_json:
        print_json({"stopped": count})
    else:
        console().print(f"{count} gateways have stopped.")


def _show(found: list[dict[str, Any]]) -> None:
    gateways = table("gateway", "REST", "gRPC", "problem", title="Gateways")
    for each in found:
        problem = each.get("problem", "")
        shown = (each.get("gateway", each["name"]), each.get("rest", ""), each.get("grpc", ""), problem)
        add(gateways, *shown, style="red" if problem else None)
    console().print(gateways)
