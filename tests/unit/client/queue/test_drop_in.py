"""``rayqueue.Queue`` does what ``ray.util.queue.Queue`` of Ray 2.60 does: its tests' cases, on the queue in memory."""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray.util.queue
from ray.exceptions import RayActorError

from rayqueue import Empty, Full, Queue
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    OutcomeUnknownError,
    OversizedBatchError,
    OversizedRecordError,
)
from rayqueue.partition.jobs.commands import Request, Settle, end_workers_command, lease_command, settle_command
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


def test_the_interface_is_rays() -> None:
    theirs = {name for name in dir(ray.util.queue.Queue) if not name.startswith("_")}
    assert theirs <= set(dir(Queue))
    for name in theirs:
        wanted = inspect.signature(getattr(ray.util.queue.Queue, name)).parameters.values()
        found = inspect.signature(getattr(Queue, name)).parameters.values()
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in wanted]
    made = list(inspect.signature(Queue).parameters.values())
    assert [(each.name, each.default) for each in made[:2]] == [("maxsize", 0), ("actor_options", None)]
    assert all(each.kind is each.KEYWORD_ONLY for each in made[2:])
    assert issubclass(Empty, queue.Empty)
    assert issubclass(Full, queue.Full)


def test_first_in_first_out(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    for item in range(10):
        q.put(item)
    assert q.qsize() == len(q) == q.size() == 10
    assert [q.get() for _ in range(10)] == list(range(10))
    assert q.empty()
    assert not q.full()


def test_get(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    q.put(0)
    assert q.get(block=False) == 0
    q.put(1)
    assert q.get(timeout=0.2) == 1
    with pytest.raises(ValueError, match="non-negative"):
        q.get(timeout=-1)
    with pytest.raises(Empty):
        q.get_nowait()
    began_s = time.monotonic()
    with pytest.raises(queue.Empty):
        q.get(timeout=0.2)
    assert 0.19 <= time.monotonic() - began_s < 5


def test_put_into_a_full_queue(rq: memory.MemoryQueue) -> None:
    q = Queue(1, rq=rq)
    q.put(0, block=False)
    assert q.full()
    assert q.get() == 0
    q.put(1, timeout=0.2)
    assert q.get() == 1
    with pytest.raises(ValueError, match="non-negative"):
        q.put(0, timeout=-1)
    q.put(0)
    with pytest.raises(Full):
        q.put_nowait(1)
    began_s = time.monotonic()
    with pytest.raises(queue.Full):
        q.put(1, timeout=0.2)
    assert 0.19 <= time.monotonic() - began_s < 5
    assert q.qsize() == 1  # what was refused did not get in later
    assert q.get() == 0
    with pytest.raises(Empty):
        q.get(timeout=0.1)


def test_a_blocked_get_gets_what_is_put(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(q.get()))
    waiting.start()
    time.sleep(0.2)
    assert not found
    q.put("x")
    waiting.join(10)
    assert found == ["x"]


def test_a_blocked_put_gets_in_when_there_is_room(rq: memory.MemoryQueue) -> None:
    q, other = Queue(1, rq=rq, name="one"), Queue(1, rq=rq, name="one")
    q.put(1)
    waiting = threading.Thread(target=other.put, args=(2,))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    with pytest.raises(Full):
        q.put_nowait(3)
    assert q.get() == 1
    waiting.join(10)
    assert not waiting.is_alive()
    assert q.get(timeout=5) == 2


@pytest.mark.parametrize("put", [lambda q: q.put_nowait(3), lambda q: q.put(3, timeout=0)])
def test_who_does_not_wait_is_answered_though_others_of_its_handle_wait(
    rq: memory.MemoryQueue, put: Callable[[Queue], None]
) -> None:
    q = Queue(1, rq=rq)
    q.put(1)
    waiting = threading.Thread(target=q.put, args=(2,), daemon=True)
    waiting.start()
    time.sleep(0.2)
    with ThreadPoolExecutor(1) as pool, pytest.raises(Full):
        pool.submit(put, q).result(10)
    with pytest.raises(Full):
        q.put(4, timeout=0.2)
    assert waiting.is_alive()
    assert q.get(timeout=5) == 1
    waiting.join(10)
    assert q.get(timeout=5) == 2
    put(q)  # there is room again
    assert q.get(timeout=5) == 3


def test_blocked_puts_of_one_handle_get_in_as_they_came(rq: memory.MemoryQueue) -> None:
    q = Queue(1, rq=rq)
    q.put(0)
    threads = []
    for number in range(1, 6):
        threads.append(threading.Thread(target=q.put, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(0.05)
    assert [q.get(timeout=10) for _ in range(6)] == list(range(6))
    for thread in threads:
        thread.join(10)


def test_a_blocked_put_that_is_cancelled_lets_the_next_one_in(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(1, rq=rq))
        await q.put_async(0)
        cancelled = [asyncio.ensure_future(q.put_async(number)) for number in (1, 2)]
        await asyncio.sleep(0.1)
        last = asyncio.ensure_future(q.put_async(3))
        await asyncio.sleep(0.1)
        for each in cancelled:
            each.cancel()
        await asyncio.wait(cancelled)
        await asyncio.sleep(0.1)  # until the I/O thread knows
        assert await q.get_async(timeout=5) == 0
        await asyncio.wait_for(last, 10)
        assert await q.get_async(timeout=5) == 3

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("maxsize", [0, 5000])
def test_what_is_too_large_is_refused_whole_and_at_once(rq: memory.MemoryQueue, maxsize: int) -> None:
    q = Queue(maxsize, rq=rq)
    q.put_nowait_batch([b"x" * 1000] * 1000)
    with pytest.raises(OversizedRecordError):
        q.put(b"x" * 2_000_000)
    with pytest.raises(OversizedRecordError):
        q.put_nowait_batch([b"a", b"x" * 2_000_000, b"c"])
    if maxsize:  # all at once is one batch
        with pytest.raises(OversizedBatchError, match="several batches"):
            q.put_nowait_batch([b"x" * 1000] * 2000)
    else:
        q.put_nowait_batch([b"x" * 1000] * 2000)
    q.put("y")
    assert q.size() == 1001 + (0 if maxsize else 2000)
    small = Queue(maxsize, rq=rq, name="small")
    rq.alter_topic("small", max_record_bytes=100)
    with pytest.raises(OversizedRecordError):
        small.put(b"x" * 200)
    small.put("y")
    assert small.get() == "y"


def test_more_items_than_may_be_leased_are_not_got_at_once(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    q.put_nowait_batch(range(3))
    with pytest.raises(InvalidInputError, match="at most 50000 items"):
        q.get_nowait_batch(50_001)
    with pytest.raises(Empty):
        q.get_nowait_batch(50_000)
    assert q.get_nowait_batch(3) == [0, 1, 2]


def test_many_blocked_clients(rq: memory.MemoryQueue) -> None:
    q = Queue(2, rq=rq)
    found: list[Any] = []
    getting = [threading.Thread(target=lambda: found.append(q.get())) for _ in range(12)]
    putting = [threading.Thread(target=q.put, args=(number,)) for number in range(12)]
    for thread in (*getting, *putting):
        thread.start()
    for thread in (*getting, *putting):
        thread.join(30)
    assert sorted(found) == list(range(12))
    assert q.empty()


def test_batches_are_all_or_nothing(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    q.put_nowait_batch([])
    with pytest.raises(Empty):
        q.get_nowait_batch(1)
    q.put_nowait_batch(range(5))
    assert q.get_nowait_batch(0) == []
    with pytest.raises(Empty):
        q.get_nowait_batch(6)
    assert q.get_nowait_batch(3) == [0, 1, 2]
    assert q.qsize() == 2
    with pytest.raises(TypeError):
        q.put_nowait_batch(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        q.get_nowait_batch("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonnegative"):
        q.get_nowait_batch(-1)
    small = Queue(3, rq=rq)
    small.put(0)
    with pytest.raises(Full):
        small.put_nowait_batch([1, 2, 3])
    with pytest.raises(Full):
        small.put_nowait_batch(list(range(4)))
    small.put_nowait_batch([1, 2])
    assert small.get_nowait_batch(3) == [0, 1, 2]


def test_any_item(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq)
    items = [None, {"a": (1, 2)}, b"", lambda x: x + 1, ValueError("x"), 0.5, [None]]
    for item in items:
        q.put(item)
    found = [q.get() for _ in items]
    assert found[:3] == items[:3]
    assert found[3](1) == 2
    assert repr(found[4]) == repr(items[4])
    assert found[5:] == [0.5, [None]]


def test_negative_maxsize_is_no_limit(rq: memory.MemoryQueue) -> None:
    q = Queue(-1, rq=rq)
    q.put_nowait_batch([1, 2, 3])
    assert not q.full()
    assert q.get_nowait_batch(3) == [1, 2, 3]


def test_async_methods(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(1, rq=rq))
        waiting = asyncio.create_task(q.get_async())
        await asyncio.sleep(0.1)
        await q.put_async("a")
        assert await asyncio.wait_for(waiting, 10) == "a"
        with pytest.raises(Empty):
            await q.get_async(block=False)
        with pytest.raises(Empty):
            await q.get_async(timeout=0.05)
        with pytest.raises(ValueError, match="non-negative"):
            await q.get_async(timeout=-1)
        await q.put_async(1, timeout=1)
        with pytest.raises(Full):
            await q.put_async(2, block=False)
        with pytest.raises(Full):
            await q.put_async(2, timeout=0.05)
        assert await q.get_async() == 1

    asyncio.run(main())


def test_a_get_that_is_cancelled_loses_no_item(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(rq=rq))
        waiting = asyncio.create_task(q.get_async())
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await q.put_async("kept")
        assert await q.get_async(timeout=5) == "kept"

    asyncio.run(main())


@pytest.mark.slow
def test_shutdown_ends_it_for_everybody(rq: memory.MemoryQueue) -> None:
    q, other = Queue(rq=rq, name="ends"), Queue(rq=rq, name="ends")
    q.put(1)
    assert q.actor is not None
    q.shutdown()
    q.shutdown(force=True)
    assert q.actor is None
    with pytest.raises(ClosedError):
        q.get()
    with pytest.raises(RayActorError, match="ends was shut down") as ended:  # as with Ray, whose actor is dead then
        other.get(timeout=1)
    again = copy.copy(ended.value)  # by its __reduce__, as Ray sends it
    assert isinstance(again, ClosedError)
    assert (str(again), again.error_msg) == (str(ended.value), str(ended.value))
    assert [topic.name for topic in rq.topics()] == []


def test_a_named_queue_keeps_its_items_and_a_leader_may_change(rq: memory.MemoryQueue) -> None:
    q = Queue(3, rq=rq, name="kept")
    q.put_nowait_batch([1, 2])
    rq.change_leader("kept")
    again = Queue(3, rq=rq, name="kept")
    assert again.get() == 1
    rq.disconnect("kept")
    q.put(3)
    wait_for(lambda: again.qsize() == 2, "both to be there")
    assert [again.get(), again.get()] == [2, 3]


def test_a_put_whose_answer_is_lost_is_there_once(rq: memory.MemoryQueue) -> None:
    q = Queue(5, rq=rq, name="once")
    q.put(0)
    rq.fail_next("append", OutcomeUnknownError("lost"), topic="once", carried_out=True)
    q.put(1)
    assert q.get_nowait_batch(2) == [0, 1]
    assert q.empty()


# -- items that a get has acknowledged, or only leased, and does not return ---------------------------


class _Trouble:
    """What happens at the leader when it is asked something of this kind for the first time."""

    def __init__(self, rq: memory.MemoryQueue, topic: str, kind: str, *, nth: int = 1) -> None:
        self.group: Any
        (self.group,) = rq._queue.cluster.partitions(topic, 0)
        self.jobs = self.group._service.jobs
        self.held: list[Any] = []
        self.came = threading.Event()
        self._rq = rq
        self._kind = kind
        self._left = nth
        self._call = self.jobs.call
        self.jobs.call = self._meet
        self.now: Callable[[], None] = lambda: None
        """Before it is carried out."""
        self.holds = False

    def _meet(self, client: int, request: int, call: Any) -> None:
        told = [each.kind for each in getattr(call, "settlements", ())]
        kind = {"LeaseJobs": "lease", "AckAll": "ack"}.get(type(call).__name__, told[0] if told else "")
        self._left -= kind == self._kind
        if kind == self._kind and self._left <= 0 and (self.holds or not self.came.is_set()):
            self.came.set()
            self.now()
            if self.holds:
                self.held.append((client, request, call))
                return
        self._call(client, request, call)

    def go_on(self) -> None:
        self.holds = False
        held, self.held = self.held, []

        def carry_out(_: Any) -> None:
            for each in held:
                self._call(*each)
            self.group._turn()

        self._rq._do(carry_out)

    def apply(self, command: bytes) -> Any:
        return self.group.apply(command)

    def end_leases(self) -> None:
        """As when the connection breaks."""
        self.apply(end_workers_command(self.jobs.time.now_ms(), sorted(self.jobs._queue.leases.workers())))

    def lease(self, count: int) -> int:
        """To somebody else. The token."""
        (grant,) = self.apply(lease_command(self.jobs.time.now_ms(), [Request("other", 1, count, count, 0)]))
        return int(grant.token)

    @property
    def leased(self) -> int:
        return int(self.jobs._queue.counts.leased)


def test_of_a_batch_of_which_a_part_is_somebody_elses_nothing_is_gone(rq: memory.MemoryQueue) -> None:
    q = Queue(rq=rq, name="batch")
    q.put_nowait_batch(range(10))
    trouble = _Trouble(rq, "batch", "ack")

    def lose() -> None:
        trouble.end_leases()
        trouble.lease(1)

    trouble.now = lose
    with pytest.raises(Empty):  # the ten are nine
        q.get_nowait_batch(10)
    assert q.get_nowait_batch(9) == list(range(1, 10))


def test_of_a_batch_of_several_leases_of_which_one_is_lost_nothing_is_gone() -> None:
    settings = Settings(consumer={"fetch_bytes": 1024})
    with memory.connect(settings=settings) as rq:
        q = Queue(rq=rq, name="batch")
        items = [bytes([number]) * 700 for number in range(4)]
        q.put_nowait_batch(items)
        trouble = _Trouble(rq, "batch", "ack")
        token = 0

        def lose() -> None:
            nonlocal token
            (*_, last) = sorted(trouble.jobs._queue.leases.holding(), key=lambda lease: lease.token)
            ((first, count, _),) = last.runs
            back = Settle(last.worker, "release", last.token, ((first, count),), -1, 0, "", "", None)
            trouble.apply(settle_command(trouble.jobs.time.now_ms(), [back]))
            token = trouble.lease(1)

        trouble.now = lose
        with pytest.raises(Empty):
            q.get_nowait_batch(4)
        assert q.get_nowait_batch(3) == items[:3]


def test_a_batch_whose_second_lease_fails_is_given_back() -> None:
    with memory.connect(settings=Settings(consumer={"fetch_bytes": 1024})) as rq:
        q = Queue(rq=rq, name="batch")
        q.put_nowait_batch([b"x" * 700, b"y" * 700])
        trouble = _Trouble(rq, "batch", "lease", nth=2)

        def fail() -> None:
            raise InvalidInputError("no")

        trouble.now = fail
        with pytest.raises(InvalidInputError):
            q.get_nowait_batch(2)
        wait_for(lambda: trouble.leased == 0, "the first part to be there again")
        assert q.get_nowait_batch(2) == [b"x" * 700, b"y" * 700]


def test_a_get_that_is_cancelled_while_it_acknowledges_loses_no_item(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(rq=rq, name="acked"))
        for number in range(3):
            await q.put_async(number)
        trouble = _Trouble(rq, "acked", "ack")
        trouble.holds = True
        task = asyncio.create_task(q.get_async())
        await asyncio.to_thread(trouble.came.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(trouble.go_on)
        await asyncio.to_thread(wait_for, lambda: trouble.leased == 0, "the acknowledgement")
        assert await asyncio.to_thread(q.size) == 3
        assert [await q.get_async(timeout=5) for _ in range(3)] == [0, 1, 2]

    asyncio.run(main())


def test_an_item_that_is_on_its_way_to_a_get_that_is_cancelled_is_the_next_ones(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(rq=rq, name="late"))
        await q.put_async("kept")
        trouble = _Trouble(rq, "late", "ack")
        trouble.holds = True
        task = asyncio.create_task(q.get_async())
        await asyncio.to_thread(trouble.came.wait, 10)
        trouble.go_on()  # from here on this loop hears of nothing
        wait_for(lambda: not _finishing_gets(rq), "the item to be on its way")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await q.get_async(timeout=5) == "kept"

    asyncio.run(main())


def _finishing_gets(rq: memory.MemoryQueue) -> bool:
    """Whether the I/O thread has something to do for a get."""
    return rq._do(lambda _: any("Get" in str(task.get_coro()) for task in asyncio.all_tasks()))


def test_a_get_that_waits_is_given_what_another_one_has_left(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        q = await asyncio.to_thread(lambda: Queue(rq=rq, name="left"))
        await q.put_async("left")
        trouble = _Trouble(rq, "left", "ack")
        trouble.holds = True
        first, second = asyncio.create_task(q.get_async()), asyncio.create_task(q.get_async())
        await asyncio.to_thread(trouble.came.wait, 10)
        first.cancel()
        second_first = asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await second_first
        (left,) = {first, second} - done
        await asyncio.to_thread(trouble.go_on)
        assert await asyncio.wait_for(left, 5) == "left"

    asyncio.run(main())


def test_an_acknowledgement_whose_answer_takes_too_long_loses_no_item() -> None:
    settings = Settings(client={"call_timeout_ms": 300, "retry_min_ms": 1, "retry_max_ms": 5})
    with memory.connect(settings=settings) as rq:
        q = Queue(rq=rq, name="slow")
        q.put("kept")
        trouble = _Trouble(rq, "slow", "ack")
        trouble.holds = True
        with pytest.raises(OutcomeUnknownError):
            q.get()
        trouble.go_on()
        assert q.get(timeout=10) == "kept"


def test_a_lease_whose_answer_is_lost_is_given_back_at_once() -> None:
    settings = Settings(client={"call_timeout_ms": 300, "retry_min_ms": 1, "retry_max_ms": 5})
    with memory.connect(settings=settings) as rq:
        q = Queue(rq=rq, name="unheard")
        q.put("kept")
        trouble = _Trouble(rq, "unheard", "lease")
        reply, trouble.jobs._reply = trouble.jobs._reply, lambda *_: None  # answers get lost
        with pytest.raises(OutcomeUnknownError):
            q.get()
        trouble.jobs._reply = reply
        assert trouble.jobs._queue.counts.next_token > 1  # there was a lease
        wait_for(lambda: trouble.leased == 0, "it to be there again")
        assert q.get(timeout=5) == "kept"
