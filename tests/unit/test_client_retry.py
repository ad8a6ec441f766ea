"""The retry policy: what the errors say, and nothing else, decides."""

from __future__ import annotations

from random import Random

import pytest

from rayqueue import errors
from rayqueue.client.retry import Retry
from rayqueue.config import ClientSettings
from rayqueue.errors import NotLeaderError, OutcomeUnknownError, QueueFullError, RayQueueError

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayQueueError)]
SETTINGS = ClientSettings(retry_min_ms=10, retry_max_ms=100, call_timeout_ms=1000)


def retry(*, idempotent: bool = True) -> Retry:
    return Retry(SETTINGS, Random(1), 50.0, idempotent=idempotent)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_error_decides(cls: type[RayQueueError]) -> None:
    error = cls("no")
    if cls.retriable:
        assert retry().after(error, 50.0).refresh is cls.refresh_metadata
    else:
        with pytest.raises(cls) as caught:
            retry().after(error, 50.0)
        assert caught.value is error
    if issubclass(cls, OutcomeUnknownError):
        with pytest.raises(cls):
            retry(idempotent=False).after(error, 50.0)


def test_waits_grow_to_their_limit_and_vary() -> None:
    policy = retry()
    waits_ms = [policy.after(QueueFullError("full"), 50.0).seconds * 1000 for _ in range(12)]
    for number, wait_ms in enumerate(waits_ms):
        longest = min(100, 10 * 2**number)
        assert longest / 2 <= wait_ms <= longest
    assert len({round(wait_ms, 6) for wait_ms in waits_ms}) == len(waits_ms)


def test_patience_ends_and_progress_renews_it() -> None:
    policy = retry()
    error = NotLeaderError("no", leader=None)
    policy.after(error, 50.9)
    with pytest.raises(NotLeaderError):
        policy.after(error, 51.0)
    policy.progress(51.0)
    assert policy.after(error, 51.9).seconds <= 0.01
    assert policy.deadline_s == 52.0
