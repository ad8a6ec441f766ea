"""Settlements are gathered into few words, and everybody hears of his own."""

from __future__ import annotations

from functools import partial

from rayqueue.client.queue.settling import Ending, gather, runs_of, tell, tell_failure
from rayqueue.errors import LeaseLostError, NotLeaderError, RayQueueError
from rayqueue.protocol.jobs import MAX_JOBS, Settled


class _Heard:
    def __init__(self) -> None:
        self.by_offset: dict[int, RayQueueError | None] = {}

    def of(self, offset: int, error: RayQueueError | None) -> None:
        assert offset not in self.by_offset
        self.by_offset[offset] = error

    def ending(self, kind: str, token: int, offset: int, **more: object) -> Ending:
        return Ending(kind, token, offset, partial(self.of, offset), **more)  # type: ignore[arg-type]


def test_acks_of_one_lease_are_runs_of_one_settlement() -> None:
    heard = _Heard()
    endings = [heard.ending("ack", 7, offset) for offset in (5, 3, 4, 9, 1)]
    (gathered,) = gather(endings)
    assert gathered.settlement.kind == "ack"
    assert gathered.settlement.token == 7
    assert gathered.settlement.jobs == ((1, 1), (3, 3), (9, 1))
    tell([gathered], [Settled(lost=((3, 2),))], "q-0")
    assert {offset for offset, error in heard.by_offset.items() if error is None} == {1, 5, 9}
    assert isinstance(heard.by_offset[3], LeaseLostError)
    assert isinstance(heard.by_offset[4], LeaseLostError)


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
    tell_failure(endings, NotLeaderError("nobody", leader=None))
    assert len(heard.by_offset) == 5


def test_runs_are_not_longer_than_a_call_may_say() -> None:
    assert runs_of([]) == ()
    assert runs_of(range(MAX_JOBS + 1)) == ((0, MAX_JOBS), (MAX_JOBS, 1))
