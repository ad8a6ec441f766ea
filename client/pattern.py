"""A subscription by pattern: which topics a regular expression means now.

The whole name must match; what RayQueue makes for itself (staging topics) never
does. Looked up by the consumer itself, from time to time: the coordinator gets to
see names only, so an expression that takes for ever to match holds up nobody but
whoever wrote it. Between two looks in which no topic has changed the coordinator
tells nothing but that.
"""

from __future__ import annotations

import re
from typing import Any

from rayqueue.client.routing import Routes
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.calls import GetTopics, Topics
from rayqueue.protocol.topics import is_internal

MAX_PATTERN = 1_000


class TopicPattern:
    """What matched when it was last looked is ``topics``, by name."""

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
        """What matches now."""
        found: Topics = await routes.coordinator.call(GetTopics(unless=self._version))
        if found.version != self._version:
            self.topics = tuple(sorted(info.name for info in found.topics if self.matches(info.name)))
            self._version = found.version
        return self.topics
