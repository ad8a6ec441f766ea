"""The tree of errors: complete in its docstring, told apart by code, safe to send through Ray."""

from __future__ import annotations

import pickle  # noqa: TID251  (Ray pickles what an actor raises)
import re
from collections.abc import Iterator

import pytest

from rayqueue import errors
from rayqueue.errors import OutcomeUnknownError, RayQueueError


def subclasses(cls: type[RayQueueError]) -> Iterator[type[RayQueueError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from subclasses(child)


ALL = [cls for cls in subclasses(RayQueueError) if cls.__module__ == errors.__name__]


def documented_parents() -> dict[str, str]:
    """Child -> parent, as drawn in the module's docstring."""
    parents: dict[str, str] = {}
    path = ["RayQueueError"]
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if drawn:
            depth = len(drawn[1]) // 4 + 1
            parents[drawn[2]] = path[depth - 1]
            path = [*path[:depth], drawn[2]]
    return parents


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    real = {cls.__name__: cls.__bases__[0].__name__ for cls in ALL if cls is not RayQueueError}
    assert documented_parents() == real


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)}
    assert defined == set(ALL)


def test_codes_are_unique_and_each_class_has_its_own() -> None:
    assert all("code" in vars(cls) for cls in ALL)
    assert len({cls.code for cls in ALL}) == len(ALL)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code) for cls in ALL)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_survives_pickle(cls: type[RayQueueError]) -> None:
    error = cls("it went wrong", offset=7, leader=None)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "it went wrong"
    assert copy.details == {"offset": 7, "leader": None}
    assert (copy.code, copy.retriable, copy.refresh_metadata) == (cls.code, cls.retriable, cls.refresh_metadata)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_says_what_it_means(cls: type[RayQueueError]) -> None:
    assert cls.__doc__
    assert cls.__name__.endswith("Error")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_asking_again_who_leads_only_makes_sense_before_a_retry(cls: type[RayQueueError]) -> None:
    assert cls.retriable or not cls.refresh_metadata


def test_an_unknown_outcome_is_no_refusal() -> None:
    promised = [cls for cls in ALL if "Nothing was written" in (cls.__doc__ or "")]
    assert promised
    assert not any(issubclass(cls, OutcomeUnknownError) for cls in promised)
