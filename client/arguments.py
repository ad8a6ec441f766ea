"""Arguments of the public API: a call that does not fit gets a typed error that says what was meant.

``hinted`` is for methods with options; ``check_*`` for values. Each raises
``InvalidInputError`` before anything is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from rayqueue.errors import InvalidInputError

_F = TypeVar("_F", bound=Callable[..., Any])


def hinted(function: _F) -> _F:
    """A call with a misspelt option, or with one too many in its place, is an ``InvalidInputError`` with a hint."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            problem = _problem(function, args, kwargs)
            if problem is None:
                raise  # it is from within
        raise InvalidInputError(problem) from None

    return call  # type: ignore[return-value]


def refuse_unknown(call: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """``InvalidInputError`` if options were given that there are not."""
    for name in unknown:
        raise InvalidInputError(f"{call} has no option {name!r}{did_you_mean(name, known)}", option=name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = get_close_matches(name, known, n=1) or [each for each in known if each.startswith(f"{name}_")]
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def check_duration(name: str, value: Any) -> Any:
    """Itself, if it is a number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InvalidInputError(f"{name} is a number that is not negative, not {value!r}", option=name)
    return value


def check_timeout_ms(value: Any, name: str = "timeout_ms") -> Any:
    """The same for milliseconds, which are whole: a fraction is somebody's seconds."""
    if isinstance(value, float):
        raise InvalidInputError(f"{name} is in milliseconds: did you mean {name}={round(value * 1000)}?", option=name)
    return check_duration(name, value)


def _problem(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why these arguments do not fit the function; None if they do."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(error)
    else:
        return None
    call = function.__qualname__.removesuffix(".__init__")
    options = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL]
    options = [name for name in options if name != "self"]
    unknown = next((name for name in kwargs if name not in options), None)
    if unknown is not None:
        return f"{call} has no option {unknown!r}{did_you_mean(unknown, options)}"
    if "too many positional" in text:
        kinds = [each for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        extra = args[len(kinds)]
        return f"{call} takes {extra!r} by name only{_named(extra, options)}"
    return f"{call}: {text}"


def _named(value: Any, options: list[str]) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and "timeout_ms" in options:
        others = [f"{name}={value}" for name in options if name == "max_records" and isinstance(value, int)]
        return "; did you mean " + " or ".join([f"timeout_ms={round(value * 1000)}", *others]) + "?"
    return f"; there are {', '.join(options)}"
