"""The thread of all client connections."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from rayqueue.client.io import IoThread, in_io_thread
from rayqueue.client.producer.delivery import wait_until_known
from rayqueue.errors import InvalidInputError


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_one_thread_for_all() -> None:
    shared = IoThread.shared()
    assert IoThread.shared() is shared
    assert shared.call(thread_name()) == shared.run(thread_name()).result(5) == "rayqueue io"


def test_errors_and_time() -> None:
    io = IoThread.shared()
    ended = threading.Event()

    async def wrong() -> None:
        raise ValueError("this")

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="this"):
        io.call(wrong())
    with pytest.raises(TimeoutError):
        io.call(never(), 0.01)
    assert ended.wait(5)  # it was cancelled


def test_it_does_not_wait_for_itself() -> None:
    io = IoThread.shared()

    async def inside() -> None:
        io.call(thread_name())

    with pytest.raises(InvalidInputError):
        io.call(inside())


def test_a_forked_child_has_its_own() -> None:
    shared = IoThread.shared()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine = IoThread.shared()
            if mine is not shared and not shared.usable and mine.call(thread_name(), 5) == "rayqueue io":
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert IoThread.shared() is shared


def test_it_stays_in_its_process() -> None:
    with pytest.raises(TypeError):
        IoThread.shared().__reduce__()


def test_after_close_it_is_of_no_use() -> None:
    io = IoThread("another")
    assert io.call(thread_name()) == "another"
    io.close()
    assert not io.usable


_EXIT = """
import atexit, threading
def last():
    print([thread.name for thread in threading.enumerate() if thread.name == "rayqueue io"])
    coroutine = asyncio.sleep(0)
    try:
        io.run(coroutine)
    except ClosedError as error:
        print(error.code)
    print(ray_ended)
atexit.register(last)
ray_ended = False
import ray
def ended():
    global ray_ended
    ray_ended = not any(thread.name == "rayqueue io" for thread in threading.enumerate())
ray.shutdown = ended
import asyncio
import rayqueue.client.connect
from rayqueue.client import embedded
from rayqueue.client.producer.delivery import wait_until_known
from rayqueue.client.io import IoThread, in_io_thread
from rayqueue.errors import ClosedError
from pathlib import Path
import os, tempfile
embedded._start = lambda *_: Path(tempfile.mkdtemp())
io = IoThread.shared()
embedded.start_embedded_ray()
"""


@pytest.mark.slow
def test_an_exiting_process_ends_its_thread_before_its_ray_and_both_before_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "closed", "True"], done.stdout + done.stderr
    assert not done.stderr


def test_a_thread_of_any_name_is_known_as_an_io_thread() -> None:
    """Whoever waits there for a delivery would wait for himself."""
    io = IoThread(name="called otherwise")
    try:

        async def wait_in_it() -> None:
            assert in_io_thread()
            with pytest.raises(InvalidInputError, match="wait for itself"):
                wait_until_known([], 1.0)

        io.run(wait_in_it()).result(10)
        assert not in_io_thread()
    finally:
        io.close()


def test_what_nobody_closed_ends_with_its_thread() -> None:
    io, begun, ended = IoThread("test io"), threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    io.run(endless())
    assert begun.wait(10)
    io.close()
    assert ended.is_set()
