"""`rayqueue produce`: lines, arguments or files in, records out.

A line is sent as soon as it has been read, together with whatever else has been
read by then: ``tail -f log | rayqueue produce t`` and typing by hand work, and
a large file goes in columns. Reading stops at the first line that cannot be
sent, at the end of the input, or at Ctrl-C; what was read before is
acknowledged first, and the report says how much that was.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rayqueue.cli import streams
from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, connected, print_json
from rayqueue.cli.lines import Lines, delimiter_of
from rayqueue.errors import InvalidInputError, RayQueueError

if TYPE_CHECKING:
    from rayqueue.client.producer.delivery import Deliveries
    from rayqueue.client.producer.producer import Producer

_READ_BYTES = 256 * 1024
_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


class Sent(NamedTuple):
    """Lines that went to the producer in one call."""

    first_line: int
    deliveries: Deliveries


class Form(NamedTuple):
    """A line's way to become a record."""

    key: bytes | None
    key_separator: bytes | None
    headers: dict[str, bytes]
    priority: int
    partition: int | None

    def columns(self, lines: Sequence[bytes], first_line: int) -> tuple[list[bytes], list[bytes] | None]:
        """Values and keys. ``BadLineError`` names the first line that has no key."""
        if self.key_separator is None:
            return list(lines), None if self.key is None else [self.key] * len(lines)
        values: list[bytes] = []
        keys: list[bytes] = []
        for number, line in enumerate(lines, first_line):
            key, between, value = line.partition(self.key_separator)
            if not between:
                raise BadLineError(
                    f"line {number} has no {self.key_separator.decode(errors='replace')!r}, which should end its key: "
                    f"{line[:80]!r}",
                    good=number - first_line,
                )
            keys.append(key)
            values.append(value)
        return values, keys


class BadLineError(InvalidInputError):
    """A line that is no record. ``good``: how many of those given with it come before it."""

    def __init__(self, text: str, good: int) -> None:
        super().__init__(text)
        self.good = good


class Sending:
    """Lines on their way, and how many have been acknowledged."""

    def __init__(self, producer: Producer, topic: str, form: Form) -> None:
        self.acknowledged = 0
        self.read = 0
        self.failed_line: int | None = None
        """The first that was not acknowledged."""
        self._producer = producer
        self._topic = topic
        self._form = form
        self._on_their_way: deque[Sent] = deque()

    def add(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        first = self.read + 1
        try:
            values, keys = self._form.columns(lines, first)
        except BadLineError as error:
            self.add(lines[: error.good])
            raise
        headers = [self._form.headers] * len(lines) if self._form.headers else None
        sent = self._producer.send_many(
            self._topic,
            values,
            keys=keys,
            headers=headers,
            priority=self._form.priority,
            partition=self._form.partition,
        )
        self.read += len(lines)
        self._on_their_way.append(Sent(first, sent))
        while self._on_their_way and self._on_their_way[0].deliveries.done():
            self._settle(self._on_their_way.popleft())

    def finish(self) -> None:
        """Wait for all. The first error is raised when every outcome is known."""
        first_error: RayQueueError | None = None
        while self._on_their_way:
            try:
                self._settle(self._on_their_way.popleft())
            except RayQueueError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _settle(self, sent: Sent) -> None:
        error = sent.deliveries.exception()
        if error is None:
            self.acknowledged += len(sent.deliveries)
            return
        failures = [each.exception() for each in sent.deliveries]
        self.acknowledged += failures.count(None)
        if self.failed_line is None:
            self.failed_line = sent.first_line + next(at for at, failure in enumerate(failures) if failure is not None)
        raise error


def produce(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    values: Annotated[list[str] | None, typer.Argument(help="Records; else each line of standard input.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="Send this file as one record; - is standard input.")] = None,
    delimiter: Annotated[str, typer.Option(help=r"Ends a record of standard input; \0 and \t are one byte.")] = r"\n",
    key: Annotated[str | None, typer.Option(help="The key of all records.")] = None,
    key_separator: Annotated[str | None, typer.Option(help="Each line is a key, this, and a value.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header of all records.")] = None,
    priority: Annotated[int, typer.Option(help="From 0; higher ones are read first.")] = 0,
    partition: Annotated[int | None, typer.Option(help="Instead of one chosen by key.")] = None,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Send records as they are read. Waits until all are acknowledged; Ctrl-C ends reading, and loses nothing."""
    if key is not None and key_separator is not None:
        raise InvalidInputError("--key gives all records one key, --key-separator each its own: name one of them")
    form = Form(
        None if key is None else key.encode(),
        None if key_separator is None else delimiter_of("--key-separator", key_separator),
        dict(_header(each) for each in header or ()),
        priority,
        partition,
    )
    chunks = _given(values, file) if values or file else _read_lines(Lines(delimiter_of("--delimiter", delimiter)))
    started_s = time.monotonic()
    interrupted = False
    with connected(address, data_dir, namespace) as rq, rq.producer() as producer:
        sending = Sending(producer, topic, form)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout 10 rayqueue produce` is a Ctrl-C too
        try:
            try:
                for lines in chunks:
                    sending.add(lines)
            except KeyboardInterrupt:
                interrupted = True
            sending.finish()
        except RayQueueError:
            _finish_quietly(sending)
            _report(topic, sending, started_s, as_json=as_json, whole=False)
            raise
        _report(topic, sending, started_s, as_json=as_json, whole=not interrupted)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _finish_quietly(sending: Sending) -> None:
    """Finish the sends before an error is told: only their count matters now."""
    try:
        sending.finish()
    except RayQueueError:
        return


def _report(topic: str, sending: Sending, started_s: float, *, as_json: bool, whole: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {"topic": topic, "records": sending.acknowledged, "read": sending.read, "whole": whole}
        print_json(facts | {"failed_line": sending.failed_line, "seconds": time.monotonic() - started_s})
        return
    missing = sending.read - sending.acknowledged
    text = f"{sending.acknowledged:,} records acknowledged"
    text += f", {missing:,} not, the first of them line {sending.failed_line}" if missing else ""
    text += "" if whole else "; the input was not read to its end"
    print(text, file=streams.stdout())


def _given(values: list[str] | None, files: list[Path] | None) -> Iterator[list[bytes]]:
    for value in values or ():
        yield [value.encode(errors="surrogateescape")]
    for path in files or ():
        try:
            yield [sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()]
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read: {error.strerror}", path=str(path)) from None


def _read_lines(lines: Lines) -> Iterator[list[bytes]]:
    """The lines that can be read now, as soon as there are any."""
    while data := os.read(sys.stdin.fileno(), _READ_BYTES):
        yield lines.feed(data)
    yield lines.end()


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInputError(f"--header is NAME=VALUE, not {text!r}")
    return name, value.encode(errors="surrogateescape")
