"""Calls, answers and errors over the wire: the same on the other side; garbage is a typed error."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue import errors
from rayqueue.errors import HandshakeError, InvalidInputError, NotLeaderError, RayQueueError, TransportError
from rayqueue.protocol import calls, hello
from rayqueue.protocol.calls import (
    Assignment,
    Bounds,
    Call,
    Commit,
    CoordinatorCall,
    GetBounds,
    GetPosition,
    Grant,
    Heartbeat,
    PartitionCall,
    Position,
    decode_answer,
    decode_coordinator_call,
    decode_partition_call,
    encode_answer,
    encode_call,
)
from rayqueue.protocol.failures import decode_failure, encode_failure
from rayqueue.protocol.jobs import Settlement
from rayqueue.protocol.topics import TopicSettings
from rayqueue.protocol.transactions import ForgetTransactionalId, InitTransactions, OpenFor, Transaction
from rayqueue.protocol.versions import Versions

# A busy machine is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def made(cls: type[Call]) -> Call:
    """A call with something in every field that must have something."""
    some: dict[str, Any] = {
        "group": "g",
        "member": "m",
        "name": "orders",
        "topics": ("orders",),
        "settings": TopicSettings(lanes=3),
        "reading": (Grant("orders", 1, 3, 7),),
        "offsets": {0: 5, 2: 7},
        "changes": {"retention_ms": None},
        "generation": 3,
        "timestamp_ms": 4,
        "before": 5,
        "topic_id": 7,
        "born": 2,
        "producer_id": 6,
        "records": 8,
        "size_bytes": 900,
        "least_bytes": 300,
        "group_id": "orders-0.1",
        "replica_id": "r2",
        "why": "no store",
        "broker": "b1",
        "draining": True,
        "topic": "orders",
        "partition": 1,
        "survivor": "r1",
        "replicas": ("r1", "r2"),
        "said": "much",
        "source": "b1",
        "target": "b2",
        "to": "r2",
        "moves": (calls.RebalanceMove("orders-0.1", "r1", "b2", 7),),
        "worker": "w-1",
        "attempt": 3,
        "settlements": (Settlement(kind="ack", token=7, jobs=((5, 2),)),),
        "leases": ((7, ((5, 2),)),),
        "ids": (5, 8),
        "id": 5,
        "dedupe_ids": ("d",),
        "transactional_id": "billing-1",
        "timeout_ms": 60_000,
        "epoch": 4,
        "commit": True,
        "participants": ("orders-0.1",),
        "finished": (Transaction(6, 3),),
        "transactions": (OpenFor(6, 4, 1_500),),
        "token": 7,
        "jobs": ((5, 2),),
        "seal": b"s",
        "write": "spark.q/7",
        "writer": "spark.q",
        "batch_id": 7,
    }
    if cls in (InitTransactions, ForgetTransactionalId):
        some["attempt"] = "drawn"  # a text here, a number for workers
    fields = [field for field in msgspec.structs.fields(cls) if field.required]
    return cls(**{field.name: some[field.name] for field in fields})


@pytest.mark.parametrize("cls", get_args(PartitionCall), ids=lambda cls: cls.__name__)
def test_calls_to_a_partition(cls: type[Call]) -> None:
    assert decode_partition_call(encode_call(made(cls))) == made(cls)


@pytest.mark.parametrize("cls", get_args(CoordinatorCall), ids=lambda cls: cls.__name__)
def test_calls_to_the_coordinator(cls: type[Call]) -> None:
    assert decode_coordinator_call(encode_call(made(cls))) == made(cls)


def test_each_is_refused_by_the_other() -> None:
    with pytest.raises(InvalidInputError):
        decode_coordinator_call(encode_call(made(Commit)))
    with pytest.raises(InvalidInputError):
        decode_partition_call(encode_call(made(Heartbeat)))


@relaxed
@given(st.binary(max_size=100))
def test_garbage_is_a_typed_error(garbage: bytes) -> None:
    for decode in (decode_partition_call, decode_coordinator_call):
        with pytest.raises(InvalidInputError):
            decode(garbage)
    assert isinstance(decode_failure(garbage), RayQueueError)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (GetBounds(), Bounds(3, 9)),
        (GetPosition(group="g"), None),
        (GetPosition(group="g"), Position(2, {0: 1, 4: 9}, b"m", True)),
        (made(Heartbeat), Assignment("m", 4, (Grant("orders", 1, 3),), True)),
        (calls.Pin(group="g"), None),
        (calls.GetGroups(), {"g": Position(1, {})}),
    ],
)
def test_answers(call: Call, answer: Any) -> None:
    assert decode_answer(call, encode_answer(answer)) == answer


def test_an_answer_that_does_not_fit_its_call() -> None:
    with pytest.raises(TransportError):
        decode_answer(GetBounds(), encode_answer("no"))


def tree(cls: type[RayQueueError]) -> list[type[RayQueueError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


@pytest.mark.parametrize("cls", [cls for cls in tree(RayQueueError) if cls.__module__ == errors.__name__])
def test_every_error_is_the_same_on_the_other_side(cls: type[RayQueueError]) -> None:
    raised = decode_failure(encode_failure(cls("what happened", offset=3, leader=None, lanes=[1, 2])))
    assert type(raised) is cls
    assert str(raised) == "what happened"
    assert raised.details == {"offset": 3, "leader": None, "lanes": [1, 2]}


def test_classes_that_others_derive_from_ours_are_not_taken_for_them() -> None:
    """Ray derives one of its own from each error that a call has raised; the constructor is another."""

    class DerivedError(NotLeaderError):
        def __init__(self) -> None:
            super().__init__("made by Ray")

    DerivedError()
    assert type(decode_failure(encode_failure(NotLeaderError("ask", leader="n2")))) is NotLeaderError


def test_details_that_have_no_form_become_text() -> None:
    assert decode_failure(encode_failure(NotLeaderError("ask", leader=ValueError("x")))).details == {"leader": "x"}


def test_an_error_of_a_later_release_is_an_error() -> None:
    raised = decode_failure(msgspec.msgpack.encode(("from_the_future", "text", {"a": 1})))
    assert (type(raised), str(raised), raised.details) == (RayQueueError, "text", {"a": 1})


# -- hello ---------------------------------------------------------------------------

ONE, OTHER = hello.hello(bytes(32)), hello.hello(bytes([1]) * 32)
OLDER = hello.hello(bytes(32), Versions(1, 1))


def test_both_sides_prove_the_same_token() -> None:
    key = hello.key_of(b"t" * 32)
    for role in (b"client", b"replica"):
        hello.check_proof(hello.proof(key, role, ONE, OTHER), key, role, ONE, OTHER)


@pytest.mark.parametrize(
    ("token", "binding", "role", "hellos"),
    [
        (b"x" * 32, b"", b"client", (ONE, OTHER)),
        (b"t" * 32, b"another TLS session", b"client", (ONE, OTHER)),
        (b"t" * 32, b"", b"replica", (ONE, OTHER)),
        (b"t" * 32, b"", b"client", (OTHER, ONE)),
        (b"t" * 32, b"", b"client", (OLDER, OTHER)),
    ],
    ids=["another token", "another session", "sent back", "another connection", "other versions"],
)
def test_a_proof_is_good_for_one_thing(token: bytes, binding: bytes, role: bytes, hellos: tuple[bytes, bytes]) -> None:
    proof = hello.proof(hello.key_of(token, binding), role, *hellos)
    with pytest.raises(HandshakeError):
        hello.check_proof(proof, hello.key_of(b"t" * 32), b"client", ONE, OTHER)


@relaxed
@given(st.binary(min_size=hello.HELLO_BYTES, max_size=hello.HELLO_BYTES))
def test_who_says_something_else_is_a_stranger(message: bytes) -> None:
    with pytest.raises(HandshakeError):
        hello.read_hello(message)
