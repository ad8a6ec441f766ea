"""`rayqueue transactions`, on the queue in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from rayqueue.cli import app, transactions
from rayqueue.errors import TransactionAbortedError, UnknownTransactionError
from rayqueue.protocol.transactions import TransactionInfo
from rayqueue.testing import memory

runner = CliRunner()


@pytest.fixture
def rq(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:

        @contextmanager
        def connected(*_: object) -> Iterator[memory.MemoryQueue]:
            yield made

        monkeypatch.setattr(transactions, "connected", connected)
        made.create_topic("orders")
        yield made


def told(*words: str) -> Any:
    return json.loads(runner.invoke(app, ["transactions", *words, "--json"], catch_exceptions=False).output)


def shown(*words: str) -> str:
    return runner.invoke(app, ["transactions", *words], catch_exceptions=False).output


def test_ids_are_listed_and_what_is_open_is_aborted(rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "COLUMNS", "200"
    )  # an id is broken over two lines where it must be: the process's number may be long
    assert "No transaction is open" in shown("list")
    assert "There is no transactional id" in shown("list", "--all")
    tx = rq.producer(transactional_id="billing-1").transaction()
    tx.begin()
    tx.send("orders", b"x").result(timeout_ms=5000)
    (row,) = told("list", "--all")
    assert (row["transactional_id"], row["timeout_ms"]) == ("billing-1", 60_000)
    assert "billing-1" in shown("list", "--all")
    assert told("abort", "billing-1") == {"transactional_id": "billing-1", "aborted": True}
    with pytest.raises(TransactionAbortedError):
        tx.commit()
    with pytest.raises(UnknownTransactionError):
        shown("abort", "nobody")


def test_the_oldest_is_first_and_one_past_its_timeout_is_red() -> None:
    young = TransactionInfo("young", 1, 0, "here", 60_000, "open", 5_000, ("orders-0.1",))
    late = TransactionInfo("late", 2, 7, "there", 1_000, "open", 9_000, ("orders-0.1", "orders-1.1"))
    made = transactions.transactions_table([young, late])
    assert [row.style for row in made.rows] == ["red", None]
    assert list(made.columns[0].cells) == ["late", "young"]
    assert list(made.columns[2].cells) == ["9.0 s", "5.0 s"]
