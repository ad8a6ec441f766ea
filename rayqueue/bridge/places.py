"""Places where a read begins or ends: earliest, latest, offsets, or a time. Pure.

The text forms are those of the bridges' options:

    earliest | latest
    {"orders": {"0": 23, "1": "latest"}}     per partition; those not named begin at the earliest and end at the latest
    2026-11-16T06:00:00Z | 1794808800000     a time, ISO (UTC unless it says otherwise) or in milliseconds
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Final, Literal

from rayqueue.errors import InvalidInputError
from rayqueue.protocol.calls import Bounds
from rayqueue.protocol.topics import TopicPartition


@dataclass(frozen=True, slots=True)
class Instant:
    """The first record that is not older."""

    timestamp_ms: int


EARLIEST: Final = "earliest"
"""Where the log begins."""
LATEST: Final = "latest"
"""Where it ends when the read is planned."""

Place = int | Literal["earliest", "latest"] | Instant


@dataclass(frozen=True, slots=True)
class Places:
    """A place in each partition."""

    default: Place
    partitions: Mapping[TopicPartition, Place] = field(default_factory=dict)

    def of(self, partition: TopicPartition) -> Place:
        return self.partitions.get(partition, self.default)

    def instants(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The partitions that must be asked where a time is, and the time."""
        places = {each: self.of(each) for each in partitions}
        return {each: place.timestamp_ms for each, place in places.items() if isinstance(place, Instant)}


def resolve(place: Place, bounds: Bounds, found: int | None) -> int:
    """The offset. ``found`` is where the partition says the time is."""
    if isinstance(place, Instant):
        if found is None:
            raise InvalidInputError("nobody was asked where this time is")
        return found
    if isinstance(place, int):
        return place
    return bounds.start if place == EARLIEST else bounds.end


def parse_time_ms(option: str, text: Any) -> int:
    """Milliseconds since 1970 from a number or an ISO date and time."""
    if isinstance(text, bool):
        raise InvalidInputError(f"{option} is a time, not {text!r}", option=option)
    if isinstance(text, int):
        return text
    if isinstance(text, datetime):
        moment = text
    else:
        text = str(text).strip()
        if text.lstrip("-").isdigit():
            return int(text)
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError:
            raise InvalidInputError(
                f"{option} is a time in milliseconds or like 2026-11-16T06:00:00Z, not {text!r}", option=option
            ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return round(moment.timestamp() * 1000)


def parse_places(option: str, text: Any, topics: Sequence[str], default: Place) -> Places:
    """What an option says. ``default``: for partitions that it does not name."""
    if isinstance(text, Places):
        return text
    if isinstance(text, bool):
        raise InvalidInputError(f"{option} cannot be {text!r}", option=option)
    if isinstance(text, Mapping):
        return _per_partition(option, text, topics, default)
    if isinstance(text, (int, datetime)):
        return Places(Instant(parse_time_ms(option, text)))
    stripped = str(text).strip()
    word = _word(stripped)
    if word is not None:
        return Places(word)
    if stripped.startswith("{"):
        try:
            given = json.loads(stripped)
        except ValueError as error:
            raise InvalidInputError(f"{option} is not JSON: {error}", option=option) from None
        return _per_partition(option, given, topics, default)
    return Places(Instant(parse_time_ms(option, stripped)))


def _word(text: str) -> Place | None:
    words: dict[str, Place] = {"earliest": EARLIEST, "latest": LATEST}
    return words.get(text.lower())


def _per_partition(option: str, given: Mapping[Any, Any], topics: Sequence[str], default: Place) -> Places:
    if given and all(not isinstance(value, Mapping) for value in given.values()):
        if len(topics) != 1:
            raise InvalidInputError(f'{option} must name its topics: {{"topic": {{"0": 23}}}}', option=option)
        given = {topics[0]: given}
    places: dict[TopicPartition, Place] = {}
    for topic, partitions in given.items():
        if topic not in topics:
            raise InvalidInputError(f"{option} names topic {topic!r}, which is not read", option=option)
        if not isinstance(partitions, Mapping):
            raise InvalidInputError(f'{option} wants partitions of {topic!r}: {{"0": 23}}', option=option)
        for number, place in partitions.items():
            places[TopicPartition(topic, _number(option, number))] = _place(option, place)
    return Places(default, places)


def _number(option: str, number: Any) -> int:
    if not str(number).isdigit():
        raise InvalidInputError(f"{option} names partition {number!r}; a partition is a number", option=option)
    return int(number)


def _place(option: str, place: Any) -> Place:
    if isinstance(place, Instant):
        return place
    if isinstance(place, str):
        word = _word(place)
        if word is not None:
            return word
        if not place.isdigit():
            return Instant(parse_time_ms(option, place))
        place = int(place)
    if isinstance(place, bool) or not isinstance(place, int) or place < 0:
        raise InvalidInputError(f"{option}: {place!r} is not an offset, earliest, latest or a time", option=option)
    return place
