"""The places of written records, encoded by the run: the same bytes as protobuf's and msgspec's own, one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.client.producer.delivery import Deliveries, Outcome, Part, RecordMetadata
from rayqueue.gateway.rest.routes import ROUTES
from rayqueue.gateway.rest.serving import App, make_app
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.server import Gateway
from rayqueue.gateway.written import Places, Span, as_json, as_protobuf, packed, spans_of, unpacked

_OFFSETS = st.one_of(st.integers(0, 400), st.integers(16_300, 16_400), st.integers(2**62, 2**62 + 300))
_TIMES = st.one_of(st.integers(-5, 5), st.integers(1_700_000_000_000, 1_700_000_000_002))


@st.composite
def _deliveries(draw: st.DrawFn) -> Deliveries:
    """As ``send_many`` leaves them: parts of batches, some of which were cut; and maybe in another order."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 300))
        times: Any = draw(st.one_of(_TIMES, st.lists(_TIMES, min_size=count, max_size=count)))
        outcome = Outcome("t", draw(st.integers(0, 300)), times)
        start = draw(st.integers(0, count - 1))
        if count > 1 and draw(st.booleans()):
            at = draw(st.integers(1, count - 1))
            for each in outcome.cut(at):
                each.resolve(draw(_OFFSETS))
        else:
            outcome.resolve(draw(_OFFSETS))
        parts.append(Part(outcome, start, count - start))
    total = sum(part.count for part in parts)
    order = draw(st.one_of(st.none(), st.permutations(range(total)))) if total < 40 else None
    return Deliveries(parts, order)


@pytest.mark.slow
@given(_deliveries())
def test_the_bytes_are_those_of_each_record_on_its_own(deliveries: Deliveries) -> None:
    written = deliveries.result()
    one_by_one = [common_pb2.Written(partition=p, offset=o or 0, timestamp_ms=t) for _, p, o, t in written]
    answer = pb.ProduceResponse(number=7, records=one_by_one).SerializeToString()
    field = pb.ProduceResponse.RECORDS_FIELD_NUMBER
    assert pb.ProduceResponse(number=7).SerializeToString() + as_protobuf(written, field) == answer
    assert as_protobuf(list(written), field) == as_protobuf(written, field)
    told = [{"partition": p, "offset": o, "timestamp_ms": t} for _, p, o, t in written]
    assert as_json(written) == as_json(list(written)) == msgspec.json.encode(told)


@given(_deliveries())
@pytest.mark.slow
def test_what_is_kept_of_an_answer_tells_the_same(deliveries: Deliveries) -> None:
    written = deliveries.result()
    kept = packed(spans_of(written))
    assert as_json(Places("t", unpacked(kept))) == as_json(written)
    assert as_protobuf(Places("t", unpacked(kept)), 1) == as_protobuf(written, 1)
    assert packed(spans_of(list(written))) == kept


def test_what_is_kept_of_an_answer_is_small() -> None:
    assert len(packed([Span(3, 10**9, 1, 1_700_000_000_000)])) < 30
    alike = [Span(1, 10**9 + row, 1, 1_700_000_000_000) for row in range(10_000)]
    assert len(packed(alike)) < 30
    spread = [Span(row % 16, 10**9 + row // 16, 1, 1_700_000_000_000) for row in range(10_000)]
    assert len(packed(spread)) < 4 * 10_000 + 200
    assert unpacked(packed(spread)) == spread
    assert unpacked(packed([])) == []


def test_nothing_is_an_empty_list() -> None:
    assert as_json([]) == b"[]"
    assert as_protobuf([], 1) == b""
    assert as_json([RecordMetadata("t", 1, None, 5)]) == b'[{"partition":1,"offset":0,"timestamp_ms":5}]'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "records", "~", "ä", "{topic}", "a b"])
def test_a_route_is_found_as_fastapi_finds_it(gateway: Gateway, name: str) -> None:
    app: Any = make_app(gateway)
    assert isinstance(app, App)
    for route in ROUTES:
        parts = [name if part[:1] == "{" else part for part in route.path.split("/")]
        found = app.find(route.method, "/".join(parts))
        scope = {"type": "http", "method": route.method, "path": "/".join(parts), "root_path": "", "headers": []}
        other: Any
        for other in app.routes:
            match, more = other.matches(scope)
            if match.value == 2:
                assert found is not None
                assert found[0].route.path == other.path
                assert found[1] == more["path_params"]
                break
        else:
            pytest.fail(f"{route.path} is not found by FastAPI")
    for path in ("", "/", "//", "/v1/topics//records", "/v1/topics/a/records/", "/V1/topics", "v1/topics"):
        assert app.find("GET", path) is None
    assert app.find("get", "/v1/topics") is None
