"""The base of all calls."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that is no bulk data. ``answer_type`` is what it is answered with."""

    answer_type: ClassVar[Any] = None
