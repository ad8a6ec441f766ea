"""The fleet of gateways: where they are to be, and one that cannot start. Without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from rayqueue.actors.keeper.nodes import RayNode
from rayqueue.config import ClientSettings, GatewaySettings, Settings
from rayqueue.errors import RayQueueError
from rayqueue.gateway.actor import GatewayActor
from rayqueue.gateway.keys import TOPIC as KEYS
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.server import Gateway, GatewayThread
from rayqueue.gateway.tending import missing, shifted, there_on
from rayqueue.testing import memory, wait_for

PREFIX = "rayqueue-gateway/"


def node(letter: str, host: str, *, leaving: bool = False) -> RayNode:
    return RayNode(letter * 56, host, 1, None, leaving=leaving)


def started(nodes: list[RayNode], taken: list[str], count: int | None = None) -> list[tuple[str, int]]:
    return [(place.name.removeprefix(PREFIX)[0], place.of_host) for place in missing(nodes, taken, count)]


def name(letter: str, of_host: int) -> str:
    return f"{PREFIX}{letter * 12}-{of_host}"


def test_one_on_each_node_also_on_those_that_come_later() -> None:
    nodes = [node("b", "h1"), node("c", "h2")]
    assert started(nodes, []) == [("b", 0), ("c", 0)]
    taken = [name("b", 0), name("c", 0)]
    assert started(nodes, taken) == []
    nodes = [node("a", "h1"), *nodes, node("d", "h3"), node("e", "h4", leaving=True)]
    assert started(nodes, taken) == [("a", 1), ("d", 0)], "ports of h1 that are taken stay so"
    back = [node("f", "h2"), node("b", "h1")]  # Ray gives a node that comes back another id
    assert [place.name for place in there_on(back, taken)] == [name("b", 0)]
    assert started(back, taken) == [("f", 0)]


def test_so_many_spread_over_the_nodes() -> None:
    nodes = [node("b", "h1"), node("c", "h1")]
    assert started(nodes, [], 3) == [("b", 0), ("c", 1), ("b", 2)]
    assert started(nodes, [name("b", 0), name("c", 1)], 3) == [("b", 2)]
    assert started(nodes, [name("b", 1)], 2) == [("c", 0)]
    assert started(nodes, [name("b", 0), name("c", 1)], 1) == []
    assert shifted(GatewaySettings(rest_port=8000, grpc_port=0), 2).rest_port == 8004
    assert shifted(GatewaySettings(rest_port=8000, grpc_port=0), 2).grpc_port == 0


@pytest.mark.slow
def test_a_start_at_a_bad_moment_is_repeated(tmp_path: Path) -> None:
    """As when it and the leader of the keys are killed together: Ray repeats the start of a process, and no more."""
    with memory.connect(settings=Settings(client=ClientSettings(call_timeout_ms=2000))) as rq:
        repeated(rq, tmp_path)


def repeated(rq: memory.MemoryQueue, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    KeyStore(rq).create("all", ["*:*:*"])
    settings = GatewaySettings(host="0.0.0.0", tls_cert_path=cert, tls_key_path=key, rest_port=0, grpc_port=0)
    with rq.without_leader(KEYS):
        actor = GatewayActor(rq, settings)
        with pytest.raises(RayQueueError):
            actor.address()

    def listens() -> bool:
        try:
            return actor.address()["rest"].startswith("https://")
        except RayQueueError:
            return False

    wait_for(listens, "the gateway", 60)
    actor.close()


@pytest.mark.slow
def test_a_port_that_is_free_later_and_a_listener_that_ends_leave_no_dead_gateway(rq: memory.MemoryQueue) -> None:
    other = GatewayThread(rq, GatewaySettings(rest_port=0, grpc_port=0))
    port = other.start().rest_port
    actor = GatewayActor(rq, GatewaySettings(rest_port=port, grpc_port=0))
    with pytest.raises(RayQueueError, match="is the port taken"):
        actor.address()
    other.stop()

    def running() -> Gateway | None:
        return actor._gateway

    first = wait_for(running, "the gateway", 30)
    assert first._http is not None
    first._http.should_exit = True
    second = wait_for(lambda: None if running() is first else running(), "another one", 30)
    assert second.rest_port == port
    actor.close()
    assert actor._gateway is None
