"""`rayqueue transactions`: list, abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table

if TYPE_CHECKING:
    from rayqueue.protocol.transactions import TransactionInfo

app = typer.Typer(help="Transactions: list, abort.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The transactional id.")]


@app.command("list")
def list_transactions(
    everything: Annotated[bool, typer.Option("--all", help="Also ids that have nothing open.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Open transactions: since when, whose, and in which partitions."""
    with connected(address, data_dir, namespace) as rq:
        found = [each for each in rq.transactions() if everything or each.state != "idle"]
    if as_json:
        print_json(found)
    elif found:
        console().print(transactions_table(found))
    else:
        console().print("No transaction is open." if not everything else "There is no transactional id.")


@app.command()
def abort(
    name: Name, address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Abort what an id has open. Its producer may begin another one."""
    with connected(address, data_dir, namespace) as rq:
        ended = rq.abort_transaction(name)
    if as_json:
        print_json({"transactional_id": name, "aborted": ended})
    elif ended:
        console().print(f"the transaction of {name} is aborted", style="green")
    else:
        console().print(f"the transaction of {name} had ended already", style="yellow")


def transactions_table(found: Sequence[TransactionInfo]) -> Table:
    """The oldest first."""
    columns = ("id", "state", "age", "timeout", "owner", "partitions", "producer", "epoch")
    made = table(*columns, title="Transactions", right=("age", "timeout", "producer", "epoch"))
    for each in sorted(found, key=lambda each: -each.age_ms):
        late = each.state == "open" and each.age_ms > each.timeout_ms
        add(
            made,
            each.transactional_id,
            each.state,
            _seconds(each.age_ms) if each.state != "idle" else "",
            _seconds(each.timeout_ms),
            each.owner,
            ", ".join(each.partitions),
            each.producer_id,
            each.epoch,
            style="red" if late else None,
        )
    return made


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"
