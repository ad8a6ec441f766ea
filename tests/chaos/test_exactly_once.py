"""A source, a loop and a sink while leaders, coordinators and workers are killed: one result for each record.

CHAOS_SECONDS=300 python -m pytest tests/chaos/test_exactly_once.py
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ray

from rayqueue import Record
from rayqueue.client.handle import RayQueue
from rayqueue.errors import OutcomeUnknownError, RayQueueError, TransactionAbortedError
from tests.chaos.transaction_checks import History, Seen, anomalies
from tests.integration.consumers import coordinator_pid, leader_pid, running_queue

SECONDS = int(os.environ.get("CHAOS_SECONDS", "40"))
PARTITIONS = 2
KILL_EVERY_S = 4.0
AT_ONCE = 7

pytestmark = pytest.mark.timeout(SECONDS + 260)


class _UndoneError(Exception):
    pass


class Feeder(threading.Thread):
    """Writes its numbers, each to every partition in one transaction; every fifth is aborted. Some one after the other,
    and some without waiting for each."""

    def __init__(self, rq: RayQueue, history: History) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._rq = rq
        self._history = history
        self._rng = random.Random(5)

    def run(self) -> None:
        number = 0
        with self._rq.producer(transactional_id="feeder", transaction_timeout_ms=20_000) as producer:
            while not self.stop.wait(0.05):
                if self._rng.random() < 0.5:
                    number += 1
                    self._one(producer, number)
                else:
                    self._several(producer, range(number + 1, number + 1 + AT_ONCE))
                    number += AT_ONCE
            for _ in range(50):  # the last is committed: a group's position does not pass what is aborted at the end
                number += 1 if (number + 1) % 5 else 2
                self._one(producer, number)
                if number in self._history.committed:
                    break

    def _one(self, producer: Any, number: int) -> None:
        history, tx = self._history, producer.transaction()
        history.unknown.add(number)  # until it is known
        try:
            tx.begin()
            for partition in range(PARTITIONS):
                tx.send("source", b"%d" % number, partition=partition)
            if number % 5 == 0:
                producer.flush()
                tx.abort()
                told = history.aborted
            else:
                told = self._committed(tx)
        except RayQueueError:
            told = history.aborted  # it was never asked to be committed, or was refused
            with contextlib.suppress(RayQueueError):
                tx.abort()
        if told is not history.unknown:
            told.add(number)
            history.unknown.discard(number)

    def _several(self, producer: Any, numbers: range) -> None:
        """Their ends are waited for together. Each is told for itself, though they may have been decided together."""
        history, ended = self._history, []
        for number in numbers:
            tx = producer.transaction(wait=False)
            history.unknown.add(number)
            try:
                with tx:
                    for partition in range(PARTITIONS):
                        tx.send("source", b"%d" % number, partition=partition)
                    if number % 5 == 0:
                        raise _UndoneError
            except (RayQueueError, _UndoneError):  # it was lost before its end, or never begun
                history.aborted.add(number)
                history.unknown.discard(number)
            else:
                ended.append((number, tx))
        for number, tx in ended:
            try:
                tx.wait_committed()
            except OutcomeUnknownError:
                continue
            except RayQueueError:
                history.aborted.add(number)
            else:
                history.committed.add(number)
                history.pipelined += 1
            history.unknown.discard(number)

    def _committed(self, tx: Any) -> set[int]:
        for _ in range(20):
            try:
                tx.commit()
            except TransactionAbortedError:
                return self._history.aborted
            except OutcomeUnknownError:
                continue
            return self._history.committed
        return self._history.unknown


class Observer(threading.Thread):
    """Polls the sink from its beginning."""

    def __init__(self, rq: RayQueue) -> None:
        super().__init__(daemon=True)
        self.seen: list[Seen] = []
        self.until: int | None = None
        self._rq = rq

    def run(self) -> None:
        with self._rq.consumer("sink", isolation="read_committed") as consumer:
            while self.until is None or len(self.seen) < self.until:
                with contextlib.suppress(RayQueueError):
                    self.seen += map(seen_of, consumer.poll(timeout_ms=200))


def seen_of(record: Record[bytes, bytes]) -> Seen:
    return Seen(record.partition, record.offset, *map(int, (record.value or b"").split()))


def result(record: Record[bytes, bytes], state: Any) -> Any:
    from rayqueue import Result

    counted = state[b"records"] = b"%d" % (int(state.get(b"records", b"0")) + 1)
    state[b"last"] = b"%d" % record.offset
    value = b"%s %d %d %s" % (record.value, record.partition, record.offset, counted)
    return Result(value, key=b"%d" % record.partition)


def test_each_record_has_one_result_whatever_is_killed() -> None:
    history = History(PARTITIONS)
    rng = random.Random(15)
    with running_queue() as rq:
        for topic in ("source", "sink", "state"):
            rq.create_topic(topic, partitions=PARTITIONS)
        feeder, observer = Feeder(rq, history), Observer(rq)
        feeder.start()
        observer.start()
        with rq.process(
            "source", "sink", result, group="loop", batch=50, workers=2, state="state", transaction_timeout_ms=8000
        ) as run:
            kills = killers(rq, run)
            deadline_s = time.monotonic() + SECONDS
            while time.monotonic() < deadline_s:
                time.sleep(KILL_EVERY_S)
                with contextlib.suppress(RayQueueError, ray.exceptions.RayError, ProcessLookupError, ValueError):
                    rng.choice(kills)()
            feeder.stop.set()
            feeder.join(120)
            assert not feeder.is_alive(), "the feeder waits for ever"
            history.lag = drained(rq)
        history.log = read_all(rq)
        observer.until = len(history.log)
        observer.join(60)
        history.polls = [list(observer.seen)]
    assert len(history.committed) > 20, history
    assert history.pipelined > 10, history
    assert anomalies(history) == {}


def killers(rq: RayQueue, run: Any) -> list[Callable[[], None]]:
    def leader(topic: str, partition: int) -> Callable[[], None]:
        return lambda: os.kill(leader_pid(rq, topic, partition), signal.SIGKILL)

    def worker(number: int) -> Callable[[], None]:
        return lambda: ray.kill(run._workers._actors[number], no_restart=False)

    leaders = [leader(topic, each) for topic in ("source", "sink", "state") for each in range(PARTITIONS)]
    return [*leaders, worker(0), worker(1), lambda: os.kill(coordinator_pid(rq), signal.SIGKILL)]


def drained(rq: RayQueue) -> int:
    """Until all is processed. What is left."""
    deadline_s = time.monotonic() + 90
    with rq.consumer("source", group="loop", partitions=[("source", each) for each in range(PARTITIONS)]) as looker:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(RayQueueError):
                if not sum(looker.lag().values()):
                    return 0
            time.sleep(0.5)
        return sum(looker.lag().values())


def read_all(rq: RayQueue) -> list[Seen]:
    found: list[Seen] = []
    with rq.consumer("sink", isolation="read_committed") as consumer:
        quiet_s = time.monotonic()
        while time.monotonic() - quiet_s < 5:
            some = consumer.poll(timeout_ms=500)
            if some:
                quiet_s = time.monotonic()
            found += map(seen_of, some)
    return found


# -- the checks themselves ----------------------------------------------------------------------------


def whole() -> History:
    """Two transactions, each in both partitions of the source; one aborted."""
    log = [Seen(0, 0, 1, 0, 0, 1), Seen(0, 1, 1, 1, 0, 1), Seen(1, 0, 2, 0, 1, 2), Seen(0, 5, 2, 1, 1, 2)]
    return History(2, {1, 2}, {3}, set(), [sorted(log)], log)


def test_a_good_history_has_no_anomalies() -> None:
    assert anomalies(whole()) == {}


BAD: list[tuple[str, Callable[[History], None]]] = [
    ("aborted read", lambda history: history.log.append(Seen(1, 9, 3, 0, 7, 3))),
    ("unheard of", lambda history: history.log.append(Seen(1, 9, 99, 0, 7, 3))),
    ("duplicate", lambda history: history.log.append(Seen(1, 9, 2, 1, 1, 2))),
    ("torn transaction", lambda history: drop(history.log, -1)),
    ("lost write", lambda history: history.committed.add(4)),
    ("out of order", lambda history: history.log.append(Seen(0, 7, 2, 0, 0, 1))),
    ("inconsistent offsets", lambda history: history.polls.append([replace_number(history.log[0])])),
    ("poll-skip", lambda history: drop(history.polls[0], 0)),
    ("non-monotonic poll", lambda history: history.polls[0].append(history.polls[0][0])),
    ("unseen", lambda history: drop(history.polls[0], -1)),
    ("inconsistent state", lambda history: history.log.append(Seen(1, 9, 2, 0, 7, 2))),
    ("unseen", lambda history: setattr(history, "lag", 3)),
]


def drop(rows: list[Seen], at: int) -> None:
    del rows[at]


def replace_number(seen: Seen) -> Seen:
    return seen._replace(number=seen.number + 1)


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=[name for name, _ in BAD])
def test_each_anomaly_is_found(name: str, spoil: Callable[[History], None]) -> None:
    history = replace(whole())
    spoil(history)
    assert name in anomalies(history)
