"""A rolling upgrade: replicas and clients of the release before and of this one in one group; nothing is lost.

The release before is a commit of this repository's history, unpacked beside.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from rayqueue.testing import wait_for
from tests.chaos.traffic import Record, longest_pause, step

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "886f6cc"
"""The last commit of the release before: formats 2 and 3 of stores, version 2 of both protocols."""
NODES = ("n1", "n2", "n3")
PATIENCE_S = 40.0


class FailedError(Exception):
    pass


class Process:
    """Of one release."""

    def __init__(self, code: Path, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAYQUEUE_")}
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "integration" / "either_release.py")],
                env=environment | {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=log.parent,
            )

    def ask(self, name: str, **arguments: Any) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([name, arguments]) + "\n")
        self._popen.stdin.flush()
        line = self._popen.stdout.readline()
        if not line:
            raise FailedError(f"the process ended with {self._popen.wait(10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(f"{answer['error']}: {answer['text']}")
        return answer["answer"]

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


class Beat:
    """One more client, which writes all the time, to measure for how long nobody acknowledges. A record takes it some
    10 ms, and a turn of the replicas more to find a new leader."""

    PRODUCER = 3

    def __init__(self, client: Process, endpoints: Callable[[], list[Any]]) -> None:
        self._client = client
        self._endpoints = endpoints
        self.acked: dict[int, int] = {}
        self._acked_s: list[float] = []
        self.failed: Exception | None = None
        self._stop = Event()
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            while not self._stop.wait(0.01):
                number = len(self.acked)
                arguments = {"producer": self.PRODUCER, "first": number, "count": 1}
                (self.acked[number],) = self._client.ask("write", endpoints=self._endpoints(), **arguments)
                self._acked_s.append(time.monotonic())
        except FailedError as error:
            self.failed = error

    def pauses(self, since_s: float) -> list[float]:
        return [longest_pause(list(self._acked_s), since_s)]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.failed is None, self.failed


class Group:
    """Three replicas, each of the one or the other release, and a client of each."""

    def __init__(self, folder: Path, before: Path, *, coordinator: bool = False) -> None:
        self._coordinator = coordinator
        self._folder = folder
        self._code = {"old": before, "new": ROOT}
        self.replicas: dict[str, Process] = {}
        self._addresses: dict[str, list[Any]] = {}
        self._clients = {name: Process(code, folder / f"client-{name}.log") for name, code in self._code.items()}
        self.acked: dict[str, dict[int, int]] = {name: {} for name in self._clients}
        """Of each client: number to offset."""
        self._endpoints: dict[str, list[Any]] = {}

    @contextmanager
    def beating(self, release: str) -> Iterator[Beat]:
        """While a client of this release writes all the time."""
        client = Process(self._code[release], self._folder / "client-beat.log")
        beat = Beat(client, lambda: list(self._endpoints.values()))
        try:
            yield beat
            beat.stop()
            self.acked["beat"] = beat.acked
        finally:
            client.kill()

    def start(self, node: str, release: str, *, create: bool = False) -> None:
        process = self.replicas[node] = Process(self._code[release], self._folder / f"{node}.log")
        voters = list(NODES) if create else None
        kind = {"coordinator": True} if self._coordinator else {}
        self._addresses[node] = process.ask("start", path=str(self._folder / node), node=node, voters=voters, **kind)
        for each in self.replicas.values():
            each.ask("peers", addresses=self._addresses)
        if not self._coordinator:
            self._endpoints = {**self._endpoints, node: process.ask("endpoint")}

    def stop(self, node: str) -> None:
        """As a planned stop does: whoever leads hands over first."""
        if self.leader() == node:
            self.lead(next(each for each in sorted(self.replicas) if each != node))
        self._endpoints = {each: told for each, told in self._endpoints.items() if each != node}
        self.replicas[node].ask("close")
        self.replicas.pop(node).kill()

    def lead(self, node: str) -> None:
        def leads() -> bool:
            leader = self.leader()
            if leader != node:
                try:
                    self.replicas[leader].ask("transfer", to=node)
                except FailedError:
                    return False
            return self.leader() == node

        wait_for(leads, f"{node} to lead", PATIENCE_S)

    def leader(self) -> str:
        def find() -> str | None:
            told = {node: process.ask("status") for node, process in self.replicas.items()}
            leading = [(status["term"], node) for node, status in told.items() if status["role"] == "leader"]
            return max(leading)[1] if leading else None

        return wait_for(find, "a leader", PATIENCE_S)

    def write(self, count: int = 5) -> None:
        """By the clients of both releases."""
        endpoints = [process.ask("endpoint") for process in self.replicas.values()]
        for producer, (name, client) in enumerate(self._clients.items(), 1):
            first = len(self.acked[name])
            offsets = client.ask("write", endpoints=endpoints, producer=producer, first=first, count=count)
            self.acked[name].update(enumerate(offsets, first))

    def check(self) -> None:
        """Every replica has every acknowledged record where it was acknowledged, as clients of both releases see it."""
        end = 1 + max(offset for acked in self.acked.values() for offset in acked.values())
        for node, process in self.replicas.items():
            wait_for(partial(_has, process, end), f"{node} to have all", PATIENCE_S)
            for client in self._clients.values():
                values = client.ask("read", endpoint=process.ask("endpoint"))
                for producer, acked in enumerate(self.acked.values(), 1):
                    assert {number: values[offset] for number, offset in acked.items()} == {
                        number: f"{producer}:{number}" for number in acked
                    }
                assert len(set(values)) == len(values), "nothing is there twice"

    def close(self) -> None:
        for process in (*self.replicas.values(), *self._clients.values()):
            process.kill()


def _has(process: Process, end: int) -> bool:
    return bool(process.ask("status")["end"] >= end)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the release before."""
    done = subprocess.run(
        ["git", "archive", BEFORE, "rayqueue", "actors", "client"], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the history does not reach back to {BEFORE}, as in a shallow clone: {done.stderr.decode()[:200]}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="fully_trusted")  # our own history
    return folder


@pytest.fixture
def group(tmp_path: Path, before: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        made = Group(tmp_path, before)
        stack.callback(made.close)
        for node in NODES:
            made.start(node, "old", create=True)
        yield made


@pytest.mark.parametrize("release", ["old", "new"])
def test_for_how_long_nobody_acknowledges_while_releases_are_mixed(
    group: Group, release: str, record_property: Record
) -> None:
    """How short that is on a quiet machine is ``benchmarks/recovery.py``'s to say, of one release."""
    group.write()
    with group.beating(release) as beat:
        for node in NODES:
            # The worst case: it leads.
            group.lead(node)
            with step(record_property, beat, f"{node} is upgraded, as a client of the {release} release sees it"):
                group.stop(node)
                group.start(node, "new")
                before = len(beat.acked)
                wait_for(partial(_has_more, beat, before + 20), "acknowledgements", PATIENCE_S)
            with step(record_property, beat, f"{node}, of the newer release, leads"):
                group.lead(node)
                before = len(beat.acked)
                wait_for(partial(_has_more, beat, before + 20), "acknowledgements", PATIENCE_S)
    group.check()


def _has_more(beat: Beat, count: int) -> bool:
    assert beat.failed is None, beat.failed
    return len(beat.acked) >= count


def test_replicas_are_upgraded_one_by_one_under_clients_of_both_releases(group: Group) -> None:
    group.write()
    for node in NODES:
        group.stop(node)
        group.write()
        group.start(node, "new")
        group.write()
        # Whoever leads, of the one release or the other, the others follow.
        for leader in NODES:
            group.lead(leader)
            group.write(2)
        group.check()


def test_there_is_no_way_back_and_that_is_said(group: Group) -> None:
    group.write()
    group.stop("n1")
    group.start("n1", "new")
    group.write()
    group.check()
    group.stop("n1")
    with pytest.raises(FailedError, match="store_format"):
        group.start("n1", "old")
    group.replicas.pop("n1").kill()
    group.write()  # the other two go on
    group.start("n1", "new")
    group.check()


def test_coordinators_are_upgraded_one_by_one_and_nothing_is_written_that_the_old_cannot_read(
    tmp_path: Path, before: Path
) -> None:
    group = Group(tmp_path, before, coordinator=True)
    try:
        for node in NODES:
            group.start(node, "old", create=True)
        for number, node in enumerate(NODES):
            group.stop(node)
            group.start(node, "new")
            # The one that is new leads, and changes what coordinators of both releases know.
            group.lead(node)
            group.replicas[node].ask("change", command="PutBroker", arguments=[f"b{number}", "host", "ray", 1, ""])
            event = [[[1, "broker_away", "b1", "gone"]]]
            if number < len(NODES) - 1:
                with pytest.raises(FailedError, match="upgrade_unfinished"):
                    group.replicas[node].ask("change", command="NoteEvents", arguments=event)
            else:
                group.replicas[node].ask("change", command="NoteEvents", arguments=event)
            last = group.replicas[node].ask("status")["last"]
            for each, process in group.replicas.items():
                wait_for(partial(_applied, process, last), f"{each} to have it", PATIENCE_S)
    finally:
        group.close()


def _applied(process: Process, last: int) -> bool:
    return bool(process.ask("status")["end"] >= last)
