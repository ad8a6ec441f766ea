"""Settlements are gathered into few words, and everybody hears of his own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from rayqueue.client.queue.job import Grant, Job, explained
from rayqueue.client.queue.settling import (
    CALL_BYTES,
    MAX_REASON,
    MAX_TRACEBACK,
    Countdown,
    Ending,
    add,
    gather,
    itself,
    of_leases,
    portions,
    runs_of,
    tell,
    tell_failure,
    texts,
)
from rayqueue.errors import LeaseLostError, NotLeaderError, RayQueueError
from rayqueue.protocol.calls import encode_call
from rayqueue.protocol.jobs import MAX_JOBS, MAX_RESULT_BYTES, Settled, SettleJobs, Settlement


class _Heard:
    def __init__(self) -> None:
        self.by_offset: dict[int, RayQueueError | None] = {}

    def of(self, ending: Ending, error: RayQueueError | None) -> None:
        for offset in ending.offsets:
            assert offset not in self.by_offset
            self.by_offset[offset] = error

    def ending(self, kind: str, token: int, *offsets: int, **more: object) -> Ending:
        return Ending(kind, token, list(offsets), self.of, **more)  # type: ignore[arg-type]


def _job(partition: int, token: int, offset: int) -> Job[bytes, bytes]:
    grant = Grant(None, partition, token)  # type: ignore[arg-type]  # there is no worker here
    return Job(grant, offset, b"", None, (), 0, 1, 0, False, settled=True)


def test_acks_of_one_lease_are_runs_of_one_settlement() -> None:
    heard = _Heard()
    endings = [heard.ending("ack", 7, *offsets) for offsets in ((5,), (3, 4), (9,), (1,))]
    (gathered,) = gather(endings)
    assert gathered.settlement.kind == "ack"
    assert gathered.settlement.token == 7
    assert gathered.settlement.jobs == ((1, 1), (3, 3), (9, 1))
    tell([gathered], [Settled(lost=((4, 2),))], "q-0")
    assert {offset for offset, error in heard.by_offset.items() if error is None} == {1, 9}
    assert isinstance(heard.by_offset[3], LeaseLostError)  # one of its ending is lost
    assert heard.by_offset[3].details["offset"] == 4
    assert isinstance(heard.by_offset[5], LeaseLostError)


def test_jobs_are_told_by_lease_each_once_and_in_order() -> None:
    jobs = [_job(0, 1, 3), _job(0, 1, 4), _job(1, 1, 4), _job(0, 2, 9), _job(0, 1, 2), _job(0, 1, 3)]
    assert of_leases(jobs) == {(0, 1): [2, 3, 4], (1, 1): [4], (0, 2): [9]}
    assert of_leases([]) == {}
    downwards = [_job(0, 1, offset) for offset in range(50, 0, -1)]
    assert of_leases(downwards) == {(0, 1): list(range(1, 51))}


def test_acks_one_by_one_become_one_ending() -> None:
    heard, other = _Heard(), _Heard()
    waiting: list[Ending] = []
    for offset in (1, 2, 5):
        add(waiting, heard.ending("ack", 7, offset))
    assert [each.offsets for each in waiting] == [[1, 2, 5]]
    apart = [
        heard.ending("ack", 7, 4),  # before the last one
        heard.ending("ack", 7, 9, result=b"r"),
        heard.ending("ack", 7, 10),
        heard.ending("release", 7, 11),
        heard.ending("release", 8, 12),
        other.ending("release", 8, 13),  # somebody else is told
        other.ending("nack", 8, 14, reason="no"),
        other.ending("nack", 8, 15, reason="no"),
    ]
    for each in apart:
        add(waiting, each)
    assert waiting[1:] == apart


def _calls(endings: Sequence[Ending]) -> list[Sequence[Settlement]]:
    return list(portions([each.settlement for each in gather(endings)], itself))


def test_one_call_has_no_more_jobs_than_it_may() -> None:
    heard = _Heard()
    large = [heard.ending("ack", token, *range(MAX_JOBS - 1)) for token in (1, 2)]
    small = [heard.ending("ack", 3, 1), heard.ending("ack", 4, 2), heard.ending("ack", 5, 3)]
    called = _calls([*small[:1], *large, *small[1:]])
    assert [[each.token for each in some] for some in called] == [[3, 1], [2, 4], [5]]
    assert _calls([]) == []


@pytest.mark.slow
def test_one_call_has_no_more_bytes_than_it_may() -> None:
    heard = _Heard()
    endings = [heard.ending("ack", 2**63 - 1, 2**63 - 1 - each, result=b"r" * 30_000) for each in range(60)]
    endings += [heard.ending("nack", 1, each, reason="\u20ac" * 4000, traceback="t" * 16_000) for each in range(60)]
    endings += [heard.ending("nack", 2, each, delay_ms=2**48) for each in range(MAX_JOBS)]
    endings += [heard.ending("ack", 3, *range(0, 2**63 - 1, 2**50))]
    endings += [heard.ending("ack", 4, 1, result=b"r" * MAX_RESULT_BYTES)]
    calls = _calls(endings)
    sizes = [len(encode_call(SettleJobs(worker="w" * 128, settlements=tuple(some)))) for some in calls]
    assert max(sizes) < CALL_BYTES + 200
    assert len(sizes) < 2 * sum(sizes) / CALL_BYTES  # and they are not many
    assert sum(map(len, calls)) == len(gather(endings))


def test_texts_can_be_written_and_are_not_too_long() -> None:
    assert texts("r", "t") == ("r", "t")
    assert texts("", "") == ("", "")
    assert texts("/data/\udcff", "\u20ac\udc80") == ("/data/\\udcff", "\u20ac\\udc80")
    reason, traceback = texts("\udcff" * 5000, "\udcff" * 20_000)
    assert (len(reason), len(traceback)) == (MAX_REASON, MAX_TRACEBACK)
    assert texts("ab" * 5000, "ab" * 20_000) == ("ab" * 2000, "ab" * 8000)
    assert explained(OSError("/data/\udcff"))[0] == "OSError: /data/\\udcff"


def test_an_exception_whose_text_cannot_be_made_is_told_all_the_same() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert explained(BrokenError())[0] == "BrokenError: (its text cannot be made: ZeroDivisionError)"


def test_whoever_has_given_up_does_not_keep_others_from_being_told() -> None:
    answer: Future[None] = Future()
    assert answer.cancel()
    Countdown(1, answer)(_Heard().ending("ack", 1, 1), None)


def test_reasons_and_results_stay_with_their_jobs() -> None:
    heard = _Heard()
    endings = [
        heard.ending("ack", 1, 10, result=b"r"),
        heard.ending("ack", 1, 11),
        heard.ending("nack", 1, 12, reason="no", traceback="t"),
        heard.ending("nack", 1, 13, delay_ms=5),
        heard.ending("nack", 2, 14),
    ]
    by_first = {each.settlement.jobs[0][0]: each.settlement for each in gather(endings)}
    assert by_first[10].result == b"r"
    assert by_first[11].result is None
    assert (by_first[12].reason, by_first[12].traceback) == ("no", "t")
    assert by_first[13].delay_ms == 5
    assert by_first[14].token == 2
    tell_failure(gather(endings), NotLeaderError("nobody", leader=None))
    assert len(heard.by_offset) == 5


def test_runs_are_not_longer_than_a_call_may_say() -> None:
    assert runs_of([]) == ()
    assert runs_of([4, 5, 6]) == ((4, 3),)
    assert runs_of([4, 6, 7]) == ((4, 1), (6, 2))
    assert runs_of(range(MAX_JOBS + 1)) == ((0, MAX_JOBS), (MAX_JOBS, 1))
