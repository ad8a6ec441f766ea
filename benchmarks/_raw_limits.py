"""The raw limits of this machine: disk, loopback and memory, with nothing of RayQueue in between.

Each function moves the very bytes a replica would, by the most direct way
there is, for ``seconds``. They are measured in the same run as what is
compared with them, because a shared disk is a different one every minute.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lmdb

_MAX_FILE_BYTES = 1 << 30
_HOST = "127.0.0.1"

_DRAIN = """
import socket, sys
space = memoryview(bytearray(1 << 20))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    while sock.recv_into(space):
        pass
"""


@dataclass(frozen=True, slots=True)
class Limit:
    mb_per_s: float
    times_ms: list[float]


def fdatasync(folder: Path, data: bytes, seconds: float) -> Limit:
    """Append ``data`` to a file and wait for the disk, one time after the other."""
    path = folder / "plain"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)

    def write() -> None:
        os.write(fd, data)
        os.fdatasync(fd)

    try:
        return _repeat(write, len(data), seconds)
    finally:
        os.close(fd)
        path.unlink()


def lmdb_put(folder: Path, data: bytes, seconds: float, per_transaction: int = 1) -> Limit:
    """Put ``data`` under the next key, ``per_transaction`` times, and commit with sync."""
    folder.mkdir(exist_ok=True)
    env = lmdb.open(str(folder), map_size=2 * _MAX_FILE_BYTES, lib_version=0)
    key = 0

    def put() -> None:
        nonlocal key
        with env.begin(write=True) as txn:
            for _ in range(per_transaction):
                key += 1
                txn.put(key.to_bytes(8, "big"), data, append=True)

    try:
        return _repeat(put, len(data) * per_transaction, seconds)
    finally:
        env.close()
        for name in ("data.mdb", "lock.mdb"):
            (folder / name).unlink()


def lmdb_puts_at_once(folder: Path, data: bytes, seconds: float, writers: int, per_transaction: int = 1) -> Limit:
    """The same by several writers, each to its own file, as replicas on one disk do. Megabytes of one of them."""
    with ThreadPoolExecutor(writers) as pool:
        runs = [
            pool.submit(lmdb_put, folder / f"writer-{number}", data, seconds, per_transaction)
            for number in range(writers)
        ]
        limits = [run.result() for run in runs]
    times_ms = [time_ms for limit in limits for time_ms in limit.times_ms]
    return Limit(sum(limit.mb_per_s for limit in limits) / writers, times_ms)


def loopback(data: bytes, seconds: float) -> Limit:
    """Send ``data`` to another process over TCP; it reads and forgets."""
    with socket.create_server((_HOST, 0)) as server:
        reader = subprocess.Popen([sys.executable, "-c", _DRAIN, str(server.getsockname()[1])])
        server.settimeout(10)
        sock, _ = server.accept()
        with sock:
            sock.settimeout(10)
            limit = _repeat(lambda: sock.sendall(data), len(data), seconds, max_bytes=1 << 40)
        reader.wait(10)
    return limit


def new_memory(size_bytes: int, seconds: float) -> Limit:
    """Write to memory that the process has just been given. A virtual machine whose host gives memory page by page
    may take twenty times as long for it as one that owns its memory, and pays that for every new page of a file."""

    def touch() -> None:
        with mmap.mmap(-1, size_bytes) as space:
            space.write(zeros)

    zeros = bytes(size_bytes)
    return _repeat(touch, size_bytes, seconds, max_bytes=1 << 40)


def _repeat(action: Callable[[], None], size_bytes: int, seconds: float, max_bytes: int = _MAX_FILE_BYTES) -> Limit:
    times_ms: list[float] = []
    clock = time.perf_counter
    began = before = clock()
    while before - began < seconds and (len(times_ms) + 1) * size_bytes < max_bytes:
        action()
        after = clock()
        times_ms.append((after - before) * 1000)
        before = after
    return Limit(len(times_ms) * size_bytes / (before - began) / 1e6, times_ms)
