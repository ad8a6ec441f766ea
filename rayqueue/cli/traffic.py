"""`rayqueue produce` and `rayqueue consume`: lines in, lines out."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, connected, console, print_json
from rayqueue.errors import InvalidInputError
from rayqueue.records import Record

_LINES_AT_ONCE = 1000
_POLL_MS = 500


def produce(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    values: Annotated[list[str] | None, typer.Argument(help="Records; else each line of standard input.")] = None,
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
    """Send records, and wait until all are acknowledged."""
    lines: Iterable[bytes] = [value.encode() for value in values] if values else _stdin_lines()
    headers = dict(_header(each) for each in header or ())
    sent = 0
    started_s = time.monotonic()
    with connected(address, data_dir, namespace) as rq, rq.producer() as producer:
        lines = iter(lines)
        while chunk := list(islice(lines, _LINES_AT_ONCE)):
            pairs = [_split(line, key, key_separator) for line in chunk]
            producer.send_many(
                topic,
                [value for _, value in pairs],
                keys=[each for each, _ in pairs] if key or key_separator else None,
                headers=[headers] * len(pairs) if headers else None,
                priority=priority,
                partition=partition,
            ).result()
            sent += len(pairs)
    seconds = time.monotonic() - started_s
    if as_json:
        print_json({"topic": topic, "records": sent, "seconds": seconds})
    else:
        console().print(f"{sent:,} records acknowledged", style="green")


def consume(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    group: Annotated[str | None, typer.Option(help="Read as a member of this group, and commit.")] = None,
    start: Annotated[str, typer.Option(help="earliest or latest, where nothing is committed.")] = "earliest",
    max_records: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")] = False,
    wait_ms: Annotated[int, typer.Option(min=0, help="Without --follow: stop when nothing comes so long.")] = 2000,
    show_key: Annotated[bool, typer.Option("--key", help="Print partition, offset and key before the value.")] = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Print records, one per line; with --json one object per line."""
    if start not in ("earliest", "latest"):
        raise InvalidInputError(f"--start is earliest or latest, not {start!r}")
    left = max_records if max_records is not None else sys.maxsize
    with connected(address, data_dir, namespace) as rq, rq.consumer(topic, group=group, start=start) as consumer:
        idle_from_s = time.monotonic()
        try:
            while left and (follow or time.monotonic() - idle_from_s < wait_ms / 1000):
                records = consumer.poll(max_records=min(left, _LINES_AT_ONCE), timeout_ms=_POLL_MS)
                for record in records:
                    sys.stdout.buffer.write(_shown(record, as_json=as_json, show_key=show_key) + b"\n")
                if records:
                    sys.stdout.buffer.flush()
                    left -= len(records)
                    idle_from_s = time.monotonic()
        except (KeyboardInterrupt, BrokenPipeError):
            pass  # what was printed is committed by close()


def _stdin_lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.rstrip(b"\r\n")


def _split(line: bytes, key: str | None, separator: str | None) -> tuple[bytes | None, bytes]:
    if separator is None:
        return (key.encode() if key is not None else None), line
    found, between, value = line.partition(separator.encode())
    if not between:
        raise InvalidInputError(f"a line has no {separator!r}, which should end its key: {line[:80]!r}")
    return found, value


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInputError(f"--header is NAME=VALUE, not {text!r}")
    return name, value.encode()


def _shown(record: Record, *, as_json: bool, show_key: bool) -> bytes:
    if as_json:
        facts: dict[str, Any] = {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp,
            "priority": record.lane,
            **_readable("key", record.key),
            **_readable("value", record.value),
            "headers": [[name, value.decode(errors="replace")] for name, value in record.headers],
        }
        return json.dumps(facts).encode()
    value = b"" if record.value is None else record.value
    if not show_key:
        return value
    key = "-" if record.key is None else record.key.decode(errors="replace")
    return f"{record.topic}-{record.partition} {record.offset} {key}\t".encode() + value


def _readable(name: str, value: bytes | None) -> dict[str, str | None]:
    """As text, or if it is none as base64 under another name: nothing is lost."""
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value or b"").decode()}
