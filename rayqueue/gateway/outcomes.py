"""Outcomes: what several writes that belong together come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayqueue.errors import OutcomeUnknownError


def worst(outcomes: Sequence[Any]) -> BaseException:
    """Of several errors the one that says most: that it is not known what was written."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if len(errors) < len(outcomes) and not any(isinstance(each, OutcomeUnknownError) for each in errors):
        return OutcomeUnknownError(f"some of these records are written, and some are not: {errors[0]}")
    return next((each for each in errors if isinstance(each, OutcomeUnknownError)), errors[0])
