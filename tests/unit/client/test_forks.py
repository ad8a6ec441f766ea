"""Forked children of a process that is connected: refused at once, and the parent notices nothing."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayqueue.client.handle import RayQueue
from rayqueue.client.io import IoThread, _new_loop
from rayqueue.client.producer import delivery as delivery_module
from rayqueue.client.producer.callbacks import CallbackThread
from rayqueue.client.producer.producer import Producer
from rayqueue.client.shared import SharedConnections
from rayqueue.errors import DeliveryFailedError, ForkedError
from rayqueue.protocol.topics import TopicPartition
from tests.unit.client.consumer.consumer_place import Place
from tests.unit.client.forks import held, in_child
from tests.unit.client.producer import scripted
from tests.unit.client.producer.test_producer import Cluster


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ForkedError, match=r"rayqueue\.connect\(\)"):
        call()


def refused_async(call: Callable[[], Awaitable[Any]]) -> None:
    async def run() -> None:
        await call()

    refused(lambda: asyncio.run(run()))


def test_a_producer_accepts_nothing_in_a_child_and_the_parents_goes_on() -> None:
    cluster = Cluster()
    producer = Producer(cluster)
    assert producer.send("orders", b"before").result(5000).offset == 0

    def child() -> None:
        refused(lambda: producer.send("orders", b"lost"))
        refused(lambda: producer.send("orders", b"lost", on_delivery=print))
        refused(lambda: producer.send_many("orders", [b"lost"] * 3))
        refused(lambda: producer.send("another", b"lost"))
        refused_async(lambda: producer.send_async("orders", b"lost"))
        refused_async(lambda: producer.send_many_async("orders", [b"lost"]))
        refused(producer.flush)
        refused_async(producer.flush_async)
        refused(lambda: Producer(cluster).send("orders", b"lost"))  # the connection is the parent's, too
        with producer:
            pass
        asyncio.run(producer.close_async())
        refused(lambda: producer.send("orders", b"still not closed"))

    locks = (producer._accumulator.lock, delivery_module._registering, CallbackThread._shared_lock)
    with held(*locks, producer._targets.lock, IoThread._shared_lock):
        in_child(child)
    assert producer.send("orders", b"after").result(5000).offset == 1
    producer.close()
    assert cluster.values() == [[b"before", b"after"]]


@pytest.mark.slow
def test_what_was_under_way_is_told_to_the_parent_only(tmp_path: Path) -> None:
    cluster = Cluster(script=[scripted.SILENT] * 100)
    called = tmp_path / "called"
    producer = Producer(cluster, delivery_timeout_ms=60_000)

    def on_delivery(delivery: Any) -> None:
        with called.open("a") as file:
            file.write(f"{os.getpid()} {type(delivery.exception()).__name__}\n")

    one = producer.send("orders", b"x", on_delivery=on_delivery)
    many = producer.send_many("orders", [b"y", b"z"], on_delivery=on_delivery)
    in_callback = threading.Event()

    def child() -> None:
        assert one.done()
        assert many.done()
        assert many[1].done()
        refused(one.result)
        refused(many.result)
        refused(many[0].result)
        assert isinstance(one.exception(), ForkedError)
        assert isinstance(many.exception(), ForkedError)
        refused_async(lambda: one)
        refused_async(lambda: many)
        one.add_done_callback(lambda _: in_callback.set())
        assert in_callback.wait(5)
        assert "ForkedError" in repr(one)
        del producer.settings
        gc.collect()

    with held(delivery_module._registering):
        in_child(child)
    assert not one.done()
    assert not many.done()
    assert not called.exists()
    with suppress(DeliveryFailedError):
        producer.close(timeout_ms=0)
    assert type(one.exception(5000)) is not ForkedError
    assert CallbackThread.shared().drain(5)
    assert [line.split()[0] for line in called.read_text().split("\n")[:-1]] == [str(os.getpid())] * 2


def test_a_consumer_is_the_parents(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.create(2)
    place.append(3)
    consumer = place.consumer()
    try:
        records = consumer.poll(max_records=1, timeout_ms=5000)
        pending = consumer.commit_async()
        pending.result(5000)
        where = TopicPartition("orders", 0)

        def child() -> None:
            calls: list[Callable[[], Any]] = [
                consumer.poll,
                consumer.poll_arrow,
                lambda: next(iter(consumer)),
                consumer.commit,
                consumer.commit_async,
                consumer.assignment,
                consumer.paused,
                consumer.pause,
                consumer.resume,
                consumer.lag,
                consumer.wakeup,
                consumer.seek_to_end,
                pending.result,
                lambda: consumer.ack(records[0]),
                lambda: consumer.seek(where, 0),
                lambda: consumer.position(where),
                lambda: consumer.committed(where),
                lambda: consumer.peek("orders", 0),
            ]
            for call in calls:
                refused(call)
            refused_async(consumer.poll_async)
            refused_async(lambda: consumer.__aiter__().__anext__())
            refused_async(lambda: pending)
            assert pending.done()
            with consumer:
                pass
            asyncio.run(consumer.close_async())

        with held(consumer._caller._free, consumer._sub.lock, consumer._core.wakeup._lock):
            in_child(child)
        assert len(records + consumer.poll(timeout_ms=5000)) == 3
        consumer.commit()
        assert place.committed() == {0: 3}
    finally:
        place.close()


@pytest.mark.slow
@pytest.mark.parametrize("new_loop", [_new_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_the_parents_sockets_are_heard_whatever_the_child_lets_go_of(
    new_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayqueue.client.io._new_loop", new_loop)
    io = IoThread("test io")

    class Echo(asyncio.Protocol):
        transport: Any = None

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def dial() -> tuple[Any, Any, Any]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0)
        return (*await asyncio.open_connection(*server.sockets[0].getsockname()), server)

    reader, writer, server = io.call(dial())

    async def ask() -> bytes:
        writer.write(b"hello")
        return await asyncio.wait_for(reader.readexactly(5), 5)

    assert io.call(ask()) == b"hello"
    kept: list[Any] = [reader, writer, server]

    def child() -> None:
        nonlocal reader, writer, server
        refused(lambda: io.run(ask()))
        refused(lambda: io.call(ask()))
        writer.transport.abort()
        server.close()
        kept.clear()
        del reader, writer, server
        gc.collect()
        io.close()

    in_child(child)
    assert io.call(ask()) == b"hello"
    io.call(_close(server, writer))
    io.close()


async def _close(server: Any, writer: Any) -> None:
    writer.close()
    server.close()


_ENDS_NORMALLY = """
import os, sys, threading
from rayqueue.client.producer.producer import Producer
from rayqueue.testing import wait_for
from tests.unit.client.producer.test_producer import Cluster

cluster = Cluster()
producer = Producer(cluster)
producer.send("orders", b"before").result(5000)
if os.fork() == 0:
    sys.exit(0)  # with everything that Python does at the end of a process
pid, status = os.wait()
assert status == 0, status
producer.send("orders", b"after").result(5000)
producer.close()
print(cluster.values())
"""


@pytest.mark.slow
def test_the_end_of_a_child_is_quiet() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_NORMALLY], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[b'before', b'after']]\n", "")


_ENDS_ITS_THREADS = """
import atexit, threading
atexit.register(lambda: print([each.name for each in threading.enumerate() if each.name.startswith("rayqueue")]))
from rayqueue.client.io import IoThread
shared, another = IoThread.shared(), IoThread("rayqueue another")
"""


@pytest.mark.slow
def test_no_loop_runs_while_the_interpreter_is_taken_down() -> None:
    """One did, where Ray was never imported, and the process ended by SIGSEGV: once in thousands."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_ITS_THREADS], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def _sends(producer: Producer, answer: Any) -> None:
    try:
        producer.send("orders", b"lost")
    except ForkedError as error:
        answer.put(str(error))
    producer.close()


def test_multiprocessing_by_fork() -> None:
    cluster = Cluster()
    with Producer(cluster) as producer:
        producer.send("orders", b"before").result(5000)
        context = multiprocessing.get_context("fork")
        answer = context.SimpleQueue()
        child = context.Process(target=_sends, args=(producer, answer))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert "spawn" in answer.get()
        producer.send("orders", b"after").result(5000)
    assert cluster.values() == [[b"before", b"after"]]


def test_what_a_child_makes_itself_works() -> None:
    def child() -> None:
        mine = Cluster()
        with Producer(mine) as producer:
            producer.send("orders", b"mine").result(5000)
        assert mine.values() == [[b"mine"]]

    in_child(child)


def test_a_handle_of_a_process_that_has_ray_is_refused_before_any_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("rayqueue.client.handle.current_ray", lambda: "127.0.0.1:1")
    from rayqueue import connect
    from rayqueue.config import Settings

    rq = RayQueue(Settings())

    def child() -> None:
        for call in (rq.topics, rq.producer, lambda: rq.consumer("orders"), rq.cluster, rq.shutdown, connect):
            refused(call)
        rq.close()
        with rq:
            pass
        SharedConnections.end_all()

    with held(rq._lock, SharedConnections._all_lock):
        in_child(child)
