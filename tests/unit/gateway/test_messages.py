"""Records of gRPC's messages as columns: by the size of the batch where that is enough, by each field otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.gateway.operations import Columns
from rayqueue.gateway.rpc.messages import columns_of
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb

_VALUES = st.one_of(
    st.none(), st.binary(max_size=3), st.sampled_from([b"x" * size for size in (119, 127, 128, 20_000)])
)
_RECORDS = st.fixed_dictionaries(
    {"value": _VALUES},
    optional={
        "key": st.one_of(st.none(), st.binary(max_size=2)),
        "priority": st.integers(0, 300),
        "partition": st.one_of(st.none(), st.integers(0, 300)),
        "timestamp_ms": st.one_of(st.none(), st.integers(0, 2**40)),
        "headers": st.lists(st.just(common_pb2.Header(name="h", value=b"v")), max_size=1),
    },
)


def decoded(records: list[dict[str, Any]]) -> tuple[Any, Columns]:
    sent = pb.AppendRequest(topic="t", records=[common_pb2.NewRecord(**each) for each in records])
    request = pb.AppendRequest.FromString(sent.SerializeToString())
    return request.records, columns_of(request.records, request.ByteSize() - pb.AppendRequest(topic="t").ByteSize())


@pytest.mark.slow
@given(st.lists(_RECORDS, max_size=5))
def test_no_field_of_any_record_is_missed(records: list[dict[str, Any]]) -> None:
    _, made = decoded(records)
    assert made.values == [each["value"] for each in records]
    for name, column in {
        "key": made.keys,
        "priority": made.priorities,
        "partition": made.partitions,
        "timestamp_ms": made.timestamps_ms,
    }.items():
        empty: Any = 0 if name == "priority" else None
        wanted = [each.get(name, empty) for each in records]
        assert (column or [empty] * len(records)) == wanted, name
    headers = [tuple((header.name, header.value) for header in each.get("headers", ())) for each in records]
    assert (made.headers or [()] * len(records)) == headers


def test_what_has_values_only_is_seen_by_its_size() -> None:
    """A field that this release does not know makes the size another one: then each record is asked."""
    records, made = decoded([{"value": b"x" * size} for size in (1, 100, 127, 128, 16_383, 16_384)])
    assert made == Columns([each.value for each in records])
    assert columns_of(records, records[0].ByteSize()) == made
