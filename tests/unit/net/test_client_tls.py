"""A channel under TLS: the handshake is bound to the session, large frames pass, strangers do not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import trustme

from rayqueue.config import Settings
from rayqueue.errors import ConfigError, TransportError
from rayqueue.ids import GroupId, ReplicaId, Term
from rayqueue.net.channel import Channel
from rayqueue.net.directory import Directory
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.route import CoordinatorRoute
from rayqueue.protocol.calls import GetTopics
from rayqueue.protocol.data import READ_FOLLOWER
from tests.unit.net.client_net import Cluster, at, batch


def tls_files(folder: Path, name: str, authority: trustme.CA) -> dict[str, Path]:
    issued = authority.issue_cert(f"{name}.rayqueue.test")
    cert, key, ca = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    return {"tls_cert_path": cert, "tls_key_path": key, "tls_ca_path": ca}


@pytest.mark.slow
def test_a_client_under_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    cluster = Cluster(tmp_path / "data", 3, transport=tls_files(tmp_path, "replica", authority))
    values = [random.Random(number).randbytes(200_000) for number in range(30)]

    async def scenario() -> None:
        channel = await cluster.open()
        waiting = channel.fetch(at(0, wait_ms=10_000))
        answers = await asyncio.gather(*(channel.append(batch(value)) for value in values))
        assert [answer.base_offset for answer in answers] == list(range(30))
        assert (await waiting).batches[0].base_offset == 0
        follower = await cluster.open(cluster.followers[0])
        offset = 0
        while offset < 30:
            found = await follower.fetch(at(offset, wait_ms=1000, flags=READ_FOLLOWER))
            for one in found.batches:
                assert bytes(one.payload) == batch(values[one.base_offset])
                offset = one.base_offset + 1
        for stranger in (
            Settings(),  # speaks no TLS
            Settings(transport=tls_files(tmp_path, "stranger", trustme.CA())),
        ):
            with pytest.raises(TransportError):
                await Channel.open(cluster.endpoint(), stranger)
        with pytest.raises(TransportError):
            await Channel.open(cluster.endpoint()._replace(token=b"x" * 32), cluster.settings)
        assert (await channel.append(batch(b"still"))).base_offset == 30

    try:
        cluster.run(scenario())
    finally:
        cluster.close()


@pytest.mark.parametrize(("queue", "client"), [(True, False), (False, True)])
def test_a_client_that_differs_from_its_queue_in_tls_is_told_at_once(tmp_path: Path, queue: bool, client: bool) -> None:
    secured = Settings(transport=tls_files(tmp_path, "client", trustme.CA()))
    settings = secured if client else Settings()

    class Told(Directory):
        async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
            return Endpoint("127.0.0.1", 1, b"token", replica_id, None, Term(0), tls=queue)

        async def coordinators(self) -> tuple[str, ...]:
            return ("c1", "c2", "c3")

    async def ask() -> None:
        route = CoordinatorRoute(Told(), settings)
        with pytest.raises(ConfigError, match="speaks TLS, and this" if queue else "speaks no TLS, and this"):
            await asyncio.wait_for(route.call(GetTopics()), settings.client.call_timeout_ms / 2000)
        route.close()

    asyncio.run(ask())
