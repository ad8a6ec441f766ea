"""The command against a queue that it has started: every step is a process of its own, as on a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from rayqueue.client.local_ray import process_started

pytestmark = pytest.mark.timeout(300)


def _hear_interrupts() -> None:
    """As at a terminal. What a shell starts in the background, a whole test run for example, ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Shell:
    """Runs the command on one data directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAYQUEUE_")}
        self._ray_log = home.parent / "ray-said.log"
        self._environment = clean | {"COLUMNS": "120", "_RAYQUEUE_RAY_LOG": str(self._ray_log)}

    def begin(self, *arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "rayqueue.cli", *arguments, "--data-dir", str(self.home)],
            env=self._environment,
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_hear_interrupts,
            **pipes,
        )

    def __call__(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> str:
        """What it wrote to standard output, or to standard error if that is what it should end with."""
        process = self.begin(*arguments, stdin=subprocess.PIPE)
        out, words = process.communicate(stdin, timeout=120)
        if process.returncode != code:
            ray_said = self._ray_log.read_text(errors="replace")[-8000:] if self._ray_log.exists() else ""
            raise AssertionError(f"{arguments} ended with {process.returncode}\n{out!r}\n{words!r}\n{ray_said}")
        return (out if code == 0 else words).decode()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A queue that `up` has started, and `down` ends."""
    shell = Shell(tmp_path_factory.mktemp("cli") / "data")
    assert "`rayqueue up`" in shell("status", code=2)
    up = json.loads(shell("up", "--no-dashboard", "--json"))
    head = shell.home / "ray.json"
    pid = json.loads(head.read_text())["pid"]
    try:
        assert json.loads(shell("status", "--json"))["cluster"]["cluster_id"] == up["cluster"]["cluster_id"]
        yield shell
        assert "RayQueue has stopped" in shell("down")
        assert process_started(pid) is None
    finally:
        if head.exists():  # something failed before it came to `down`
            os.kill(pid, signal.SIGTERM)


def test_a_day_at_the_terminal(shell: Shell) -> None:
    assert "orders: 1 partitions, 3 replicas each" in shell("topics", "create", "orders", "--lanes", "2")
    assert shell("produce", "orders", "--key-separator", ":", stdin=b"a:1\nb:2\nc:3\n") == "3 records acknowledged\n"
    shell("produce", "orders", "urgent", "--priority", "1", "--header", "who=me")
    told = [json.loads(line) for line in shell("consume", "orders", "--group", "billing", "--json").splitlines()]
    assert [(each["key"], each["value"]) for each in told] == [(None, "urgent"), ("a", "1"), ("b", "2"), ("c", "3")]
    assert told[0]["headers"] == [["who", "me"]]

    facts = json.loads(shell("status", "--json"))
    assert (facts["state"], facts["troubles"]) == ("well", [])
    (orders,) = (topic for topic in facts["topics"] if topic["name"] == "orders")
    assert orders["partitions"][0]["end_offset"] == 4
    (group,) = facts["groups"]
    assert (group["group"], group["partitions"][0]["lag"]) == ("billing", 0)

    assert shell("consume", "orders", "--offset", "-2", "--format", "{offset} {value}") == "3 urgent\n2 3\n"
    assert shell("consume", "orders", "--time", "-1h", "--partition", "0", "--max-records", "1") == "urgent\n"


def test_what_is_typed_is_sent_at_once_and_an_interrupt_loses_nothing(shell: Shell) -> None:
    shell("topics", "create", "typed", "--replication", "1")
    reader = shell.begin("consume", "typed", "--follow")
    writer = shell.begin("produce", "typed", stdin=subprocess.PIPE)
    assert writer.stdin is not None
    assert reader.stdout is not None
    for line in (b"one\r\n", b"two\n"):  # each is with its reader before the next is typed
        writer.stdin.write(line)
        writer.stdin.flush()
        assert _line(reader.stdout) == line
    writer.stdin.write(b"three\nunfinish")
    writer.stdin.flush()
    assert _line(reader.stdout) == b"three\n"
    writer.send_signal(signal.SIGINT)
    out, words = writer.communicate(timeout=60)
    assert (writer.returncode, out) == (130, b"3 records acknowledged; the input was not read to its end\n"), words
    reader.send_signal(signal.SIGINT)
    out, words = reader.communicate(timeout=60)
    assert (reader.returncode, out, words) == (0, b"", b"")


def test_a_bad_line_is_named_and_what_is_before_it_is_kept(shell: Shell) -> None:
    shell("topics", "create", "pairs", "--replication", "1")
    told = shell("produce", "pairs", "--key-separator", ":", stdin=b"a:1\nb:2\nnothing\nc:3\n", code=1)
    assert "line 3 has no ':'" in told
    assert shell("consume", "pairs", "--wait-ms", "500") == "1\n2\n"


def test_files_and_delimiters(shell: Shell, tmp_path: Path) -> None:
    shell("topics", "create", "files", "--replication", "1")
    (tmp_path / "a.bin").write_bytes(b"\x00line\nline\xff")
    shell("produce", "files", "--file", str(tmp_path / "a.bin"))
    shell("produce", "files", "--delimiter", r"\0", stdin=b"x\ny\0z")
    reader = shell.begin("consume", "files", "--delimiter", r"\0", "--max-records", "3")
    out, words = reader.communicate(timeout=60)
    assert (reader.returncode, out, words) == (0, b"\x00line\nline\xff\0x\ny\0z\0", b"")
    assert "cannot be read" in shell("produce", "files", "--file", "nowhere", code=1)


def test_a_group_goes_on_behind_what_its_reader_took(shell: Shell) -> None:
    """`consume | head -n 1`: what head did not take is not lost for the group."""
    shell("topics", "create", "piped", "--replication", "1")
    wide = b"".join(b"%06d%s\n" % (number, b"." * 1000) for number in range(3000))
    shell("produce", "piped", stdin=wide)
    reader = shell.begin("consume", "piped", "--group", "g")
    assert reader.stdout is not None
    first = _line(reader.stdout)
    reader.stdout.close()
    assert reader.wait(60) == 141
    rest = shell("consume", "piped", "--group", "g").splitlines()
    assert first.startswith(b"000000.")
    assert [int(line[:6]) for line in rest] == list(range(int(rest[0][:6]), 3000))
    assert int(rest[0][:6]) < 1000  # less than the first poll, which the pipe did not take as a whole


def test_a_topic_that_is_there_is_taken_or_what_differs_is_told(shell: Shell) -> None:
    for _ in range(2):
        shell("topics", "create", "twice", "--replication", "1", "--if-missing")
    told = shell("topics", "create", "twice", "--partitions", "3", "--retention-ms", "5", "--if-missing", code=1)
    assert "partitions is 1, not 3" in told
    assert "retention_ms is None, not 5" in told
    assert "already" in shell("topics", "create", "twice", code=1)


def test_a_group_is_moved(shell: Shell) -> None:
    shell("topics", "create", "moved", "--replication", "1", "--partitions", "2")
    for partition in ("0", "1"):
        shell("produce", "moved", "--partition", partition, stdin=b"a\nb\nc\n")
    assert len(shell("consume", "moved", "--group", "mover").splitlines()) == 6

    def positions() -> list[int]:
        (group,) = [each for each in json.loads(shell("groups", "list", "--json")) if each["group"] == "mover"]
        return [each["committed"]["0"] for each in group["partitions"]]

    dry = shell("groups", "reset", "mover", "--by", "-2")
    assert "moved-0" in dry
    assert "nothing was changed" in dry
    assert positions() == [3, 3]
    said = json.loads(
        shell("groups", "reset", "mover", "--topic", "moved", "--partition", "1", "--to-offset", "9", "--json")
    )
    assert (said["executed"], said["positions"][0]["after"]) == (False, {"0": 3})
    assert "no offset 9" in said["positions"][0]["note"]
    assert "2 positions of mover were moved" in shell("groups", "reset", "mover", "--by", "-2", "--execute")
    assert positions() == [1, 1]
    assert sorted(shell("consume", "moved", "--group", "mover").splitlines()) == ["b", "b", "c", "c"]
    shell("groups", "reset", "mover", "--to-time", "-1h", "--topic", "moved", "--partition", "0", "--execute")
    assert positions() == [0, 3]

    reader = shell.begin("consume", "moved", "--group", "mover", "--follow")
    assert reader.stdout is not None
    assert [_line(reader.stdout) for _ in range(3)] == [b"a\n", b"b\n", b"c\n"]
    for options in ((), ("--execute",)):
        assert "stop its consumers first" in shell("groups", "reset", "mover", "--to-earliest", *options, code=1)
    reader.send_signal(signal.SIGINT)
    assert reader.wait(60) == 0
    assert "there is no offset" not in shell("groups", "reset", "mover", "--to-latest", "--execute")
    assert "name a topic" in shell("groups", "reset", "nobody", "--to-latest", code=1)


def test_what_is_internal_is_shown_if_asked_for(shell: Shell) -> None:
    shell("topics", "create", "bridge-staging", "--replication", "1")
    shell("topics", "create", "visible", "--replication", "1")

    def names(*arguments: str) -> set[str]:
        facts = json.loads(shell(*arguments, "--json"))
        return {each["name"] for each in (facts if isinstance(facts, list) else facts["topics"])}

    for command in (("topics", "list"), ("status",)):
        assert "visible" in names(*command)
        assert "bridge-staging" not in names(*command)
        assert names(*command, "--all") == names(*command) | {"bridge-staging"}
    assert shell("consume", "visible", "--offset", "7", "--wait-ms", "300") == ""


def _line(stream: IO[bytes]) -> bytes:
    """The next line; the test's own time limit ends a wait in vain."""
    began_s = time.monotonic()
    line = stream.readline()
    assert line, f"the output ended after {time.monotonic() - began_s:.0f} s"
    return line
