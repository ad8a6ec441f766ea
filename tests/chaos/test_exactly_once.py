"""A source, a loop and a sink while leaders, coordinators, workers and feeder are killed and stopped: one result for
each record.

CHAOS_SECONDS=300 python -m pytest tests/chaos/test_exactly_once.py
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from rayqueue import Record
from rayqueue.client.handle import RayQueue
from rayqueue.errors import OutcomeUnknownError, RayQueueError, TransactionAbortedError
from rayqueue.protocol.topics import TopicPartition
from tests.chaos.killing import Killing
from tests.chaos.transaction_checks import History, Seen, anomalies
from tests.integration.consumers import coordinator_pid, leader_pid, running_queue

SECONDS = int(os.environ.get("CHAOS_SECONDS", "40"))
MORE_SECONDS = 60
"""As long as something has not been killed or stopped once."""
PARTITIONS = 2
KILL_EVERY_S = 4.0
AT_ONCE = 7

pytestmark = pytest.mark.timeout(SECONDS + MORE_SECONDS + 300)


class _UndoneError(Exception):
    pass


Told = dict[int, str]
"""Of each number: ``committed``, ``aborted``, ``unknown`` or ``pipelined``: committed without being waited for."""


class FeederProcess:
    """Writes numbers, each to every partition in one transaction; every fifth is aborted. In a process of its own: the
    one after it has the same transactional id."""

    def __init__(self, rq: RayQueue) -> None:
        self._producer = rq.producer(transactional_id="feeder", transaction_timeout_ms=20_000)

    def pid(self) -> int:
        return os.getpid()

    def one(self, number: int) -> Told:
        tx = self._producer.transaction()
        try:
            tx.begin()
            for partition in range(PARTITIONS):
                tx.send("source", b"%d" % number, partition=partition)
            if number % 5 == 0:
                self._producer.flush()
                tx.abort()
                return {number: "aborted"}
            return {number: self._committed(tx)}
        except RayQueueError:  # it was never asked to be committed, or was refused
            with contextlib.suppress(RayQueueError):
                tx.abort()
            return {number: "aborted"}

    def several(self, numbers: list[int]) -> Told:
        """Their ends are waited for together. Each is told for itself, though they may have been decided together."""
        told: Told = {}
        ended: list[tuple[int, Any]] = []
        for number in numbers:
            tx = self._producer.transaction(wait=False)
            try:
                with tx:
                    for partition in range(PARTITIONS):
                        tx.send("source", b"%d" % number, partition=partition)
                    if number % 5 == 0:
                        raise _UndoneError
            except (RayQueueError, _UndoneError):  # it was lost before its end, or never begun
                told[number] = "aborted"
            else:
                ended.append((number, tx))
        for number, tx in ended:
            try:
                tx.wait_committed()
            except OutcomeUnknownError:
                told[number] = "unknown"
            except RayQueueError:
                told[number] = "aborted"
            else:
                told[number] = "pipelined"
        return told

    def _committed(self, tx: Any) -> str:
        for _ in range(20):
            try:
                tx.commit()
            except TransactionAbortedError:
                return "aborted"
            except OutcomeUnknownError:
                continue
            return "committed"
        return "unknown"


class Feeder(threading.Thread):
    """Lets a ``FeederProcess`` write, and notes what it is told. What that was at when it died nobody was told of."""

    def __init__(self, rq: RayQueue, history: History) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._history = history
        self._rng = random.Random(5)
        actor: Any = ray.remote(FeederProcess)
        self._process = actor.options(num_cpus=0, max_restarts=-1).remote(rq)

    def pid(self) -> int:
        return int(ray.get(self._process.pid.remote(), timeout=20))

    def run(self) -> None:
        number = 0
        while not self.stop.wait(0.05):
            if self._rng.random() < 0.5:
                number += 1
                self._feed(self._process.one, [number], number)
            else:
                numbers = list(range(number + 1, number + 1 + AT_ONCE))
                self._feed(self._process.several, numbers, numbers)
                number += AT_ONCE
        for _ in range(50):  # the last is committed: a group's position does not pass what is aborted at the end
            number += 1 if (number + 1) % 5 else 2
            self._feed(self._process.one, [number], number)
            if number in self._history.committed:
                break

    def _feed(self, method: Any, numbers: list[int], argument: Any) -> None:
        history = self._history
        history.unknown.update(numbers)  # until it is known
        try:
            told: Told = ray.get(method.remote(argument))
        except ray.exceptions.RayError:
            history.deaths += 1
            time.sleep(0.2)
            return
        for number, fate in told.items():
            if fate != "unknown":
                (history.aborted if fate == "aborted" else history.committed).add(number)
                history.unknown.discard(number)
            history.pipelined += fate == "pipelined"


class Observer(threading.Thread):
    """Polls the sink from its beginning, alone."""

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


class Members(threading.Thread):
    """A place in a group that polls the sink: a consumer that leaves after some seconds, then another one. Notes
    what it has polled by assignment."""

    def __init__(self, rq: RayQueue, history: History, seed: int) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._rq = rq
        self._history = history
        self._rng = random.Random(seed)
        self._mine: dict[int, list[Seen]] = {}

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._mine[each.partition] = []
            self._history.assignments.append(self._mine[each.partition])

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._mine.pop(each.partition, None)

    lost = revoked

    def run(self) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(RayQueueError):
                self._one(time.monotonic() + self._rng.uniform(4, 12))

    def _one(self, until_s: float) -> None:
        with self._rq.consumer("sink", group="observers", start="earliest", listener=self) as consumer:
            while time.monotonic() < until_s and not self.stop.is_set():
                with contextlib.suppress(RayQueueError):
                    for record in consumer.poll(timeout_ms=200):
                        self._mine[record.partition].append(seen_of(record))


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
    with running_queue() as rq:
        for topic in ("source", "sink", "state"):
            rq.create_topic(topic, partitions=PARTITIONS)
        feeder, observer = Feeder(rq, history), Observer(rq)
        members = [Members(rq, history, seed) for seed in range(2)]
        for thread in (feeder, observer, *members):
            thread.start()
        with rq.process(
            "source", "sink", result, group="loop", batch=50, workers=2, state="state", transaction_timeout_ms=8000
        ) as run:
            killing = killing_of(rq, run, feeder)
            try:
                deadline_s = time.monotonic() + SECONDS
                while time.monotonic() < deadline_s or (
                    killing.missing and time.monotonic() < deadline_s + MORE_SECONDS
                ):
                    time.sleep(KILL_EVERY_S)
                    killing.next()
            finally:
                killing.heal()
            feeder.stop.set()
            feeder.join(120)
            assert not feeder.is_alive(), "the feeder waits for ever"
            history.lag = drained(rq)
        history.log = read_all(rq)
        observer.until = len(history.log)
        observer.join(60)
        history.polls = [list(observer.seen)]
        wait_until_all_is_seen(history)
        for each in members:
            each.stop.set()
        for each in members:
            each.join(30)
    print(f"{dict(killing.done)}, not at that moment: {killing.failed}")  # pytest shows it with -s, or if it fails
    print(
        f"{len(history.committed)} committed, {len(history.aborted)} aborted, {len(history.unknown)} unknown, "
        f"{len(history.assignments)} assignments, {history.deaths} deaths of the feeder under way"
    )
    assert not killing.missing, f"{killing.missing} have not happened: {killing.failed}"
    assert len(history.committed) > 20, history
    assert history.pipelined > 10, history
    assert len(history.assignments) > 2 * PARTITIONS, "nothing has moved from one member to another"
    assert anomalies(history) == {}


def killing_of(rq: RayQueue, run: Any, feeder: Feeder) -> Killing:
    rng = random.Random(15)

    def leader(topic: str) -> Callable[[], int]:
        return lambda: leader_pid(rq, topic, rng.randrange(PARTITIONS))

    def worker() -> int:
        actor = rng.choice(run._workers._actors)
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10))

    kinds: dict[str, Callable[[], int]] = {f"leader of {topic}": leader(topic) for topic in ("source", "sink", "state")}
    kinds |= {"worker": worker, "coordinator": lambda: coordinator_pid(rq), "feeder": feeder.pid}
    # Longer than a transaction may be open, and than a session: the worker is a zombie then.
    return Killing(kinds, {"leader of source": 5.0, "leader of sink": 5.0, "worker": 14.0}, rng)


def wait_until_all_is_seen(history: History) -> None:
    """By the group. What is left is found by the checks."""
    there = {(each.partition, each.offset) for each in history.log}
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        seen = {(each.partition, each.offset) for run in list(history.assignments) for each in list(run)}
        if there <= seen:
            return
        time.sleep(0.5)


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
    first, then = [each for each in log if not each.partition], [each for each in log if each.partition]
    return History(2, {1, 2}, {3}, set(), [sorted(log)], log, assignments=[first[:1], first[1:], then])


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
    ("poll-skip", lambda history: drop(history.assignments[1], 0)),
    ("poll-skip", lambda history: drop(history.assignments, 0)),
    ("unseen", lambda history: drop(history.assignments[1], -1)),
    ("non-monotonic poll", lambda history: history.assignments[0].append(history.assignments[0][0])),
    ("inconsistent offsets", lambda history: history.assignments.append([replace_number(history.log[0])])),
]


def drop(rows: list[Any], at: int) -> None:
    del rows[at]


def replace_number(seen: Seen) -> Seen:
    return seen._replace(number=seen.number + 1)


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=[name for name, _ in BAD])
def test_each_anomaly_is_found(name: str, spoil: Callable[[History], None]) -> None:
    history = replace(whole())
    spoil(history)
    assert name in anomalies(history)
