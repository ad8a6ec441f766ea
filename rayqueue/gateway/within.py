"""Within: a deadline for what is awaited, without a task of its own where Python can do that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

if sys.version_info >= (3, 11):

    async def within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
        """What it returns. ``asyncio.TimeoutError`` if it takes longer: it is cancelled then."""
        async with asyncio.timeout(seconds):
            return await work

else:

    async def within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
        """What it returns. ``asyncio.TimeoutError`` if it takes longer: it is cancelled then."""
        return await asyncio.wait_for(work, seconds)
