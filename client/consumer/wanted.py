"""A consumer's options beyond ``ConsumerSettings``: its topics, partitions or pattern, and how they are read.

Of a pattern the whole name must match; what RayQueue makes for itself (staging
topics) never does. The consumer itself looks from time to time which topics match:
the coordinator gets to see names only, so an expression that takes for ever to
match holds up nobody but whoever wrote it. Between two looks in which no topic has
changed the coordinator tells nothing but that.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rayqueue.config import ConsumerSettings
from rayqueue.errors import InvalidInputError, UnknownTopicError
from rayqueue.net.interfaces import Routes
from rayqueue.protocol.calls import GetTopics, Topics
from rayqueue.protocol.topics import TopicPartition, check_name, is_internal

MAX_PATTERN = 1_000


class Options:
    """Of one consumer. ``InvalidInputError`` unless they fit together."""

    def __init__(
        self,
        topics: Sequence[str],
        *,
        group: str | None = None,
        partitions: Iterable[Any] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        delivery: str = "at_least_once",
        auto_commit: bool = True,
        ack: str = "poll",
        listener: Any = None,
        instance: str | None = None,
        client: str | None = None,
        pin: bool = False,
        isolation: str = "read_committed",
    ) -> None:
        if delivery not in ("at_least_once", "at_most_once", "exactly_once") or ack not in ("poll", "record"):
            raise InvalidInputError(
                "delivery is 'at_least_once', 'at_most_once' or 'exactly_once', and ack is 'poll' or 'record', "
                f"not {delivery!r} and {ack!r}"
            )
        if isolation not in ("read_committed", "read_uncommitted"):
            raise InvalidInputError(
                f"isolation is 'read_committed' or 'read_uncommitted', not {isolation!r}", option="isolation"
            )
        if delivery == "exactly_once" and (group is None or partitions is not None or isolation == "read_uncommitted"):
            raise InvalidInputError(
                "delivery='exactly_once' needs a group, whose members are fenced, and reads what is committed"
            )
        if delivery == "at_most_once" and (group is None or ack == "record"):
            raise InvalidInputError("delivery='at_most_once' needs a group to commit for, and has no use for ack")
        if pin and group is None:
            raise InvalidInputError("pin=True needs the group that retention shall wait for")
        chosen = None if partitions is None else tuple(dict.fromkeys(map(as_partition, partitions)))
        self.named = tuple(dict.fromkeys(topics if chosen is None else [*topics, *(each.topic for each in chosen)]))
        if pattern is not None and (self.named or chosen is not None):
            raise InvalidInputError("pattern= says which topics are read: give no topics or partitions besides")
        if pattern is None and (not self.named or chosen == ()):
            raise InvalidInputError("a consumer needs a topic, a pattern or partitions to read")
        for name in self.named:
            check_name("topic", name)
        if group is not None:
            check_name("group", group)
        self.group = group
        self.partitions = chosen
        self.pattern = None if pattern is None else TopicPattern(pattern)
        self.at_most_once = delivery == "at_most_once"
        self.exactly_once = delivery == "exactly_once"
        """Positions are committed by transactions only."""
        self.reads_committed = isolation == "read_committed"
        self.auto_commit = auto_commit and not self.exactly_once
        self.commits_itself = self.auto_commit or self.at_most_once
        self.by_record = ack == "record"
        self.listened = listener is not None
        self.instance = instance
        self.client = client or f"{socket.gethostname()}-{os.getpid()}"
        self.pin = pin

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are meant, as of the last look."""
        return self.named if self.pattern is None else self.pattern.topics

    def gone(self, missing: Collection[str], settings: ConsumerSettings) -> UnknownTopicError | None:
        """Nothing is left to read, if all that is meant is missing and that is to be an error."""
        if self.pattern is not None or settings.on_topic_deleted == "drop" or len(missing) < len(self.topics):
            return None
        return UnknownTopicError(f"{', '.join(sorted(missing))}: deleted, and not made again", topic=min(missing))

    async def look(self, routes: Routes) -> tuple[str, ...]:
        """The topics that are meant now."""
        return self.named if self.pattern is None else await self.pattern.look(routes)


def as_partition(given: Any) -> TopicPartition:
    if isinstance(given, TopicPartition):
        return given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], int):
        return TopicPartition(*given)
    raise InvalidInputError(f"a partition is a TopicPartition, or a topic and a number, not {given!r}")


class TopicPattern:
    """A regular expression for topics' names. ``topics``: those that matched at the last look, by name."""

    def __init__(self, pattern: Any) -> None:
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"pattern={pattern!r} is no regular expression: {error}", key="pattern") from None
        if not isinstance(compiled.pattern, str) or not 1 <= len(compiled.pattern) <= MAX_PATTERN:
            raise InvalidInputError(f"a pattern is a text of 1 to {MAX_PATTERN} characters", key="pattern")
        self._compiled = compiled
        self._version: int | None = None
        self.topics: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return str(self._compiled.pattern)

    def matches(self, name: str) -> bool:
        return not is_internal(name) and self._compiled.fullmatch(name) is not None

    async def look(self, routes: Routes) -> tuple[str, ...]:
        """The topics that match now."""
        found: Topics = await routes.coordinator.call(GetTopics(unless=self._version))
        if found.version != self._version:
            self.topics = tuple(sorted(info.name for info in found.topics if self.matches(info.name)))
            self._version = found.version
        return self.topics
