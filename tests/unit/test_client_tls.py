"""A channel under TLS: the handshake is bound to the session, large frames pass, strangers do not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import trustme

from rayqueue.client.channel import Channel
from rayqueue.config import Settings
from rayqueue.errors import TransportError
from rayqueue.protocol.data import READ_FOLLOWER
from tests.unit.client_net import Cluster, at, batch


def tls_files(folder: Path, name: str, authority: trustme.CA) -> dict[str, Path]:
    issued = authority.issue_cert(f"{name}.rayqueue.test")
    cert, key, ca = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    return {"tls_cert_path": cert, "tls_key_path": key, "tls_ca_path": ca}


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
