"""The options of format "rayqueue", and what they mean. Pure.

Names are as Spark gives them: any case. One that is not known is an error,
for a misspelt option would change what is read or written in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayqueue.bridge.connection import Where
from rayqueue.bridge.places import EARLIEST, LATEST, Instant, Place, Places, parse_places, parse_time_ms
from rayqueue.bridge.task import INLINE_BYTES
from rayqueue.config import MIB
from rayqueue.errors import InvalidInputError
from rayqueue.net.scan import ScanSettings
from rayqueue.protocol.topics import check_name
from rayqueue.records import Compression
from rayqueue.records.table import COLUMNS, schema_of

_CONNECTION = {"address", "namespace"}
_READ = {
    "topic",
    "topics",
    "columns",
    "startingoffsets",
    "endingoffsets",
    "startingtimestamp",
    "endingtimestamp",
    "maxrecordspersplit",
    "minpartitions",
    "isolation",
    "failondataloss",
    "oncorrupt",
    "readfrom",
    "fetchbytes",
    "pushfilters",
    "partitions",
}
_STREAM = {"maxrecordspertrigger", "maxbytespertrigger", "group", "pin"}
_WRITE = {
    "topic",
    "topics",
    "partitioner",
    "compression",
    "lane",
    "batchbytes",
    "delivery",
    "writerid",
    "batchid",
    "stagingpartitions",  # without a meaning since rows are not staged any more
    "transactiontimeoutms",
    "inlinebytes",
}
_SPARKS_OWN = {"path", "checkpointlocation", "queryname", "outputmode", "triggerinterval"}


class _Given:
    """Options with checked values."""

    def __init__(self, options: Mapping[str, str], known: set[str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        for name in self._options:
            if name not in known | _CONNECTION | _SPARKS_OWN and not name.startswith("spark."):
                raise InvalidInputError(
                    f"format 'rayqueue' has no option {name!r} here; there are {', '.join(sorted(known))}", option=name
                )

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        return None if value is None or not str(value).strip() else str(value).strip()

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        if not text.isdigit() or int(text) < least:
            raise InvalidInputError(f"{name} is a whole number from {least}, not {text!r}", option=name)
        return int(text)

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        number = self.number(name, default, least=least)
        return default if number is None else number

    def flag(self, name: str, default: bool) -> bool:
        text = (self.text(name) or str(default)).lower()
        if text not in ("true", "false"):
            raise InvalidInputError(f"{name} is true or false, not {text!r}", option=name)
        return text == "true"

    def choice(self, name: str, *choices: str) -> str:
        text = (self.text(name) or choices[0]).lower()
        if text not in choices:
            raise InvalidInputError(f"{name} is {' or '.join(choices)}, not {text!r}", option=name)
        return text

    def topics(self) -> tuple[str, ...]:
        names = [*_listed(self.text("topic")), *_listed(self.text("topics"))]
        return tuple(dict.fromkeys(check_name("topic", name) for name in names))

    def where(self) -> Where:
        return Where(self.text("address"), self.text("namespace"))


def _numbers(name: str, text: str | None) -> frozenset[int] | None:
    parts = _listed(text)
    if not all(part.isdigit() for part in parts):
        raise InvalidInputError(f"{name} are numbers with commas, not {text!r}", option=name)
    return frozenset(map(int, parts)) or None


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


@dataclass(frozen=True, slots=True)
class ReadOptions:
    where: Where
    topics: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS
    start: Places = field(default_factory=lambda: Places(EARLIEST))
    end: Places = field(default_factory=lambda: Places(LATEST))
    max_records_per_split: int | None = None
    min_splits: int = 0
    partitions: frozenset[int] | None = None
    """Only these of each topic."""
    push_filters: bool = False
    scan: ScanSettings = field(default_factory=ScanSettings)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    read: ReadOptions
    max_records: int | None = None
    max_bytes: int | None = None
    group: str | None = None
    pin: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    where: Where
    topic: str | None
    """Where rows go that do not say it."""
    topics: tuple[str, ...]
    """Where rows may go."""
    partitioner: str = "consistent"
    compression: Compression = Compression.NONE
    lane: int = 0
    batch_bytes: int = MIB // 2
    exactly_once: bool = True
    writer: str | None = None
    """None: a stream is its query's, and a job that runs once has none."""
    batch_id: int | None = None
    inline_bytes: int = INLINE_BYTES
    timeout_ms: int | None = None
    """None: as long as the cluster allows."""


def columns_option(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that are asked for."""
    named = {name.lower(): value for name, value in options.items()}.get("columns")
    return tuple(schema_of(tuple(_listed(named))).names) or COLUMNS


def read_options(options: Mapping[str, str], *, stream: bool = False) -> ReadOptions:
    given = _Given(options, _READ | _STREAM if stream else _READ)
    topics = given.topics()
    if not topics:
        raise InvalidInputError("say what to read: option 'topic', or 'topics' with commas", option="topic")
    return ReadOptions(
        where=given.where(),
        topics=topics,
        columns=columns_option(options),
        start=_places(given, "starting", topics, Places(LATEST if stream else EARLIEST)),
        end=_places(given, "ending", topics, Places(LATEST)),
        max_records_per_split=given.number("maxRecordsPerSplit"),
        min_splits=given.whole("minPartitions", 0, least=0),
        partitions=_numbers("partitions", given.text("partitions")),
        push_filters=given.flag("pushFilters", False),
        scan=ScanSettings(
            fetch_bytes=given.whole("fetchBytes", 4 * MIB),
            follower=given.choice("readFrom", "closest", "leader") == "closest",
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            committed=given.choice("isolation", "read_committed", "read_uncommitted") == "read_committed",
            on_corrupt="skip" if given.choice("onCorrupt", "raise", "skip") == "skip" else "raise",
        ),
    )


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    given = _Given(options, _READ | _STREAM)
    for name in ("endingOffsets", "endingTimestamp"):
        if given.text(name) is not None:
            raise InvalidInputError(f"a stream has no end: {name} is for batch reads", option=name)
    group = given.text("group")
    pin = given.flag("pin", False)
    if pin and group is None:
        raise InvalidInputError("pin=true holds what a group has not read: say the group", option="pin")
    return StreamOptions(
        read=read_options(options, stream=True),
        max_records=given.number("maxRecordsPerTrigger"),
        max_bytes=given.number("maxBytesPerTrigger"),
        group=None if group is None else check_name("group", group),
        pin=pin,
    )


def write_options(options: Mapping[str, str], *, stream: bool = False) -> WriteOptions:
    given = _Given(options, _WRITE)
    single = _listed(given.text("topic"))
    if len(single) > 1:
        raise InvalidInputError("rows go to one topic unless a column 'topic' says which: use 'topics'", option="topic")
    topics = given.topics()
    if not topics:
        raise InvalidInputError("say where to write: option 'topic', or 'topics' and a column 'topic'", option="topic")
    exactly_once = given.choice("delivery", "exactly_once", "at_least_once") == "exactly_once"
    writer = given.text("writerId")
    batch_id = given.number("batchId", least=0)
    if not stream and (batch_id is None) != (writer is None):
        raise InvalidInputError("writerId and batchId belong together: the same pair is written once", option="batchId")
    compression = given.choice("compression", "none", "lz4", "zstd")
    return WriteOptions(
        where=given.where(),
        topic=single[0] if single else (topics[0] if len(topics) == 1 else None),
        topics=topics,
        partitioner=given.choice("partitioner", "consistent", "murmur2"),
        compression=Compression[compression.upper()],
        lane=given.whole("lane", 0, least=0),
        batch_bytes=given.whole("batchBytes", MIB // 2),
        exactly_once=exactly_once,
        writer=writer,
        batch_id=batch_id,
        inline_bytes=given.whole("inlineBytes", INLINE_BYTES, least=0),
        timeout_ms=given.number("transactionTimeoutMs"),
    )


def _places(given: _Given, which: str, topics: tuple[str, ...], default: Places) -> Places:
    offsets, moment = given.text(f"{which}Offsets"), given.text(f"{which}Timestamp")
    if offsets is not None and moment is not None:
        raise InvalidInputError(f"{which}Offsets or {which}Timestamp, not both", option=f"{which}Timestamp")
    if moment is not None and not moment.startswith("{"):
        return Places(Instant(parse_time_ms(f"{which}Timestamp", moment)))
    text: Any = offsets if offsets is not None else moment
    if text is None:
        return default
    rest: Place = EARLIEST if which == "starting" else LATEST
    places = parse_places(f"{which}Offsets", text, topics, rest)
    if moment is not None:
        times = {each: Instant(place) if isinstance(place, int) else place for each, place in places.partitions.items()}
        return Places(rest, times)
    return places
