"""One replica's process, as the test sees it: started, called, killed, paused.

Owns the process, the control connection to it and the calls under way. When the
process goes, every call under way fails with ``OutcomeUnknownError``; a call to
a process that is gone already fails with ``ReplicaClosedError``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import count
from pathlib import Path
from typing import Any

import rayqueue
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, RayQueueError, ReplicaClosedError
from rayqueue.ids import ReplicaId
from rayqueue.testing.control import Control

CALL_TIMEOUT_S = 15.0
START_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 2000


class Process:
    """A running (or ended) replica process. ``call`` may be used by any thread."""

    def __init__(self, replica_id: ReplicaId, log_path: Path) -> None:
        self.replica_id = replica_id
        self.paused = False
        self.killed = False
        self._log_path = log_path
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._gone = False
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "rayqueue.testing.replica_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd=log_path.parent,
            )
        self._control = Control(ours)
        self._reader = threading.Thread(target=self._read, name=f"answers of {replica_id}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return not self._gone and self._popen.poll() is None

    @property
    def crash(self) -> str | None:
        """The end of the process's log, if it ended though nobody killed it."""
        code = self._popen.poll()
        if code is None or self.killed:
            return None
        return f"{self.replica_id} ended with code {code}:\n{self._log_tail()}"

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        """Ask the process. The future has its answer, or the error it answered with."""
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                raise ReplicaClosedError(f"the process of {self.replica_id} is gone", replica_id=self.replica_id)
            number = next(self._numbers)
            self._waiting[number] = future
        try:
            self._control.call(number, name, arguments)
        except OSError:
            self._end()
        return future

    def ask(self, name: str, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """The result of a call, waited for."""
        return result_of(self.call(name, **arguments), timeout_s)

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self.killed = True
        self._popen.kill()
        self._popen.wait(_EXIT_TIMEOUT_S)
        self._reader.join(_EXIT_TIMEOUT_S)

    def pause(self) -> None:
        self._popen.send_signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        self._popen.send_signal(signal.SIGCONT)
        self.paused = False

    def _read(self) -> None:
        while (received := self._control.receive()) is not None:
            number, answer = received
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if isinstance(answer, RayQueueError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._end()
        self._control.close()

    def _end(self) -> None:
        with self._lock:
            self._gone = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(OutcomeUnknownError(f"the process of {self.replica_id} ended before it answered"))

    def _log_tail(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def result_of(future: Future[Any], timeout_s: float) -> Any:
    """Wait for an answer. No answer in time says nothing about the outcome."""
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        raise OutcomeUnknownError(f"no answer within {timeout_s:.1f} s; outcome unknown") from None


def settings_values(settings: Settings, secret: str) -> dict[str, Any]:
    """Every setting as JSON, for a process that reads neither environment nor files."""
    values: dict[str, Any] = settings.model_dump(mode="json")
    values["transport"]["secret"] = secret
    return values


def _environment() -> dict[str, str]:
    """This process's environment without our own variables, and with this very package on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("RAYQUEUE_")}
    package = str(Path(rayqueue.__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH"))))
    return kept
