"""`rayqueue keys`: API keys of the gateway: create, list, revoke, grant."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue
    from rayqueue.gateway.keys import KeyStore
    from rayqueue.gateway.principals import Key

app = typer.Typer(
    help="API keys of the gateway: create, list, revoke, grant.", no_args_is_help=True, rich_markup_mode=None
)

_GRANT = "VERB:KIND:NAME, such as publish:topic:orders or consume:group:billing*"
KeyId = Annotated[str, typer.Argument(help="The key's id, as `rayqueue keys list` shows it.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    grants: Annotated[list[str] | None, typer.Option("--grant", metavar="GRANT", help=_GRANT)] = None,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once, and kept by nobody. As soon as there is one, every request needs one."""
    with connected(address, data_dir, namespace) as rq:
        token, key = _store(rq).create(name, grants or [])
    if as_json:
        print_json({**_shown(key), "key": token.text})
        return
    out = console()
    out.print(f"Key {key.key_id} for {key.name}. It is shown this once:")
    out.print(token.text, soft_wrap=True, markup=False)
    if not key.grants:
        out.print(f"It may do nothing yet: `rayqueue keys grant {key.key_id} publish:topic:orders`", markup=False)


@app.command("list")
def list_keys(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Every key there ever was, and what it may do."""
    with connected(address, data_dir, namespace) as rq:
        keys = _store(rq).ring().keys
    if as_json:
        print_json([_shown(key) for key in keys])
        return
    made = table("id", "name", "created", "state", "grants", title="Keys")
    for key in keys:
        revoked = key.revoked_ms is not None
        state = "revoked" if revoked else "good"
        add(
            made,
            key.key_id,
            key.name,
            _time(key.created_ms),
            state,
            ", ".join(map(str, key.grants)),
            style="red" if revoked else None,
        )
    console().print(made)


@app.command()
def revoke(
    key_id: KeyId,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """End a key, for good. Gateways hear of it within moments; streams that it has open end."""
    with connected(address, data_dir, namespace) as rq:
        key = _store(rq).revoke(key_id)
    if as_json:
        print_json(_shown(key))
    else:
        console().print(f"Key {key.key_id} ({key.name}) is revoked.", markup=False)


@app.command()
def grant(
    key_id: KeyId,
    grants: Annotated[list[str], typer.Argument(metavar="GRANT...", help=_GRANT)],
    take_back: Annotated[bool, typer.Option("--take-back", help="Take these away instead.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Let a key do more, or less."""
    with connected(address, data_dir, namespace) as rq:
        key = _store(rq).grant(key_id, grants, take_back=take_back)
    if as_json:
        print_json(_shown(key))
    else:
        told = ", ".join(map(str, key.grants)) or "nothing"
        console().print(f"Key {key.key_id} ({key.name}) may now: {told}", markup=False, soft_wrap=True)


def _store(rq: RayQueue) -> KeyStore:
    from rayqueue.gateway.keys import KeyStore

    return KeyStore(rq)


def _shown(key: Key) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "name": key.name,
        "created_ms": key.created_ms,
        "revoked_ms": key.revoked_ms,
        "grants": [str(each) for each in key.grants],
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
