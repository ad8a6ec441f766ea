"""Requests to the gateway as targets: bodies and queries of REST, messages of gRPC, through all that is done to them
before the queue is asked.

What is taken must be what a partition can read, and what a caller can be shown again: records go through a batch,
and back out in each form of an answer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from rayqueue.client.producer.columns import check_columns
from rayqueue.config import GatewaySettings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.gateway import queues
from rayqueue.gateway.operations import Columns
from rayqueue.gateway.rest import bodies, models, queue_handlers, queue_models, serving
from rayqueue.gateway.rest.route import Route
from rayqueue.gateway.rest.routes import ROUTES
from rayqueue.gateway.rpc import queues as rpc_queues
from rayqueue.gateway.rpc.admin import given_settings
from rayqueue.gateway.rpc.messages import columns_of, columns_of_contents, isolation_of, places_of, records_of
from rayqueue.gateway.rpc.serving import SERVICES
from rayqueue.gateway.rpc.v1 import admin_pb2, common_pb2, queues_pb2, records_pb2
from rayqueue.gateway.values import Form, Publish, contents_of, shown, value_of
from rayqueue.gateway.values import columns_of as columns_of_json
from rayqueue.records import Record, RecordBatch, validate
from tests.fuzz import mutations

Run = Callable[[bytes], None]

_SETTINGS = GatewaySettings()
_MOST = 4 << 20
_FORMS: tuple[Form, ...] = ("auto", "json", "text", "base64")
_LOOKED_AT = 20
_MODULES = (records_pb2, queues_pb2, admin_pb2)

# -- what becomes of records ------------------------------------------------------------------------------


def _stored(columns: Columns) -> None:
    """As a partition gets them, and a caller reads them."""
    stamps = [5 if each is None else each for each in columns.timestamps_ms or [5] * len(columns.values)]
    checked = check_columns(columns.values, columns.keys, columns.headers, stamps)
    payload = RecordBatch.encode(checked.values, checked.keys, checked.headers, timestamps=checked.timestamps)
    validate(payload, 2 * _MOST, max_record_bytes=_MOST)
    batch = RecordBatch.decode(payload, base_offset=7)
    assert batch.values() == list(columns.values)
    for record in islice(batch.records(), _LOOKED_AT):
        _shown(record, columns)


def _warm() -> None:
    """What is imported with the first batch, and with the first that is large, is nobody's input."""
    for count in (1, 1000):
        _stored(Columns([b"1"] * count, [b"k"] * count, [(("h", b"v"),)] * count))
        _stored(Columns([b"1"] * count, [None] * count))


def _shown(record: Record, columns: Columns) -> None:
    given = columns.values[record.offset - 7]
    assert records_of([record])[0].value == (given or b"")
    for form in _FORMS:
        told = json.loads(msgspec.json.encode(shown(record, form)), parse_int=float, parse_constant=_no_json)
        assert sum(name in told for name in ("value", "text", "base64")) == (given is not None)
        if given is not None and "text" in told:
            assert told["text"].encode() == given
        assert sum(name in told for name in ("key", "key_base64")) == (record.key is not None)


def _no_json(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def _jobs(columns: Columns, wanted: Sequence[queues.Wanted]) -> None:
    given: Any = columns.headers or [()] * len(wanted)
    columns.headers = [queues._with_wanted(row, given[row], each) for row, each in enumerate(wanted)]
    _stored(columns)


# -- REST ---------------------------------------------------------------------------------------------------

_WITH_BODIES: list[Route] = [each for each in ROUTES if each.body not in (None, bytes)]
_MORE: dict[Any, list[Any]] = {
    Publish: [
        {"records": [{"value": {"a": [1, None, 2.5, "ü"]}, "key": "k", "headers": {"h": "v"}, "priority": 1}]},
        {"records": [{"base64": "AAEC", "key_base64": "/w==", "headers_base64": {"h": "/w=="}, "timestamp_ms": 7}]},
        {"records": [{"text": "x", "partition": 3}, {}, {"value": None}]},
    ],
}


def _body_seeds() -> list[bytes]:
    seeds = []
    for at, route in enumerate(_WITH_BODIES):
        for example in (*([] if route.example is None else [route.example]), *_MORE.get(route.body, [])):
            body = json.dumps(example).encode()
            # Most goes on in those that hold records and jobs.
            often = 20 if route.body in (Publish, queue_models.PutJobs) else 1
            seeds += [bytes((at, 0)) + body] * often + [bytes((at, 1)) + gzip.compress(body, mtime=0)]
    return seeds


def _bodies() -> Run:
    _warm()
    decoders = [msgspec.json.Decoder(route.body) for route in _WITH_BODIES]

    def run(data: bytes) -> None:
        if len(data) < 2:
            return
        at = data[0] % len(decoders)
        raw = bodies.unpacked(data[2:], _MOST) if data[1] & 1 else data[2:]
        _use_body(bodies.decoded(raw, decoders[at]))

    return run


def _use_body(body: Any) -> None:
    depth = _SETTINGS.max_json_depth
    if isinstance(body, Publish):
        _stored(columns_of_json(body.records, depth))
    elif isinstance(body, queue_models.PutJobs):
        _jobs(contents_of(body.jobs, depth, "job"), [queue_handlers._wanted(each) for each in body.jobs])
    elif isinstance(body, queue_models.AckJobs):
        queues._leases(body.leases)
        if body.result is not None:
            value_of(depth, body.result)
    elif isinstance(body, queue_models.ChangeDead):
        queues._jobs(queue_handlers._chosen(body))
    models.given(body)


def _odd(rng: Random) -> Any:
    choices: list[Any] = [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        1e308,
        0.5,
        "",
        "\ud800",
        "\0",
        "ü" * 99,
    ]
    choices += ["x" * 5000, "AAE", "AAEC", "0-0", "1.0-0.0", "9" * 40, [], {}, [[]], {"a": 1}, ["a"] * 50]
    return rng.choice(choices)


def _changed(rng: Random, value: Any) -> Any:
    """The same JSON, but for one place."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        name = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {each: held for each, held in value.items() if each != name}
            case 1:
                return {**value, rng.choice(["", "value", "text", "base64", "key", "self", "\ud800"]): _odd(rng)}
            case _:
                return {**value, name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.95:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value * rng.choice((2, 300))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return _odd(rng)


def _draw_body(rng: Random, seeds: list[bytes]) -> bytes:
    seed = rng.choice(seeds)
    if rng.random() < 0.25 or seed[1] & 1:
        return seed[:2] + mutations.mutated(rng, seed[2:])
    value = json.loads(seed[2:])
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = _changed(rng, value)
    return seed[:2] + json.dumps(value, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")


_QUERIES = [
    b"partition=0&offset=5&max=10",
    b"wait_ms=100&cursor=3&format=text",
    b"key=k&priority=1",
    b"max=1&lease_ms=5",
]


def _queries() -> Run:
    paths = [{name: "a" for name in ("topic", "queue", "group", "session", "consumer", "job") if f"{{{name}}}" in each}
             for each in (route.path for route in ROUTES)]  # fmt: skip

    def run(data: bytes) -> None:
        for route, path in zip(ROUTES, paths, strict=True):
            try:
                bodies.converted(serving._given(data, path), route.params)
            except RayQueueError:
                continue

    return run


# -- gRPC ---------------------------------------------------------------------------------------------------

_METHODS = [method for service in SERVICES for method in service.methods]


def _class_of(descriptor: Any) -> Any:
    for module in _MODULES:
        found = getattr(module, descriptor.name, None)
        if found is not None:
            return found
    raise LookupError(descriptor.name)


_REQUESTS = [_class_of(method.input_type) for method in _METHODS]


def _fill(message: Any, depth: int = 0) -> Message:
    """Something in every field."""
    for each in message.DESCRIPTOR.fields:
        some: Any = b"\xff" if each.type == each.TYPE_BYTES else "orders" if each.type == each.TYPE_STRING else 1
        if each.message_type is not None:
            if depth < 4:
                held = getattr(message, each.name)
                _fill(held.add() if each.is_repeated else held, depth + 1)
        elif each.is_repeated:
            getattr(message, each.name).append(some)
        else:
            setattr(message, each.name, some)
    made: Message = message
    return made


def _message_seeds() -> list[bytes]:
    record = common_pb2.NewRecord(value=b"v", key=b"k", priority=1, partition=2, timestamp_ms=5)
    record.headers.add(name="h", value=b"\xff")
    plain = records_pb2.AppendRequest(topic="orders", records=[record, common_pb2.NewRecord(value=b"x")])
    at = _REQUESTS.index(records_pb2.AppendRequest)
    filled = [bytes((number,)) + _fill(made()).SerializeToString() for number, made in enumerate(_REQUESTS)]
    return [*filled, *(bytes((at,)) + plain.SerializeToString() for _ in range(5))]


def _messages() -> Run:
    _warm()

    def run(data: bytes) -> None:
        if data:
            made = _REQUESTS[data[0] % len(_REQUESTS)]
            try:
                request = made.FromString(data[1:])
            except DecodeError as error:
                raise InvalidInputError(str(error)) from None
            _use_message(request, len(data) - 1)

    return run


def _use_message(request: Any, size_bytes: int) -> None:
    match request:
        case records_pb2.AppendRequest() | records_pb2.ProduceRequest():
            rest: Any = type(request)()
            rest.CopyFrom(request)
            rest.ClearField("records")
            columns = columns_of(request.records, size_bytes - rest.ByteSize())
            exact = columns_of_contents(request.records)
            assert columns.values == exact.values
            assert columns.keys == exact.keys
            _stored(columns)
        case queues_pb2.PutJobsRequest():
            _jobs(columns_of_contents(request.jobs), [rpc_queues._wanted(each) for each in request.jobs])
        case admin_pb2.CreateTopicRequest() | queues_pb2.CreateQueueRequest():
            given_settings(request.settings)
        case records_pb2.AckRequest():
            places_of(request.places)
        case records_pb2.FetchRequest() | records_pb2.PollRequest():
            isolation_of(request.isolation)
        case queues_pb2.AckJobsRequest():
            queues._leases(list(request.leases))
        case queues_pb2.RedriveDeadJobsRequest() | queues_pb2.PurgeDeadJobsRequest():
            queues._jobs(rpc_queues._chosen(request))
        case _:
            request.SerializeToString()


def _draw_message(rng: Random, seeds: list[bytes]) -> bytes:
    """A field more or less is what mutations of bytes seldom make: two messages run together are one, merged."""
    seed = rng.choice(seeds)
    more = rng.choice(seeds)[1:] if rng.random() < 0.2 else b""
    return seed[:1] + mutations.mutated(rng, seed[1:] + more)


TARGETS: dict[str, tuple[list[bytes], Callable[[], Run], Callable[[Random, list[bytes]], bytes]]] = {
    "gateway bodies": (_body_seeds(), _bodies, _draw_body),
    "gateway queries": (_QUERIES, _queries, mutations.plain),
    "gateway messages": (_message_seeds(), _messages, _draw_message),
}
