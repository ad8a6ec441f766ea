"""The campaign finds what it is for, and the same seed gives the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from rayqueue.protocol import calls, failures
from rayqueue.protocol.topics import TopicSettings
from rayqueue.records import columns
from tests.fuzz.campaign import input_of, run_chunk
from tests.fuzz.targets import TARGETS


def test_inputs_depend_on_the_seed_alone() -> None:
    for target in TARGETS:
        first = [input_of(target, 3, number) for number in range(20)]
        Random().shuffle(first[:])
        assert first == [input_of(target, 3, number) for number in range(20)]
        assert first != [input_of(target, 4, number) for number in range(20)]


def test_what_is_mended_is_found_again_if_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(decoder: Any, data: Any, refuse: Callable[[str], Exception]) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise refuse(str(error)) from None

    with monkeypatch.context() as patch:
        patch.setattr(calls, "unpack", narrow)
        patch.setattr(failures, "unpack", narrow)
        for target in ("partition calls", "coordinator", "answers", "failures"):
            assert run_chunk((target, 0, 300), seed=1).faults, target
    with monkeypatch.context() as patch:
        patch.setattr(columns, "check", lambda *_: None)
        assert run_chunk(("batches", 0, 300), seed=1).faults
    changed = TopicSettings.changed
    with monkeypatch.context() as patch:
        # As a bug in the coordinator would show if it were not refused there.
        patch.setattr("rayqueue.cluster.coordinator._refusal", _raised)
        patch.setattr(TopicSettings, "changed", lambda settings, changes: changed(settings, dict(**changes, self=1)))
        patch.setattr(TopicSettings, "check", lambda settings: 1 // 0)
        assert run_chunk(("coordinator", 0, 300), seed=1).faults


def _raised(_: Any, error: Exception) -> None:
    raise error
