"""Twins: what a thread can do, ``await`` can do; each is written once, and waits in the way of its caller."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayqueue.client import connect
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.handle import RayQueue
from rayqueue.client.io import IoThread
from rayqueue.client.process.handle import Processing
from rayqueue.client.producer.encoding import EncodingProducer
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.topic import Topic, TopicProducer
from rayqueue.client.producer.transactions.transaction import Transaction
from rayqueue.client.queue.dead import DeadLetters
from rayqueue.client.queue.handles import JobHandle, JobHandles
from rayqueue.client.queue.job import Job
from rayqueue.client.queue.queue import JobQueue
from rayqueue.client.twins import awaiting, beside, blocking, in_io, of_application, part, rest
from rayqueue.client.wakeup import Wakeup
from rayqueue.errors import InvalidInputError, RayQueueError

NOT_BLOCKING: dict[type, set[str]] = {
    RayQueue: set(),
    Producer: {"transaction"},
    EncodingProducer: {"transaction"},
    Topic: set(),
    TopicProducer: {"transaction"},
    Transaction: set(),
    Consumer: {"ack", "assignment", "paused", "positions", "take_set_aside", "wakeup"},
    JobQueue: {"ask_partition", "find_first", "open", "partition_count"},
    Job: set(),
    JobHandle: set(),
    JobHandles: {"count", "index"},
    DeadLetters: set(),
    Processing: set(),
}
"""Public methods without a twin, because there is nothing in them to wait for, or they are steps of other bodies."""


def public(kind: type) -> dict[str, Any]:
    """Its methods, those that it inherits too."""
    return {name: method for name, method in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")}


@pytest.mark.parametrize("kind", NOT_BLOCKING)
def test_every_method_that_blocks_has_a_twin(kind: type) -> None:
    methods = public(kind)
    alone = {name for name in methods if not name.endswith("_async") and f"{name}_async" not in methods}
    assert alone == NOT_BLOCKING[kind]
    for name in methods:
        blocks = name.removesuffix("_async")
        assert blocks in methods or isinstance(inspect.getattr_static(kind, blocks), property)


@pytest.mark.parametrize("kind", NOT_BLOCKING)
def test_what_can_be_left_by_with_can_be_left_by_async_with(kind: type) -> None:
    assert hasattr(kind, "__enter__") == hasattr(kind, "__aenter__") == hasattr(kind, "__aexit__")


@pytest.mark.parametrize("kind", NOT_BLOCKING)
def test_twins_take_the_same_arguments_and_say_what_they_do(kind: type) -> None:
    methods = public(kind)
    made = [name for name, method in methods.items() if hasattr(method, "body") and f"{name}_async" in methods]
    for name in made:
        twin = methods[f"{name}_async"]
        shown, shown_async = inspect.signature(methods[name]), inspect.signature(twin)
        assert shown.parameters == shown_async.parameters
        assert not inspect.iscoroutinefunction(methods[name])
        if (kind, name) != (Consumer, "commit"):  # its twin begins before it is awaited, and gives a PendingCommit
            assert inspect.iscoroutinefunction(twin)
            assert shown.return_annotation == shown_async.return_annotation
        assert twin.__name__ == f"{name}_async"
        assert methods[name].__doc__, name
        assert twin.__doc__, name


def test_connecting_has_a_twin_too() -> None:
    assert inspect.signature(connect.connect) == inspect.signature(connect.connect_async)
    assert inspect.iscoroutinefunction(connect.connect_async)


# -- how a body waits ---------------------------------------------------------------------------


class Bodies:
    """Calls with each kind of step."""

    def __init__(self, io: IoThread) -> None:
        self.io = io
        self.wakeup = Wakeup()
        self.begun, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.finished: list[str] = []
        self.seen: list[str] = []

    async def _thread(self) -> str:
        return threading.current_thread().name

    async def _slow(self, name: str) -> None:
        self.begun.set()
        try:
            await asyncio.to_thread(self.may_end.wait, 10)
            self.finished.append(name)
        finally:
            self.ended.set()

    async def _wrong(self) -> None:
        raise RayQueueError("wrong")

    @blocking
    async def in_io(self) -> tuple[str, str]:
        """Where it runs, and where the body does."""
        return await in_io(self.io, self._thread()), threading.current_thread().name

    in_io_async = awaiting(in_io)

    @blocking
    async def wrong(self) -> str:
        """An error comes out where it is waited for."""
        try:
            await in_io(self.io, self._wrong())
        except RayQueueError as error:
            return f"caught {error}"
        raise AssertionError

    wrong_async = awaiting(wrong)

    @blocking
    async def beside(self) -> str:
        """A function that blocks."""
        return await beside(lambda: threading.current_thread().name)

    beside_async = awaiting(beside)

    @blocking
    async def rest(self, seconds: float) -> float:
        """How long it was."""
        began_s = time.monotonic()
        await rest(self.wakeup, seconds)
        return time.monotonic() - began_s

    rest_async = awaiting(rest)

    @blocking
    async def listener(self) -> Any:
        """A coroutine of the application's."""
        return await of_application(asyncio.sleep(0, "slept"))

    listener_async = awaiting(listener)

    @blocking
    async def both(self) -> tuple[str, str]:
        """Two of the others."""
        return await part(self.wrong)(), await part(self.beside)()

    both_async = awaiting(both)

    @blocking
    async def slow(self, *, finish: bool) -> None:
        """Something that takes a while."""
        try:
            await in_io(self.io, self._slow(f"finish={finish}"), finish=finish)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    slow_async = awaiting(slow)


@pytest.fixture
def bodies() -> Iterator[Bodies]:
    io = IoThread("test io")
    yield Bodies(io)
    io.close()


def test_a_thread_waits_by_blocking(bodies: Bodies) -> None:
    here = threading.current_thread().name
    assert bodies.in_io() == ("test io", here)
    assert bodies.wrong() == "caught wrong"
    assert bodies.beside() == here
    assert bodies.both() == ("caught wrong", here)
    assert bodies.rest(0.01) >= 0.005
    bodies.wakeup.ring()
    assert bodies.rest(60) < 30
    with pytest.raises(InvalidInputError, match="poll_async"):
        bodies.listener()


def test_a_coroutine_waits_without_blocking(bodies: Bodies) -> None:
    here = threading.current_thread().name

    async def main() -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        assert await bodies.in_io_async() == ("test io", here)
        assert await bodies.wrong_async() == "caught wrong"
        assert await bodies.beside_async() != here
        assert (await bodies.both_async())[0] == "caught wrong"
        assert await bodies.listener_async() == "slept"
        before = turns
        assert await bodies.rest_async(0.02) >= 0.01
        assert turns > before + 10, "the event loop did not go on"
        resting = asyncio.create_task(bodies.rest_async(60))
        await asyncio.sleep(0.01)
        threading.Thread(target=bodies.wakeup.ring).start()
        assert await asyncio.wait_for(resting, 10) < 10
        counting.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("finish", [True, False])
def test_a_cancelled_wait_cancels_its_work_unless_that_is_to_be_finished(bodies: Bodies, finish: bool) -> None:
    async def main() -> None:
        slow = asyncio.create_task(bodies.slow_async(finish=finish))
        assert await asyncio.to_thread(bodies.begun.wait, 10)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        if not finish:
            assert await asyncio.to_thread(bodies.ended.wait, 10), "it was cancelled, too"
        bodies.may_end.set()
        assert await asyncio.to_thread(bodies.ended.wait, 10)

    asyncio.run(main())
    assert bodies.seen == ["cancelled"]
    assert bodies.finished == (["finish=True"] if finish else [])


def test_the_io_thread_is_refused_what_would_wait_for_itself_and_may_await(bodies: Bodies) -> None:
    async def inside() -> tuple[str, str]:
        with pytest.raises(InvalidInputError, match="wait for itself"):
            bodies.in_io()
        return await bodies.in_io_async()

    assert bodies.io.call(inside()) == ("test io", "test io")


@pytest.mark.parametrize("call", [lambda of: of.rest(second=1), lambda of: asyncio.run(of.rest_async(second=1))])
def test_arguments_that_do_not_fit_are_an_error_with_a_hint(bodies: Bodies, call: Callable[[Bodies], Any]) -> None:
    with pytest.raises(InvalidInputError, match="did you mean seconds"):
        call(bodies)


def test_the_guide_lists_every_twin() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide.md").read_text()
    rows = re.findall(
        r"^\| (`.*?) \| (`.*`) \|$", guide.partition("\n## Asyncio\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    told = {name: set(re.findall(r"`(\w+)`", calls)) for names, calls in rows for name in re.findall(r"`(\w+)`", names)}
    listed = {kind.__name__: kind for kind in NOT_BLOCKING if kind is not EncodingProducer}  # which is a Producer
    assert told.pop("rayqueue") == {"connect"}
    assert told == {
        name: {each.removesuffix("_async") for each in public(kind) if each.endswith("_async")}
        for name, kind in listed.items()
    }
