"""A Redis for comparison: the server as a child process with its own directory, and as much of a client as is needed.

``redis-server`` is looked for on the path (Debian: ``apt install redis-server``),
or in ``REDIS_SERVER``. It listens on a Unix socket only, and syncs its log before
every answer (``appendfsync always``), as RayQueue does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def redis_server() -> str | None:
    """The program; None if there is none here."""
    return os.environ.get("REDIS_SERVER") or shutil.which("redis-server")


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    """The path of its socket, for as long as the block lasts."""
    program = redis_server()
    if program is None:
        raise FileNotFoundError("redis-server")
    directory.mkdir()
    # A socket's path is short: 108 bytes at most.
    path = f"/tmp/rq-redis-{os.getpid()}.sock"
    options = {
        "port": "0",
        "unixsocket": path,
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "daemonize": "no",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                Redis(path).close()
                break
            except OSError:
                time.sleep(0.05)
        yield path
    finally:
        server.terminate()
        server.wait(10)
        Path(path).unlink(missing_ok=True)


class Redis:
    """One connection. Commands are sent together, and their answers read together."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb", 1 << 16)

    def __call__(self, *words: bytes | str | int) -> Any:
        return self.all([words])[0]

    def all(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any]:
        self._socket.sendall(b"".join(map(_encoded, commands)))
        return [self._answer() for _ in commands]

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _answer(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._answer() for _ in range(int(rest))]
        return rest


def _encoded(words: Sequence[bytes | str | int]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
