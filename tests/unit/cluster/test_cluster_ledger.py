"""The ledger of decided batch ids: against a model that forgets nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.cluster import ledger as module
from rayqueue.cluster.ledger import Ledger, Span
from rayqueue.errors import BatchConflictError, BatchForgottenError


def test_ids_that_follow_each_other_are_one_span() -> None:
    ledger = Ledger()
    for batch_id in (*range(100), 102, 101, 100):
        assert not ledger.has(batch_id, b"q", writer="w")
        ledger = ledger.add(batch_id, b"q")
    assert ledger == Ledger(None, (Span(0, 102, b"q"),))


@given(
    st.lists(st.tuples(st.integers(-5, 30), st.sampled_from([b"", b"a"])), max_size=60),
    st.integers(1, 6),
)
def test_what_it_says_is_so(batches: list[tuple[int, bytes]], most: int) -> None:
    """Whatever comes in whichever order: no id is called decided that is not, none undecided that is."""
    decided: dict[int, bytes] = {}
    ledger = Ledger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SPANS", most)
        for batch_id, identity in batches:
            try:
                if ledger.has(batch_id, identity, writer="w"):
                    assert decided[batch_id] == identity
                    continue
            except BatchConflictError:
                assert decided[batch_id] != identity
                continue
            except BatchForgottenError:
                continue
            assert batch_id not in decided
            decided[batch_id] = identity
            ledger = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.add(batch_id, identity)), type=Ledger)
            assert ledger.has(batch_id, identity, writer="w"), "the last one is always known"
            assert len(ledger.spans) <= most + 1
            assert [*ledger.spans] == sorted(ledger.spans, key=lambda span: span.first)
