"""The campaign finds what it is for, and the same seed gives the same inputs."""

from __future__ import annotations

import base64
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

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


@pytest.mark.skipif("gateway bodies" not in TARGETS, reason="the gateway's extra is not installed")
def test_what_the_gateway_checks_is_found_if_it_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("gateway bodies", "gateway queries", "gateway messages"):
        assert not run_chunk((target, 0, 300), seed=1).faults, target
    with monkeypatch.context() as patch:
        patch.setattr("rayqueue.gateway.values.from_base64", base64.b64decode)
        assert run_chunk(("gateway bodies", 0, 1000), seed=1).faults
    with monkeypatch.context() as patch:
        patch.setattr("rayqueue.gateway.values.is_json", lambda _: True)
        assert run_chunk(("gateway bodies", 0, 1000), seed=1).faults
    with monkeypatch.context() as patch:  # as if each batch had values and nothing else
        patch.setattr("rayqueue.gateway.rpc.messages._bare_bytes", lambda _: mock.ANY)
        assert run_chunk(("gateway messages", 0, 500), seed=1).faults


def _raised(_: Any, error: Exception) -> None:
    raise error
