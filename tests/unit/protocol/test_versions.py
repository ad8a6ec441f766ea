"""Protocol versions: the highest common one is used, nobody can lower it, and without one both know whom to upgrade."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayqueue.errors import HandshakeError, IncompatibleVersionError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.protocol import hello
from rayqueue.protocol.versions import Versions, agree
from rayqueue.raft.clients import Guest
from rayqueue.raft.handshake import SPEAKS, Acceptor, Dialer, Identity
from tests.unit.net.client_net import TIMEOUT_S, Cluster

SECRET = b"the cluster's secret"
A = Identity(ReplicaId("a"), GroupId("orders-0"), "10.0.0.1", 4001, b"incarnation of a")
B = Identity(ReplicaId("b"), GroupId("orders-0"), "10.0.0.2", 4002, b"incarnation of b")

CASES = [
    pytest.param(Versions(2, 2), Versions(2, 2), 2, id="the same"),
    pytest.param(Versions(2, 3), Versions(2, 2), 2, id="a newer and an older one"),
    pytest.param(Versions(2, 3), Versions(3, 5), 3, id="at the edge"),
    pytest.param(Versions(1, 9), Versions(4, 7), 7, id="the highest of several"),
    pytest.param(Versions(3, 4), Versions(1, 2), None, id="none in common"),
]


@pytest.mark.parametrize(("ours", "theirs", "version"), CASES)
def test_the_highest_common_version(ours: Versions, theirs: Versions, version: int | None) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        if version is not None:
            assert agree(one, other, us="this client", them="the replica") == version
            continue
        older = "the replica" if other.highest < one.highest else "this client"
        with pytest.raises(IncompatibleVersionError, match=f"upgrade {older}$") as refused:
            agree(one, other, us="this client", them="the replica")
        assert refused.value.details == {"ours": tuple(one), "theirs": tuple(other), "upgrade": older}
        assert not refused.value.retriable


numbers = st.integers(0, 255)


@given(numbers, numbers, numbers, numbers)
def test_whatever_is_said_both_sides_come_to_the_same(a: int, b: int, c: int, d: int) -> None:
    def found(ours: Versions, theirs: Versions) -> int | None:
        try:
            return agree(ours, theirs, us="", them="")
        except IncompatibleVersionError:
            return None

    one, other = Versions(a, b), Versions(c, d)
    version = found(one, other)
    assert version == found(other, one)
    if version is not None:
        assert a <= version <= b
        assert c <= version <= d


# -- between replicas ------------------------------------------------------------------------


def sides(dialer: Versions, acceptor: Versions) -> tuple[Dialer, Acceptor]:
    return (
        Dialer(A, SECRET, ReplicaId("b"), nonce=b"d" * 32, attempt=1, speaks=dialer),
        Acceptor(B, SECRET, nonce=b"a" * 32, speaks=acceptor),
    )


@pytest.mark.parametrize(("dialing", "accepting", "version"), CASES)
def test_replicas_agree(dialing: Versions, accepting: Versions, version: int | None) -> None:
    dial, accept = sides(dialing, accepting)
    if version is None:
        with pytest.raises(IncompatibleVersionError, match="upgrade"):
            accept.receive(dial.hello)
        with pytest.raises(IncompatibleVersionError, match="upgrade the other one"):
            dial.receive(accept.last_words)  # the dialer is told, too
        return
    accept.receive(dial.receive(accept.receive(dial.hello)))
    dial.receive(accept.welcome())
    assert dial.done
    assert dial.version == accept.version == version


@pytest.mark.parametrize("at", [8, 6], ids=["highest", "lowest"])
def test_nobody_on_the_way_can_make_replicas_speak_an_older_version(at: int) -> None:
    dial, accept = sides(Versions(2, 3), Versions(2, 3))
    changed = bytearray(dial.hello)
    assert changed[at] in (2, 3)
    changed[at] = 2 if at == 8 else 1
    challenge = accept.receive(bytes(changed))
    with pytest.raises(HandshakeError):
        accept.receive(dial.receive(challenge))


# -- between a client and a replica ------------------------------------------------------------

TOKEN = b"t" * 32


def greet(client: Versions, replica: Versions, *, changed: bytes | None = None) -> tuple[Guest, bytes, bytes]:
    guest, ours = Guest(TOKEN, b"r" * 32, b"", replica), hello.hello(b"c" * 32, client)
    return guest, ours, guest.receive(changed or ours)


@pytest.mark.parametrize(("client", "replica", "version"), CASES)
def test_a_client_and_a_replica_agree(client: Versions, replica: Versions, version: int | None) -> None:
    guest, ours, theirs = greet(client, replica)
    assert hello.read_hello(theirs).versions == replica, "a client learns why, in any case"
    proof = hello.proof(hello.key_of(TOKEN), b"client", ours, theirs)
    if version is None:
        with pytest.raises(IncompatibleVersionError, match="upgrade"):
            guest.receive(proof)
        assert not guest.proven
    else:
        hello.check_proof(guest.receive(proof), hello.key_of(TOKEN), b"replica", ours, theirs)
        assert (guest.proven, guest.version) == (True, version)


def test_nobody_on_the_way_can_make_a_client_speak_an_older_version() -> None:
    both = Versions(2, 3)
    guest, ours, theirs = greet(both, both, changed=hello.hello(b"c" * 32, Versions(2, 2)))
    with pytest.raises(HandshakeError, match="token"):
        guest.receive(hello.proof(hello.key_of(TOKEN), b"client", ours, theirs))


def test_a_client_that_is_too_old_is_told_so_and_does_not_retry(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    newer = Versions(hello.SPEAKS.highest + 1, hello.SPEAKS.highest + 1)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            guest = Guest(TOKEN, b"r" * 32, b"", newer)
            connection.sendall(guest.receive(connection.recv(hello.HELLO_BYTES)))
            connection.recv(1)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with closing(Cluster(tmp_path)) as cluster:

        async def scenario() -> None:
            elsewhere = cluster.endpoint()._replace(port=listener.getsockname()[1])
            with pytest.raises(IncompatibleVersionError, match="upgrade this client"):
                await Channel.open(elsewhere, cluster.settings)
            channel = await Channel.open(cluster.endpoint(), cluster.settings)
            assert channel.version == hello.SPEAKS.highest
            channel.close("done")

        cluster.run(scenario())
    thread.join(TIMEOUT_S)
    listener.close()


def test_what_this_release_speaks() -> None:
    """Both numbers are promises: docs/upgrades.md says what may be mixed."""
    assert (SPEAKS, hello.SPEAKS) == ((2, 3), (2, 2))
