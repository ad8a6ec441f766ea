"""Arguments of the public API: a call that does not fit gets a typed error that says what was meant.

``hinted`` is for methods with options; ``check_*`` for values. Each raises
``InvalidInputError`` before anything is done. ``with_given`` and ``explained`` are
for methods whose options are settings.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Container, Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, TypeVar

from typing_extensions import ParamSpec, get_overloads

from rayqueue.config import Section
from rayqueue.errors import ConfigError, InvalidInputError
from rayqueue.protocol.topics import TopicSettings, declared

MOST = 2**62

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")


def hinted(function: _F) -> _F:
    """A call with a misspelt option, or with one too many in its place, is an ``InvalidInputError`` with a hint."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_misfit(function, args, kwargs)
            raise  # it is from within

    return call  # type: ignore[return-value]


def refuse_misfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``InvalidInputError`` with a hint if these are no arguments of the function."""
    problem = _problem(function, args, kwargs)
    if problem is not None:
        raise InvalidInputError(problem) from None


def with_given(
    method: Callable[Concatenate[_S, Mapping[str, Any], _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """Hand a method, before its arguments, the options that the caller has named: a default is nobody's wish."""

    @wraps(method)
    def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(self, kwargs, *args, **kwargs)

    show(call, method, omit=1)
    return call


def show(function: Callable[..., Any], as_: Callable[..., Any], *, omit: int | None = None) -> None:
    """Let ``help`` and ``inspect.signature`` say of a function what they say of another, but for one parameter."""
    signature = inspect.signature(as_)
    shown = [each for number, each in enumerate(signature.parameters.values()) if number != omit]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    function.__doc__ = as_.__doc__


def passing_on(to: Callable[..., Any], *, omit: Container[str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """For a method that hands its ``**options`` to another call: shown, and taken, are those of that one but some."""

    def of(method: Callable[_P, _T]) -> Callable[_P, _T]:
        own = inspect.signature(method)
        shown = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
        for name, each in inspect.signature(to).parameters.items():
            if each.kind is each.KEYWORD_ONLY and name not in omit:
                shown.setdefault(name, each)

        @wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            refuse_misfit(call, args, kwargs)
            return method(*args, **kwargs)

        call.__signature__ = own.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        return call

    return of


def explained(section: type[Section] | type[TopicSettings]) -> Callable[[_F], _F]:
    """Let ``help`` and ``inspect.signature`` show the options of a method: what each is, and its default.

    Of a method with overloads the first spells the options out; the others have them as ``**options``, and the last one
    takes whatever any of them does.
    """

    def of(method: _F) -> _F:
        signatures = [inspect.signature(each) for each in get_overloads(method)]
        if signatures:
            shown = {**signatures[0].parameters, **signatures[-1].parameters}
            parameters = [each for each in shown.values() if each.kind is not each.VAR_KEYWORD]
            method.__signature__ = signatures[-1].replace(  # type: ignore[attr-defined]
                parameters=sorted(parameters, key=lambda each: each.kind)
            )
        known = inspect.signature(method).parameters
        told = [f"    {name}: {text}" for name, text in _explanations(section).items() if name in known]
        method.__doc__ = "\n".join([inspect.cleandoc(method.__doc__ or ""), "", *told])
        return method

    return of


def _explanations(section: type[Section] | type[TopicSettings]) -> dict[str, str]:
    if issubclass(section, Section):
        fields = section.model_fields.items()
        return {name: f"{each.description} (None: as configured; {each.default!r} by default)" for name, each in fields}
    return {name: f"{each.doc} ({each.range})" for name, each in declared(section).items()}


class _Unchanged(Enum):
    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Any = _Unchanged.UNCHANGED
"""The default of an option that changes nothing, where ``None`` would."""


def chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not as configured."""
    return {name: given for name, given in options.items() if given is not None}


def refuse_unknown(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """``ConfigError`` if there are options among these that there are not."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{call} has no option {name!r}{did_you_mean(name, known)}", key=name)


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


def seconds_of(timeout: float | None, timeout_ms: int | None) -> float | None:
    """A timeout in seconds: given so, as Python's own futures have it, or in milliseconds, as everything here."""
    if timeout is None:
        timeout_s = None if timeout_ms is None else check_duration("timeout_ms", timeout_ms) / 1000
    elif timeout_ms is None:
        timeout_s = check_duration("timeout", timeout)
    else:
        raise InvalidInputError("a timeout is in seconds (timeout) or in milliseconds (timeout_ms), not both")
    return timeout_s


def check_whole(name: str, value: Any, *, least: int = -MOST) -> int:
    """Itself, if it is a whole number that fits into 63 bits, and not below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        limits = "a whole number" if least < 0 else f"a whole number from {least}"
        raise InvalidInputError(f"{name} is {limits}, not {value!r}", option=name)
    return value


def check_text(name: str, value: Any) -> Any:
    """Itself, if it is a text, and one that can be written as UTF-8."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} is a text, not {value!r}", option=name)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(f"{name} has half of a surrogate pair: {value!r}", option=name) from None
    return value


def check_path(name: str, value: Any) -> Path:
    """As a path, if it can be one."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise InvalidInputError(f"{name} is a directory's path, a text or a Path, not {value!r}", option=name)
    return Path(path)


def check_topics(topics: Iterable[Any]) -> tuple[Any, ...]:
    """Names of topics, given one by one or as a list."""
    names: list[Any] = []
    for given in topics:
        names += [given] if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) else given
    return tuple(names)


def check_count(name: str, value: Any) -> Any:
    """Itself, if it is a whole number from 1."""
    if isinstance(value, float):
        hint = f": did you mean timeout_ms={round(value * 1000)}?" if name == "max_records" else ""
        raise InvalidInputError(f"{name} is a whole number, not {value!r}{hint}", option=name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"{name} must be a whole number, at least 1, not {value!r}", option=name)
    return value


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
