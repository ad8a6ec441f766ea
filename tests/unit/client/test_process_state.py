"""The state of a processing function: what a call changes, and how it is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from rayqueue.client.process.state import State
from rayqueue.protocol.topics import TopicPartition


def state_of(**kept: bytes) -> State:
    state = State(TopicPartition("counts", 0), 1)
    for at, (key, value) in enumerate(kept.items()):
        state.put(key.encode(), value, at)
    return state


def test_what_a_call_has_changed_is_taken_back() -> None:
    state = state_of(a=b"1", b=b"2")
    state[b"c"] = b"3"
    state.mark()
    state[b"a"] = b"x"
    state[b"c"] = b"y"
    del state[b"b"]
    state[b"b"] = b"again"
    state[b"d"] = b"new"
    del state[b"d"]
    state.back()
    assert dict(state) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    state.back()  # there is nothing left to take back
    assert dict(state) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    state.mark()
    state[b"c"] = b"4"
    state.mark()  # the call has returned: that stays
    state.back()
    assert state[b"c"] == b"4"
    state.aborted()
    assert dict(state) == {b"a": b"1", b"b": b"2"}
    state.back()
    assert dict(state) == {b"a": b"1", b"b": b"2"}


def test_it_is_a_dictionary_that_goes_back() -> None:
    rng = Random(15)
    state, wanted = state_of(), dict[bytes, bytes]()
    for _ in range(300):
        before = dict(wanted)
        state.mark()
        for _ in range(rng.randrange(5)):
            key = b"%d" % rng.randrange(6)
            if key in wanted and rng.random() < 0.4:
                del state[key], wanted[key]
            else:
                state[key] = wanted[key] = b"%d" % rng.randrange(100)
        if rng.random() < 0.3:
            state.back()
            wanted = before
        assert dict(state) == wanted


class Watched(dict[bytes, "bytes | None"]):
    read = 0

    def __iter__(self) -> Iterator[bytes]:  # with its own, copies ask for the keys
        return super().__iter__()

    def keys(self) -> Any:
        self.read += 1
        return super().keys()


def test_a_call_costs_what_it_changes_and_not_what_the_batch_has_changed() -> None:
    state = state_of()
    changes = state._changes = Watched()
    for number in range(1000):
        state.mark()
        state[b"%d" % number] = b"1"
    state.back()
    assert (changes.read, len(changes), len(state._undo)) == (0, 999, 0)
