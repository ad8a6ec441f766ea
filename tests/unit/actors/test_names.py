"""Names in Ray and on disk."""

from __future__ import annotations

import pytest

from rayqueue.actors.names import actor_name, check_id
from rayqueue.errors import InvalidInputError
from rayqueue.ids import GroupId, ReplicaId


def test_ids_are_safe_as_names_of_directories() -> None:
    for good in ("orders-3", "a", "A.b_c-9", "x" * 200):
        assert check_id(good) == good
    for bad in ("", ".", "..", "a/b", "-x", ".x", "a b", "ä", "a\0", "a\n", "x" * 201):
        with pytest.raises(InvalidInputError):
            check_id(bad)
    assert actor_name(GroupId("orders-3"), ReplicaId("n1")) == "rayqueue/orders-3/n1"
