"""Batches that are checked beside the engine's thread: in order, in turns, bounded, and never by that thread."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rayqueue.errors import CorruptBatchError, InvalidInputError, OversizedBatchError, QueueFullError, RayQueueError
from rayqueue.protocol.calls import GetBounds
from rayqueue.protocol.frames import Kind
from rayqueue.records import BatchHeader, Compression, RecordBatch, compression
from rayqueue.replica.checks import Checks
from tests.unit.net.client_net import at
from tests.unit.records.test_records_batch import resealed, sealed
from tests.unit.replica.test_client_strangers import cluster_of, works

HEADER = BatchHeader.parse(RecordBatch.encode([b"v"], timestamps=1))


class Engine:
    """The engine's thread, which is this one: ``turn`` does what the other thread has brought."""

    def __init__(self, limit_bytes: int = 1000, *, held: bool = False) -> None:
        self.checked: list[bytes] = []
        self.results: list[tuple[int, Any]] = []
        self.go = threading.Event()
        if not held:
            self.go.set()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.checks = Checks(self._check, self._work.put, limit_bytes)

    def _check(self, payload: bytes) -> BatchHeader:
        assert self.go.wait(10)
        self.checked.append(payload)
        if b"bad" in payload:
            raise CorruptBatchError("bad")
        return HEADER

    def add(self, client: int, payload: bytes) -> None:
        self.checks.add(client, payload, lambda result: self.results.append((client, result)))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self._work.get(timeout=10)()


def test_results_come_in_the_order_of_each_client() -> None:
    engine = Engine()
    for payload in (b"one", b"", b"bad"):
        engine.add(1, payload)
    assert 1 in engine.checks
    engine.turns(3)
    assert [type(result) for _, result in engine.results] == [BatchHeader, BatchHeader, CorruptBatchError]
    assert 1 not in engine.checks
    engine.checks.close()


def test_who_sends_many_waits_for_itself() -> None:
    engine = Engine(held=True, limit_bytes=10_000)
    for number in range(50):
        engine.add(1, b"many%d" % number)
    engine.add(2, b"one")
    engine.go.set()
    engine.turns(51)
    assert engine.checked.index(b"one") <= 2
    engine.checks.close()


def test_what_waits_is_bounded_for_each_and_for_all() -> None:
    engine = Engine(held=True, limit_bytes=1000)
    engine.add(1, bytes(200))
    with pytest.raises(QueueFullError):
        engine.add(1, bytes(51))
    for client in range(2, 6):
        engine.add(client, bytes(200))
    with pytest.raises(QueueFullError):
        engine.add(7, b"x")
    engine.go.set()
    engine.turns(5)
    engine.add(7, bytes(5000))  # alone, and however large
    engine.turns(1)
    assert len(engine.results) == 6
    engine.checks.close()


# -- through a replica -----------------------------------------------------------------


def test_the_engines_thread_unpacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack, threads = compression.unpack, set()

    def noting(*arguments: Any) -> bytes:
        threads.add(threading.current_thread().name)
        return unpack(*arguments)

    monkeypatch.setattr(compression, "unpack", noting)
    bomb = RecordBatch.encode([bytes(15 << 20)], timestamps=1, compression=Compression.ZSTD)
    assert len(bomb) < 10_000
    with cluster_of(tmp_path) as cluster:

        async def scenario() -> None:
            channel = await cluster.open()
            for _ in range(5):
                await channel.append(bomb)
            channel.close()

        cluster.run(scenario())
    assert len(threads) == 1
    assert not any(name.startswith("raft") for name in threads)


@pytest.mark.parametrize("kind", [Kind.APPEND, Kind.APPEND_LEADER])
def test_compressed_and_plain_batches_of_a_producer_keep_their_order(tmp_path: Path, kind: Kind) -> None:
    def one(number: int) -> bytes:
        method = Compression.NONE if number % 3 == 2 else Compression.LZ4
        return RecordBatch.encode(
            [b"%06d" % number * 50] * 2, timestamps=1, producer_id=7, sequence=2 * number, compression=method
        )

    with cluster_of(tmp_path) as cluster:

        async def scenario() -> None:
            channel = await cluster.open()
            await asyncio.gather(*(channel.append(one(number), kind) for number in range(60)))
            for number in range(60, 64):
                channel.append(one(number), Kind.APPEND_UNACKED)
            await channel.append(one(64))
            answer = await channel.fetch(at(0))
            values = [value for each in answer.batches for value in RecordBatch.decode(each.payload).values()]
            assert values == [b"%06d" % (row // 2) * 50 for row in range(130)]
            channel.close()

        cluster.run(scenario())


def poison() -> dict[str, bytes]:
    honest = RecordBatch.encode([b"v" * 100] * 40, timestamps=0)[72:]
    wrong = bytearray(honest)
    struct.pack_into("<i", wrong, honest.index(struct.pack("<2i", 0, 100)) + 4, 2**30)
    zstd = Compression.ZSTD
    return {
        "count": sealed(honest, 2**32 - 1, compression=zstd),
        "one too many": sealed(honest, 41, compression=zstd),
        "offsets": sealed(bytes(wrong), 40),
        "offsets, packed": sealed(bytes(wrong), 40, compression=zstd),
        "length": sealed(honest, 40, compression=zstd, claim=2**24),
        "huge": sealed(honest, 40, compression=zstd, claim=2**32 - 1),
        "garbage, packed": resealed(sealed(honest, 40, compression=zstd)[:-20] + bytes(20)),
        "rows": RecordBatch.encode([b""] * 250_001, timestamps=1, compression=zstd),
        "bomb": RecordBatch.encode([bytes(17 << 20)], timestamps=1, compression=zstd),
    }


def test_poison_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:

        async def scenario() -> None:
            channel = await cluster.open()
            for name, batch in poison().items():
                expected: type[RayQueueError] = (
                    OversizedBatchError if name in ("huge", "rows", "bomb") else CorruptBatchError
                )
                with pytest.raises(InvalidInputError) as caught:
                    await channel.append(batch)
                assert type(caught.value) is expected, name
            assert (await channel.call(GetBounds())).end == 0
            channel.close()

        cluster.run(scenario())
        works(cluster)
