"""The handshake: who gets through, who does not, and what any bytes do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import ConfigError, HandshakeError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.raft import handshake
from rayqueue.raft.handshake import NEVER_SEEN, Acceptor, Claim, Dialer, Identity, Reason
from rayqueue.raft.peers import Peer, Standing, Verdict, verdict

SECRET = b"the cluster's secret"
A = Identity(ReplicaId("a"), GroupId("orders-0"), "10.0.0.1", 4001, b"incarnation of a")
B = Identity(ReplicaId("b"), GroupId("orders-0"), "10.0.0.2", 4002, b"incarnation of b")

# A busy machine is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_nonces = itertools.count(1)


def nonce() -> bytes:
    return next(_nonces).to_bytes(32, "big")


def dialer(
    me: Identity = A, wanted: str = "b", secret: bytes = SECRET, binding: bytes = b"", fixed: bytes = b""
) -> Dialer:
    return Dialer(me, secret, ReplicaId(wanted), nonce=fixed or nonce(), attempt=1, binding=binding)


def acceptor(me: Identity = B, secret: bytes = SECRET, binding: bytes = b"", fixed: bytes = b"") -> Acceptor:
    return Acceptor(me, secret, nonce=fixed or nonce(), binding=binding)


def shake(dial: Dialer, accept: Acceptor) -> None:
    challenge = accept.receive(dial.hello)
    proof = dial.receive(challenge)
    assert not dial.done
    assert accept.claim is None
    accept.receive(proof)
    assert accept.claim is not None
    dial.receive(accept.welcome())


def test_both_learn_who_the_other_is() -> None:
    dial, accept = dialer(), acceptor()
    shake(dial, accept)
    assert dial.done
    assert dial.peer == B
    assert accept.claim == Claim(A, attempt=1, last_seen=NEVER_SEEN)
    assert dial.connection_id == accept.connection_id


def test_golden_bytes() -> None:
    """If these change, raise SPEAKS. The versions stay where they are: first."""
    dial, accept = dialer(fixed=b"d" * 32), acceptor(fixed=b"a" * 32)
    challenge = accept.receive(dial.hello)
    proof = dial.receive(challenge)
    accept.receive(proof)
    assert handshake.SPEAKS == (2, 3)
    assert dial.hello.hex() == GOLDEN["hello"]
    assert challenge.hex() == GOLDEN["challenge"]
    assert proof.hex() == GOLDEN["proof"]
    assert accept.welcome().hex() == GOLDEN["welcome"]
    assert accept.refuse(Reason.DUPLICATE).hex() == GOLDEN["refuse"]


GOLDEN = {
    "hello": (
        "525148017400020003006464646464646464646464646464646464646464646464646464646464646464696e6361726e"
        "6174696f6e206f6620610100000000000000000000000000000000000000000000000000000000000000000000000000"
        "0000a10f086f72646572732d3001610831302e302e302e310162"
    ),
    "challenge": (
        "525148024a00020003006161616161616161616161616161616161616161616161616161616161616161696e6361726e"
        "6174696f6e206f662062a20f086f72646572732d3001620831302e302e302e32"
    ),
    "proof": "5251480320003b8ae4a9d29e93ca36bb910ea34ab4d04f72235e3488e31569cc0e8db4896d1c",
    "welcome": "525148042000e8f041b91f375367360f17e4d90eb611cdf1efdec528087b8dd30f922e2cc849",
    "refuse": "5251480505000200030006",
}


def test_byte_by_byte_and_frames_right_behind_the_welcome() -> None:
    dial, accept = dialer(), acceptor()
    challenge = b"".join(accept.receive(bytes([byte])) for byte in dial.hello)
    proof = b"".join(dial.receive(bytes([byte])) for byte in challenge)
    for byte in proof:
        accept.receive(bytes([byte]))
    dial.receive(accept.welcome() + b"the first frame")
    assert dial.done
    assert dial.unread == b"the first frame"


def test_the_dialer_needs_the_secret() -> None:
    dial, accept = dialer(secret=b"some other secret!"), acceptor()
    proof = dial.receive(accept.receive(dial.hello))
    with pytest.raises(HandshakeError, match="secret"):
        accept.receive(proof)
    assert accept.claim is None
    with pytest.raises(HandshakeError) as refused:
        dial.receive(accept.last_words)
    assert refused.value.details["reason"] is Reason.SECRET


def test_the_acceptor_needs_the_secret() -> None:
    dial, accept = dialer(), acceptor(secret=b"some other secret!")
    dial.receive(accept.receive(dial.hello))
    guess = accept._mac(b"acceptor", dial.hello, accept._challenge, dial._proof)
    with pytest.raises(HandshakeError, match="secret"):
        dial.receive(handshake._message(4, guess))
    assert not dial.done


def test_tls_sessions_that_differ_are_noticed() -> None:
    dial, accept = dialer(binding=b"session 1"), acceptor(binding=b"session 2")
    proof = dial.receive(accept.receive(dial.hello))
    with pytest.raises(HandshakeError, match="secret"):
        accept.receive(proof)


@pytest.mark.parametrize(
    ("me", "wanted", "reason"),
    [
        (dataclasses.replace(A, group_id=GroupId("orders-1")), "b", Reason.GROUP),
        (dataclasses.replace(A, replica_id=B.replica_id), "b", Reason.OWN_ID),
        (A, "c", Reason.WRONG_PEER),
    ],
)
def test_refused_before_anything_is_proven(me: Identity, wanted: str, reason: Reason) -> None:
    dial, accept = dialer(me, wanted), acceptor()
    with pytest.raises(HandshakeError):
        accept.receive(dial.hello)
    with pytest.raises(HandshakeError) as refused:
        dial.receive(accept.last_words)
    assert refused.value.details["reason"] is reason


@pytest.mark.parametrize(
    "answerer",
    [
        dataclasses.replace(B, group_id=GroupId("orders-1")),
        dataclasses.replace(B, replica_id=ReplicaId("c")),
        dataclasses.replace(B, replica_id=A.replica_id),
    ],
)
def test_the_dialer_checks_who_answers(answerer: Identity) -> None:
    """Even if the acceptor does not: here it claims whatever the dialer would like to hear, then differs."""
    dial = dialer()
    accept = acceptor()
    accept.receive(dial.hello)
    forged = handshake._CHALLENGE_BODY.pack(*handshake.SPEAKS, nonce(), answerer.incarnation, answerer.port)
    forged += handshake._names(answerer.group_id, answerer.replica_id, answerer.host)
    with pytest.raises(HandshakeError):
        dial.receive(handshake._message(2, forged))
    assert not dial.proven


def test_a_recorded_dialer_cannot_be_replayed() -> None:
    dial, accept = dialer(), acceptor()
    proof = dial.receive(accept.receive(dial.hello))
    accept.receive(proof)
    again = acceptor()
    again.receive(dial.hello)
    with pytest.raises(HandshakeError):
        again.receive(proof)
    assert again.claim is None


def test_a_recorded_acceptor_cannot_be_replayed() -> None:
    dial, accept = dialer(), acceptor()
    challenge = accept.receive(dial.hello)
    accept.receive(dial.receive(challenge))
    welcome = accept.welcome()
    again = dialer()
    again.receive(challenge)
    with pytest.raises(HandshakeError):
        again.receive(welcome)
    assert not again.done


def test_what_a_side_says_is_useless_when_sent_back_to_it() -> None:
    # Without the secret: the victim's own Hello, nonce and Proof are all there is to send back.
    dial = dialer()
    with pytest.raises(HandshakeError):
        dial.receive(dial.hello)
    dial = dialer()
    echo = handshake._CHALLENGE_BODY.pack(*handshake.SPEAKS, dial._nonce, B.incarnation, B.port)
    echo += handshake._names(B.group_id, B.replica_id, B.host)
    with pytest.raises(HandshakeError, match="own nonce"):
        dial.receive(handshake._message(2, echo))
    dial = dialer()
    proof = dial.receive(acceptor().receive(dial.hello))
    with pytest.raises(HandshakeError):
        dial.receive(handshake._message(4, proof[-32:]))


def test_two_victims_cannot_be_played_against_each_other() -> None:
    """An attacker between b's dial to a and a's dial to b: every proof names its role, so neither fits the other."""
    a_dials, b_dials = dialer(A, "b"), dialer(B, "a")
    a_accepts, b_accepts = acceptor(A), acceptor(B)
    proof_of_a = a_dials.receive(b_accepts.receive(a_dials.hello))
    a_accepts.receive(b_dials.hello)
    with pytest.raises(HandshakeError):
        a_accepts.receive(proof_of_a)


FIELDS: list[Callable[[Identity], Identity]] = [
    lambda me: dataclasses.replace(me, host="10.9.9.9"),
    lambda me: dataclasses.replace(me, port=1),
    lambda me: dataclasses.replace(me, incarnation=b"x" * 16),
    lambda me: dataclasses.replace(me, replica_id=ReplicaId("e")),
]


@pytest.mark.parametrize("change", FIELDS)
def test_no_field_can_be_changed_on_the_way(change: Callable[[Identity], Identity]) -> None:
    dial, accept = dialer(fixed=b"n" * 32), acceptor()
    forged = dialer(change(A), fixed=b"n" * 32)
    proof = dial.receive(accept.receive(forged.hello))
    with pytest.raises(HandshakeError, match="secret"):
        accept.receive(proof)


def test_nothing_may_be_sent_before_the_welcome() -> None:
    dial, accept = dialer(), acceptor()
    proof = dial.receive(accept.receive(dial.hello))
    with pytest.raises(HandshakeError, match="before it was welcome"):
        accept.receive(proof + b"x")


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError):
        acceptor(secret=b"short")
    with pytest.raises(ConfigError):
        Identity(ReplicaId("x" * 256), GroupId("g"), "10.0.0.1", 1, bytes(16))
    with pytest.raises(ConfigError):
        Identity(ReplicaId("x"), GroupId("g"), "10.0.0.1", 0, bytes(16))
    with pytest.raises(ConfigError):
        acceptor(fixed=b"short")


@relaxed
@given(st.binary(max_size=1500), st.booleans())
def test_arbitrary_bytes_to_an_acceptor(data: bytes, with_hello: bool) -> None:
    accept = acceptor()
    if with_hello:
        accept.receive(dialer().hello)
    with contextlib.suppress(HandshakeError):
        accept.receive(data)
    assert accept.claim is None


@relaxed
@given(st.integers(0, 6), st.binary(max_size=300), st.booleans())
def test_arbitrary_bodies(kind: int, body: bytes, to_dialer: bool) -> None:
    message = b"RQH" + bytes([kind]) + len(body).to_bytes(2, "little") + body
    dial, accept = dialer(), acceptor()
    with contextlib.suppress(HandshakeError):
        dial.receive(message) if to_dialer else accept.receive(message)
    assert not dial.done
    assert accept.claim is None


@relaxed
@given(st.data())
@pytest.mark.slow
def test_a_changed_bit_anywhere_ends_it(data: st.DataObject) -> None:
    dial, accept = dialer(), acceptor()
    which = data.draw(st.integers(0, 3))

    def through(message: bytes, turn: int) -> bytes:
        if turn != which:
            return message
        changed = bytearray(message)
        bit = data.draw(st.integers(0, len(changed) * 8 - 1))
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    with contextlib.suppress(HandshakeError):
        proof = dial.receive(through(accept.receive(through(dial.hello, 0)), 1))
        accept.receive(through(proof, 2))
        if accept.claim is not None:
            dial.receive(through(accept.welcome(), 3))
    assert not dial.done


# -- which connection counts ---------------------------------------------------


def claim(replica_id: str = "a", incarnation: bytes = b"1", attempt: int = 1, last_seen: bytes = NEVER_SEEN) -> Claim:
    peer = Identity(ReplicaId(replica_id), GroupId("g"), "10.0.0.1", 4001, incarnation)
    return Claim(peer, attempt, last_seen)


ours = Standing(b"id", dialed_by_us=True, attempt=3, incarnation=b"1")
theirs = Standing(b"id", dialed_by_us=False, attempt=3, incarnation=b"1")


@pytest.mark.parametrize(
    ("who", "standing", "crossing", "expected"),
    [
        (claim(), None, None, Verdict.WELCOME),
        (claim(incarnation=b"2"), ours, None, Verdict.RESTARTED),
        (claim(incarnation=b"2"), theirs, None, Verdict.RESTARTED),
        (claim(attempt=4), theirs, None, Verdict.REPLACE),
        (claim(attempt=2), theirs, None, Verdict.REFUSE),  # overtaken on the way
        (claim(last_seen=b"id"), ours, None, Verdict.REPLACE),  # the dialer lost it
        (claim(), ours, None, Verdict.REFUSE),  # the dials crossed
        (claim("a"), None, b"1", Verdict.WELCOME),  # the lower id's dial wins ...
        (claim("c"), None, b"1", Verdict.REFUSE),  # ... on both sides
        (claim("c", incarnation=b"2"), None, b"1", Verdict.WELCOME),  # we dial a process that is no more
    ],
)
def test_verdict(who: Claim, standing: Standing | None, crossing: bytes | None, expected: Verdict) -> None:
    assert verdict(who, ReplicaId("b"), standing, crossing) is expected


def test_back_off_doubles_up_to_its_limit() -> None:
    peer: Peer[object] = Peer(ReplicaId("a"))
    delays = []
    for _ in range(2000):
        peer.back_off(100.0, 50, 2000, jitter=1.0)
        delays.append(peer.next_dial_at - 100.0)
    assert delays[:7] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert delays[-1] == pytest.approx(2.0)


def test_a_learned_address_is_used_until_another_is_named() -> None:
    peer: Peer[object] = Peer(ReplicaId("a"))
    assert peer.next_address() is None
    peer.name(("10.0.0.1", 1), 0.0)
    peer.learned = ("10.0.0.1", 2)
    assert peer.next_address() == ("10.0.0.1", 2)
    peer.name(("10.0.0.1", 1), 0.0)  # no news
    assert peer.next_address() == ("10.0.0.1", 2)
    peer.back_off(0.0, 50, 2000, jitter=0.0)
    assert peer.next_address() == ("10.0.0.1", 1)  # it may be there after all
    peer.name(("10.0.0.1", 3), 0.0)
    assert peer.next_address() == ("10.0.0.1", 3)
