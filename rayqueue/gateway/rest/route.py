"""Route: one route of the gateway, as data."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rayqueue.gateway.rest import handlers as h
from rayqueue.gateway.rest import models as m


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[h.Call], Coroutine[Any, Any, Any]]
    tag: str
    summary: str
    params: Any = m.NoParams
    body: Any = None
    """The model of a JSON body; ``bytes``: any body, as it is."""
    answer: Any = None
    """None: no body, status 204."""
    status: int = 200
    example: Any = None
    """Of the body."""
    answer_example: Any = None
    public: bool = False
    """Needs no key. Whatever else there is does."""
    stream: bool = False
    watched: bool = False
    """It may wait long, and what it hands out is not to be wasted: it is cancelled when its caller goes."""
    headers: dict[str, str] = field(default_factory=dict)
    """Request headers with a meaning."""

    @property
    def operation_id(self) -> str:
        return self.handler.__name__


IDEMPOTENCY = {
    "Idempotency-Key": "A name for this request, of your choice. Asked again with the same one, whichever gateway is "
    "asked, nothing is written twice: the first answer comes again. Remembered for a day, per API key and topic."
}
