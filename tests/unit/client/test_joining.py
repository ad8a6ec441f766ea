"""Joining a Ray: addresses where none answers, the note of a directory's Ray, the environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rayqueue
from rayqueue.actors import _ray
from rayqueue.client import joining, local_ray
from rayqueue.client.embedded import own_environment
from rayqueue.client.joining import why_unreachable
from rayqueue.client.local_ray import LocalRay, process_started
from rayqueue.errors import ClusterNotFoundError, ClusterStartError, StorageError


@contextmanager
def listening(greeting: bytes | None) -> Iterator[str]:
    """Something that accepts connections, and says this to each, if anything."""
    server = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                dialled, _ = server.accept()
            except OSError:
                return
            kept.append(dialled)
            if greeting is not None:
                dialled.sendall(greeting)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for each in kept:
            each.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379", "127.0.0.1", "127.0.0.1:x", ":6379"])
def test_an_address_where_nobody_listens_is_told_in_seconds(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = time.monotonic()
    with pytest.raises(ClusterNotFoundError, match="rayqueue up") as told:
        rayqueue.connect(address)
    assert address in str(told.value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterNotFoundError, match="RAY_ADDRESS"):
        rayqueue.connect()
    assert time.monotonic() - began_s < 20


def test_what_listens_and_is_no_ray_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_GREETING_S", 0.2)
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert why_unreachable(address) == "what listens there is no Ray"
        with pytest.raises(ClusterNotFoundError, match="is no Ray"):
            rayqueue.connect(address, create=False)
    with listening(None) as address:
        assert why_unreachable(address) == "timed out"
    with listening(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0])) as address:  # the head of a SETTINGS frame
        assert why_unreachable(address) is None


def test_a_name_that_takes_long_to_look_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def hang(*_: object, **__: object) -> None:
        given_up.wait(30)
        raise OSError("at last")

    monkeypatch.setattr(joining, "_DIAL_S", 0.1)
    monkeypatch.setattr(joining, "_GREETING_S", 0.1)
    monkeypatch.setattr(socket, "create_connection", hang)
    assert "no answer within" in str(why_unreachable("somewhere:6379"))
    given_up.set()


def test_auto_means_one_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ClusterNotFoundError, match="no Ray runs on this machine"):
        rayqueue.connect("auto", data_dir=tmp_path)
    with pytest.raises(ClusterNotFoundError, match="none was to be started"):
        rayqueue.connect(create=False, data_dir=tmp_path)


# -- the note of a data directory's Ray ------------------------------------------------------------


def note(pid: int, address: str = "127.0.0.1:1") -> LocalRay:
    return LocalRay(pid, process_started(pid) or "0", address, None, command=False)


def test_a_note_counts_while_its_process_runs(tmp_path: Path) -> None:
    assert local_ray.find(tmp_path) is None
    assert local_ray.find(tmp_path / "nothing") is None
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        local_ray.leave(tmp_path, note(other.pid))
        assert (tmp_path / "ray.json").stat().st_mode & 0o777 == 0o600
        assert local_ray.find(tmp_path) == note(other.pid)
        local_ray.forget(tmp_path, os.getpid())  # not ours to take back
        assert local_ray.find(tmp_path) == note(other.pid)
    finally:
        other.kill()
        other.wait()
    assert local_ray.find(tmp_path) is None
    local_ray.leave(tmp_path, note(os.getpid())._replace(started="1"))  # the pid is another process's by now
    assert local_ray.find(tmp_path) is None
    local_ray.forget(tmp_path, os.getpid())
    assert not (tmp_path / "ray.json").exists()


def test_a_note_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"pid": 1}', '"\\u0000"'):
        (tmp_path / "ray.json").write_text(text)
        with pytest.raises(StorageError, match="delete it"):
            local_ray.find(tmp_path)


def test_the_ray_of_a_directory_is_found_if_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with listening(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0])) as address:
        local_ray.leave(tmp_path, note(os.getpid(), address))
        assert joining.find_ray(None, tmp_path) == joining.find_ray("auto", tmp_path) == address
        assert joining.find_ray("local", tmp_path) is None
    local_ray.leave(tmp_path, note(os.getpid()))
    assert joining.find_ray(None, tmp_path) is None


_HOLDS = """
import sys, time
from pathlib import Path
from rayqueue.client import local_ray
with local_ray.starting(Path(sys.argv[1]), 1000):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time_starts_a_ray_and_a_killed_one_is_no_hindrance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "_SAY_AFTER_S", 0.0)
    home = tmp_path / "data"
    first = subprocess.Popen([sys.executable, "-c", _HOLDS, str(home)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ClusterStartError, match="another process"), local_ray.starting(home, 200):
            pass
        assert "waiting for another process" in caplog.text
    finally:
        first.kill()
        first.wait()
    with local_ray.starting(home, 5000):
        pass
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"), local_ray.starting(tmp_path / "file" / "below", 100):
        pass


# -- the environment ------------------------------------------------------------------------------


def test_what_ray_sets_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_MINE", "1")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    before = dict(os.environ)
    with own_environment():
        os.environ.update(RAY_AUTH_MODE="token", RAY_NEW="1", PYTHONBREAKPOINT="ray")
        del os.environ["RAY_MINE"]
        os.environ["OF_THE_APPLICATION"] = "1"
    assert os.environ.pop("OF_THE_APPLICATION") == "1"
    assert dict(os.environ) == before


def test_joining_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 40)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    asks_for_a_token = iter((False, True))
    monkeypatch.setattr(_ray, "lets_in", lambda _: next(asks_for_a_token))

    def init(**_: object) -> None:
        assert os.environ["RAY_AUTH_MODE"] == "token"  # it would not be let in
        raise ConnectionError("far enough")

    monkeypatch.setattr("ray.init", init)
    with (
        listening(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0])) as address,
        pytest.raises(ClusterNotFoundError, match="far enough"),
    ):
        rayqueue.connect(address, create=False)
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_ray_without_a_token_is_not_shown_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In token mode this process would refuse the calls of that Ray's other processes, and lose its actors."""
    (tmp_path / "token").write_text("t" * 40)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(_ray, "lets_in", lambda _: True)

    def init(**_: object) -> None:
        assert "RAY_AUTH_MODE" not in os.environ
        raise ConnectionError("far enough")

    monkeypatch.setattr("ray.init", init)
    with (
        listening(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0])) as address,
        pytest.raises(ClusterNotFoundError, match="far enough"),
    ):
        rayqueue.connect(address, create=False)
