"""`rayqueue consume`: records out, as lines, as JSON, or in a form of one's own.

As a member of a group it commits what it has written to standard output, and
nothing else: a record that a broken pipe did not take is read again.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from rayqueue.cli import streams
from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, connected
from rayqueue.cli.lines import delimiter_of, unescaped
from rayqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from rayqueue.client.consumer.consumer import Consumer
    from rayqueue.client.handle import RayQueue
    from rayqueue.records import Record

_AT_ONCE = 1000
_POLL_MS = 500
_BROKEN_PIPE = 141
"""The exit code of a command that SIGPIPE ended: what reads our output has gone."""

_FIELDS: dict[str, Callable[[Record], bytes]] = {
    "topic": lambda record: record.topic.encode(),
    "partition": lambda record: b"%d" % record.partition,
    "offset": lambda record: b"%d" % record.offset,
    "timestamp": lambda record: b"%d" % record.timestamp,
    "time": lambda record: _time(record.timestamp).encode(),
    "priority": lambda record: b"%d" % record.lane,
    "key": lambda record: record.key or b"",
    "value": lambda record: record.value or b"",
    "headers": lambda record: b",".join(name.encode() + b"=" + value for name, value in record.headers),
}
_FIELD = re.compile(rb"\{(\w*)\}")
_AGO = re.compile(r"-(\d+)(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Shown = Callable[["Record"], bytes]


def consume(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    group: Annotated[str | None, typer.Option(help="Read as a member of this group, and commit.")] = None,
    start: Annotated[str, typer.Option(help="earliest or latest, where nothing is committed.")] = "earliest",
    partition: Annotated[
        list[int] | None, typer.Option(help="Only this one. May be repeated. Without --group.")
    ] = None,
    offset: Annotated[int | None, typer.Option(help="Begin there; -10 is ten before the end. Without --group.")] = None,
    since: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Begin there: 2026-01-31T12:00, milliseconds, or -15m.")
    ] = None,
    max_records: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")] = False,
    wait_ms: Annotated[int, typer.Option(min=0, help="Without --follow: stop when nothing comes so long.")] = 2000,
    show_key: Annotated[bool, typer.Option("--key", help="Print partition, offset and key before the value.")] = False,
    form: Annotated[
        str | None, typer.Option("--format", help=f"Such as '{{offset}} {{key}}'; there are {', '.join(_FIELDS)}.")
    ] = None,
    isolation: Annotated[
        str, typer.Option(help="read_committed or read_uncommitted: of transactions what is committed, or everything.")
    ] = "read_committed",
    delimiter: Annotated[str, typer.Option(help=r"Written after each record; \0 is one byte.")] = r"\n",
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Print records, one per line; with --json one object per line. Ctrl-C ends it, and loses nothing."""
    if start not in ("earliest", "latest"):
        raise InvalidInputError(f"--start is earliest or latest, not {start!r}")
    if isolation not in ("read_committed", "read_uncommitted"):
        raise InvalidInputError(f"--isolation is read_committed or read_uncommitted, not {isolation!r}")
    if group is not None and (partition or offset is not None or since is not None):
        raise InvalidInputError(
            "--partition, --offset and --time are for reading without a group; `rayqueue groups reset` moves a group"
        )
    if offset is not None and since is not None:
        raise InvalidInputError("--offset and --time: name one of them")
    shown = _shown(as_json=as_json, show_key=show_key, form=form, end=delimiter_of("--delimiter", delimiter))
    since_ms = None if since is None else milliseconds(since, time.time())
    with (
        connected(address, data_dir, namespace) as rq,
        _consumer(rq, topic, group, start, partition, isolation) as consumer,
    ):
        _place(consumer, offset, since_ms)
        written = _write_all(consumer, shown, max_records, None if follow else wait_ms / 1000, commit=group is not None)
    if not written:
        raise typer.Exit(_BROKEN_PIPE)


def _consumer(
    rq: RayQueue, topic: str, group: str | None, begin: str, partitions: list[int] | None, isolated: str
) -> Consumer:
    start = cast("Literal['earliest', 'latest']", begin)  # as was checked, and the other too
    isolation = cast("Literal['read_committed', 'read_uncommitted']", isolated)
    if partitions:
        return rq.consumer(partitions=[(topic, each) for each in partitions], start=start, isolation=isolation)
    return rq.consumer(topic, group=group, start=start, auto_commit=False, isolation=isolation)


def _place(consumer: Consumer, offset: int | None, since_ms: int | None) -> None:
    """Behind the end there is nothing: who asks for more than a partition has gets what comes, not all of it."""
    if since_ms is not None:
        consumer.seek_to_time(since_ms)
    if offset is None:
        return
    consumer.seek_to_end()
    for each in consumer.assignment():
        end = consumer.position(each)
        consumer.seek(each, min(offset, end) if offset >= 0 else max(0, end + offset))


def _write_all(
    consumer: Consumer, shown: Shown, max_records: int | None, patience_s: float | None, *, commit: bool
) -> bool:
    """Write what comes, a poll at a time, until interrupted, satisfied or out of patience. False: nobody reads it."""
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True
        consumer.wakeup()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    out = streams.stdout().buffer
    left = max_records
    heard_s = time.monotonic()
    while not stopping and left != 0 and (patience_s is None or time.monotonic() - heard_s < patience_s):
        records = consumer.poll(max_records=_AT_ONCE if left is None else min(left, _AT_ONCE), timeout_ms=_POLL_MS)
        if not records:
            continue
        try:
            out.write(b"".join(map(shown, records)))
            out.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is buffered has nowhere to go
            return False
        if commit:
            consumer.commit()
        left = None if left is None else left - len(records)
        heard_s = time.monotonic()
    return True


def milliseconds(text: str, now_s: float) -> int:
    """A point in time as people give it: ISO 8601 (local time unless it says otherwise), milliseconds, or ``-15m``."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return int((now_s - timedelta(**{_UNITS[ago[2]]: int(ago[1])}).total_seconds()) * 1000)
    if text.isdigit():
        return int(text)
    try:
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidInputError(
            f"{text!r} is no time: 2026-01-31T12:00, milliseconds since 1970, or -90s, -15m, -2h, -7d"
        ) from None


def _shown(*, as_json: bool, show_key: bool, form: str | None, end: bytes) -> Shown:
    if as_json:
        return lambda record: json.dumps(_facts(record)).encode() + b"\n"
    if form is not None:
        return _formatted(unescaped("--format", form), end)
    if show_key:
        return _formatted(b"{topic}-{partition} {offset} {key}\t{value}", end)
    return lambda record: (record.value or b"") + end


def _formatted(form: bytes, end: bytes) -> Shown:
    pieces = _FIELD.split(form)  # text, field, text, ..., text
    for name in pieces[1::2]:
        if name.decode() not in _FIELDS:
            raise InvalidInputError(f"--format has no field {{{name.decode()}}}; there are {', '.join(_FIELDS)}")
    fields = [_FIELDS[name.decode()] for name in pieces[1::2]]
    texts = pieces[0::2]

    def shown(record: Record) -> bytes:
        made = [texts[0]]
        for field, text in zip(fields, texts[1:], strict=True):
            made += (field(record), text)
        return b"".join(made) + end

    return shown


def _facts(record: Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "priority": record.lane,
        **_readable("key", record.key),
        **_readable("value", record.value),
        "headers": [[name, value.decode(errors="replace")] for name, value in record.headers],
    }


def _readable(name: str, value: bytes | None) -> dict[str, str | None]:
    """As text, or if it is none as base64 under another name: nothing is lost."""
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value or b"").decode()}


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
