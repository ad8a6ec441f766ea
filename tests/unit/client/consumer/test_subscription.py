"""Positions, partitions and the subscription: nothing skipped, nothing doubled, urgent records first."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayqueue.client.consumer.assigned import AssignedPartition, Plan
from rayqueue.client.consumer.lane import Acks, Lane
from rayqueue.client.consumer.staging import Staging
from rayqueue.client.consumer.subscription import ChangeKind, Subscription
from rayqueue.config import ConsumerSettings
from rayqueue.errors import CorruptBatchError, InvariantBrokenError
from rayqueue.protocol.data import READ_COMMITTED, Cursor, FetchAnswer, FetchedBatch
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record, RecordBatch
from tests.unit.client.consumer.consumer_parts import Shelf, records_of

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


# -- acknowledgements ------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_acks_are_the_longest_prefix(data: st.DataObject) -> None:
    """Against the obvious model: a list of what was handed out, and a set of what is done."""
    acks = Acks()
    handed: list[int] = []
    done: set[int] = set()
    end = 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["hand", "ack", "before"])):
            case "hand":
                start = end + data.draw(st.integers(0, 3))
                end = start + data.draw(st.integers(1, 5))
                acks.hand(start, end)
                handed += range(start, end)
            case "ack":
                offset = data.draw(st.integers(0, end + 1))
                assert acks.ack(offset) == (offset in handed and offset not in done)
                done |= {offset} & set(handed)
            case _:
                offset = data.draw(st.integers(0, end + 1))
                acks.ack_before(offset)
                done |= {each for each in handed if each < offset}
        assert acks.first_open == next((each for each in handed if each not in done), None)


def test_a_lane_takes_each_record_once() -> None:
    lane = Lane(0, 5)
    assert lane.received(3, 4, b"x" * 10) == 10  # holds the cursor: 5 and 6 are new
    assert lane.received(3, 4, b"x" * 10) == 0
    assert (lane.position, lane.cursor, lane.chunks[0].start) == (5, 7, 5)
    lane.passed(20)
    assert (lane.position, lane.cursor, lane.committable) == (5, 20, 5)
    lane.take(lane.chunks[0], 7)
    assert (lane.position, lane.committable) == (20, 5)
    lane.acks.ack(6)
    lane.acks.ack(5)
    assert lane.committable == 20


# -- one partition ---------------------------------------------------------------------


def begun(lanes: int = 1, *, offset: int = 0, prefetch_bytes: int = 1 << 20) -> tuple[Subscription, AssignedPartition]:
    subscription = Subscription(ConsumerSettings(prefetch_bytes=prefetch_bytes, fetch_bytes=1 << 20))
    assigned = AssignedPartition(P0, 1)
    subscription.add(assigned)
    subscription.begin(assigned, dict.fromkeys(range(lanes), offset), {})
    return subscription, assigned


def fill(subscription: Subscription, assigned: AssignedPartition, shelf: Shelf) -> None:
    """Fetch until there is nothing new, or no room."""
    for _ in range(100):
        plan = subscription.plan(assigned)
        if plan is None:
            return
        answer = shelf.fetch(plan.request)
        subscription.received(assigned, plan, answer)
        subscription.ended(assigned, plan)
        if not answer.batches:
            return


def drain(subscription: Subscription, most: int = 10_000) -> list[Record]:
    found: list[Record] = []
    while len(found) < most:
        taken = subscription.take(most - len(found), records_of)
        if taken is None:
            return found
        found += taken[1]
    return found


def test_one_fetch_is_under_way_per_lane() -> None:
    subscription, assigned = begun(lanes=3)
    plan = subscription.plan(assigned)
    assert plan is not None
    assert [cursor.lane for cursor in plan.request.cursors] == [2, 1, 0]
    assert subscription.plan(assigned) is None
    subscription.ended(assigned, plan)
    assert subscription.plan(assigned) is not None


def test_an_answer_from_before_a_seek_is_ignored() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(10)
    old = subscription.plan(assigned)
    assert old is not None
    subscription.seek(P0, {0: 7})
    new = subscription.plan(assigned)
    assert new is not None
    assert new.request.cursors[0].offset == 7
    subscription.received(assigned, old, shelf.fetch(old.request))
    subscription.ended(assigned, old)
    assert subscription.take(10, records_of) is None
    assert subscription.plan(assigned) is None, "the end of the old fetch does not end the new one"
    subscription.received(assigned, new, shelf.fetch(new.request))
    assert [record.offset for record in drain(subscription)] == [7, 8, 9]


def test_fetching_pauses_when_enough_waits_and_goes_on_when_it_is_taken() -> None:
    subscription, assigned = begun(prefetch_bytes=1)
    shelf = Shelf()
    shelf.append(3)
    shelf.append(3)
    asked: list[None] = []
    subscription.on_room = lambda: asked.append(None)
    plan = subscription.plan(assigned)
    assert plan is not None
    answer = shelf.fetch(plan.request)
    subscription.received(assigned, plan, answer._replace(batches=answer.batches[:1]))
    subscription.ended(assigned, plan)
    assert subscription.plan(assigned) is None
    assert len(drain(subscription, 2)) == 2
    assert not asked, "the rest of the batch is still there"
    assert len(drain(subscription, 2)) == 1
    assert asked
    assert subscription.total_bytes == assigned.buffered_bytes == 0
    assert subscription.plan(assigned) is not None


def test_urgent_records_are_asked_for_and_handed_out_before_a_full_memory_of_others() -> None:
    subscription, assigned = begun(lanes=3, prefetch_bytes=1)
    shelf = Shelf(3)
    shelf.append(100)
    fill(subscription, assigned, shelf)
    watch = subscription.plan(assigned)
    assert watch is not None
    assert [cursor.lane for cursor in watch.request.cursors] == [2, 1]
    assert drain(subscription, 10)[-1].offset == 9
    urgent = shelf.append(2, lane=1)
    subscription.received(assigned, watch, shelf.fetch(watch.request))
    assert [record.offset for record in drain(subscription, 4)] == [urgent, urgent + 1, 10, 11]


def test_a_lane_without_records_moves_on_with_the_others() -> None:
    subscription, assigned = begun(lanes=3)
    shelf = Shelf(3)
    for _ in range(5):
        shelf.append(10)
    fill(subscription, assigned, shelf)
    assert [lane.cursor for lane in assigned.lanes] == [50, 50, 50]
    drain(subscription)
    subscription.ack_handed()
    assert assigned.due() == {0: 50, 1: 50, 2: 50}


def test_a_gap_in_a_partition_of_one_lane_is_an_error_not_a_skip() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(3)
    shelf.append(3)
    plan = subscription.plan(assigned)
    assert plan is not None
    answer = shelf.fetch(plan.request)
    with pytest.raises(InvariantBrokenError):
        subscription.received(assigned, plan, answer._replace(batches=answer.batches[1:]))


def test_a_damaged_batch_is_an_error_and_stays_where_it_is() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(3)
    plan = subscription.plan(assigned)
    assert plan is not None
    base, records, payload = shelf.fetch(plan.request).batches[0]
    damaged = FetchedBatch(base, records, memoryview(bytes(payload[:-1]) + b"!"))
    subscription.received(assigned, plan, FetchAnswer([damaged], 3, 0))
    for _ in range(2):
        with pytest.raises(CorruptBatchError):
            subscription.take(10, records_of)
    assert assigned.positions() == {0: 0}


def test_partitions_take_turns() -> None:
    subscription, first = begun()
    second = AssignedPartition(P1, 1)
    subscription.add(second)
    subscription.begin(second, {0: 0}, {})
    shelves = Shelf(), Shelf()
    for shelf, assigned in zip(shelves, (first, second), strict=True):
        for _ in range(3):
            shelf.append(2)
        fill(subscription, assigned, shelf)
    assert [record.partition for record in drain(subscription)] == [0, 0, 1, 1] * 3


def test_a_paused_partition_is_neither_fetched_nor_handed_out() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(4)
    fill(subscription, assigned, shelf)
    assigned.in_flight.clear()
    assert len(drain(subscription, 1)) == 1
    subscription.pause([P0])
    assert subscription.take(1, records_of) is None
    assert subscription.plan(assigned) is None
    subscription.resume([P0])
    assert [record.offset for record in drain(subscription)] == [1, 2, 3]


# -- record by record --------------------------------------------------------------------


def test_record_by_record_counts_what_was_seen() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(5)
    fill(subscription, assigned, shelf)
    reading = subscription.read()
    assert reading is not None
    reading.index = 3
    subscription.settle(current_done=False)
    assert assigned.committable() == {0: 2}, "the third is still being worked on"
    subscription.settle(current_done=True)
    assert assigned.committable() == {0: 3}
    subscription.asked_for_more()
    assert [record.offset for record in drain(subscription)] == [3, 4], "what was not seen is handed out by a poll"


def test_whoever_reads_record_by_record_looks_up_when_something_is_more_urgent() -> None:
    subscription, assigned = begun(lanes=2)
    shelf = Shelf(2)
    shelf.append(5)
    fill(subscription, assigned, shelf)
    assigned.in_flight.clear()
    reading = subscription.read()
    assert reading is not None
    assert reading.stamp == subscription.stamp
    reading.index = 2
    shelf.append(1, lane=1)
    fill(subscription, assigned, shelf)
    assert reading.stamp != subscription.stamp
    urgent = subscription.read()
    assert urgent is not None
    assert urgent.records[urgent.index].lane == 1
    urgent.index += 1
    again = subscription.read()
    assert again is not None
    assert again.records[again.index].offset == 2


def test_a_partition_that_is_let_go_hands_out_nothing_more() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(5)
    fill(subscription, assigned, shelf)
    drain(subscription, 2)
    late = Plan(assigned.epoch, shelf_request(assigned))
    subscription.let_go(assigned)
    subscription.received(assigned, late, shelf.fetch(late.request))
    assert subscription.take(10, records_of) is None
    assert subscription.total_bytes == 0
    subscription.ack_handed([assigned])
    assert assigned.due() == {0: 2}, "what was handed out before can still be committed"
    subscription.announce(ChangeKind.LOST, [assigned])
    assert subscription.forfeited == {P0}


@pytest.mark.parametrize("explicit", [False, True])
def test_what_the_application_works_on_is_forfeited_unless_it_says_what_is_done(explicit: bool) -> None:
    subscription, assigned = begun()
    subscription.explicit = explicit
    assigned.sent = assigned.committable()
    shelf = Shelf()
    shelf.append(2)
    fill(subscription, assigned, shelf)
    subscription.take(2, records_of)
    subscription.remove(assigned)
    subscription.announce(ChangeKind.LOST, [assigned])
    # A commit that comes now is about these records, and must not seem to succeed.
    assert subscription.forfeited == (set() if explicit else {P0})


def shelf_request(assigned: AssignedPartition) -> Any:
    from rayqueue.protocol.data import Cursor, FetchRequest

    return FetchRequest(tuple(Cursor(lane.number, lane.cursor) for lane in assigned.lanes), 1 << 20)


# -- everything at once --------------------------------------------------------------------


class Reader:
    """A consumer's state over one shelf, driven by dice, beside a model of what must hold."""

    def __init__(self, shelf: Shelf, rng: Random, committed: dict[int, int], explicit: bool) -> None:
        self.shelf = shelf
        self.rng = rng
        self.explicit = explicit
        self.subscription = Subscription(
            ConsumerSettings(
                prefetch_bytes=rng.choice([1, 300, 100_000]), fetch_bytes=rng.choice([1, 1200, 2500, 100_000])
            ),
            explicit=explicit,
        )
        self.assigned = AssignedPartition(P0, 1, 1)
        self.subscription.add(self.assigned)
        start = {lane: committed.get(lane, 0) for lane in range(shelf.lanes)}
        self.subscription.begin(self.assigned, start, committed)
        self.next = start  # what each lane must hand out next
        self.handed: list[Record] = []
        self.done: set[int] = set()
        self.under_way: list[tuple[Plan, FetchAnswer]] = []

    def fetch(self) -> None:
        plan = self.subscription.plan(self.assigned)
        if plan is not None:
            self.under_way.append((plan, self.shelf.fetch(plan.request)))

    def answer(self) -> None:
        """Any of those under way; some are lost."""
        if self.under_way:
            plan, answer = self.under_way.pop(self.rng.randrange(len(self.under_way)))
            if self.rng.random() < 0.8:
                self.subscription.received(self.assigned, plan, answer)
            self.subscription.ended(self.assigned, plan)

    def poll(self) -> None:
        self.subscription.asked_for_more()
        if not self.explicit:
            self.done |= {record.offset for record in self.handed}
        for record in drain(self.subscription, self.rng.choice([1, 3, 50])):
            self.take(record)

    def iterate(self) -> None:
        self.subscription.asked_for_more()
        if not self.explicit:
            self.done |= {record.offset for record in self.handed}
        reading = self.subscription.read()
        if reading is None:
            return
        for _ in range(self.rng.randrange(1, 6)):
            if reading.index >= len(reading.records) or reading.stamp != self.subscription.stamp:
                break
            reading.index += 1
            if not self.explicit:
                self.done |= {record.offset for record in self.handed}
            self.take(reading.records[reading.index - 1])
            if self.rng.random() < 0.3:
                self.subscription.settle(current_done=False)
                self.check()
        if self.rng.random() < 0.5:
            self.subscription.settle(current_done=False)

    def take(self, record: Record) -> None:
        lane = record.lane
        wanted = next(iter(self.shelf.offsets(lane, self.next[lane])))
        assert record.offset == wanted, "skipped or doubled"
        self.next[lane] = record.offset + 1
        self.handed.append(record)

    def ack(self) -> None:
        if self.explicit and self.handed:
            record = self.rng.choice(self.handed)
            self.subscription.ack(P0, record.lane, record.offset)
            self.done.add(record.offset)

    def seek(self) -> None:
        offset = self.rng.randrange(self.shelf.end + 1)
        self.subscription.seek(P0, dict.fromkeys(range(self.shelf.lanes), offset))
        self.next = dict.fromkeys(range(self.shelf.lanes), offset)
        self.handed.clear()
        self.done.clear()

    def check(self) -> None:
        """Whoever begins at what can be committed misses nothing that is not done."""
        self.subscription.settle(current_done=False)
        committable = self.assigned.committable()
        for lane, offset in committable.items():
            open_here = [each.offset for each in self.handed if each.lane == lane and each.offset not in self.done]
            first = min([*open_here, *self.shelf.offsets(lane, self.next[lane])], default=None)
            assert first is None or offset <= first, "a record would be skipped"
            done_here = [each.offset for each in self.handed if each.lane == lane and each.offset in self.done]
            prefix = [each for each in done_here if not open_here or each < min(open_here)]
            assert not prefix or offset > max(prefix), "a record that is done would come again"
        assert self.subscription.total_bytes == self.assigned.buffered_bytes
        assert self.assigned.buffered_bytes == sum(
            chunk.size_bytes for lane in self.assigned.lanes for chunk in lane.chunks
        )


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans(), st.booleans())
def test_nothing_is_skipped_or_doubled(seed: int, lanes: int, explicit: bool, seeks: bool) -> None:
    rng = Random(seed)
    shelf = Shelf(lanes)
    committed: dict[int, int] = {}
    reader = Reader(shelf, rng, committed, explicit)
    actions = ["append", "fetch", "fetch", "answer", "answer", "poll", "iterate", "ack", "ack", "commit", "restart"]
    for _ in range(rng.randrange(20, 80)):
        match rng.choice([*actions, *(["seek"] if seeks else [])]):
            case "append":
                shelf.append(rng.randrange(1, 6), rng.randrange(lanes))
            case "commit":
                committed = reader.assigned.committable()
            case "restart":  # as if killed: only what was committed is left
                reader = Reader(shelf, rng, committed, explicit)
            case action:
                getattr(reader, action)()
        reader.check()
    # Everything heals: all that was not committed comes, once and in order.
    reader = Reader(shelf, rng, committed, explicit=False)
    for _ in range(10 * (shelf.end + 2)):
        reader.fetch()
        while reader.under_way:
            plan, answer = reader.under_way.pop()
            reader.subscription.received(reader.assigned, plan, answer)
            reader.subscription.ended(reader.assigned, plan)
        reader.poll()
    for lane in range(lanes):
        expected = shelf.offsets(lane, committed.get(lane, 0))
        assert [each.offset for each in reader.handed if each.lane == lane] == expected
    reader.subscription.ack_handed()
    assert all(
        offset >= max(shelf.offsets(lane), default=-1) + 1 for lane, offset in reader.assigned.committable().items()
    )


def test_an_answer_that_was_cut_moves_no_lane_past_what_it_did_not_show() -> None:
    """The lower lane has more before the offset that the higher one has reached: that must still come."""
    subscription, assigned = begun(lanes=2)
    shelf = Shelf(2)
    for _ in range(3):
        shelf.append(2, lane=0)
    shelf.append(2, lane=1)
    plan = subscription.plan(assigned)
    assert plan is not None
    answer = shelf.fetch(plan.request)
    assert [batch.base_offset for batch in answer.batches] == [6, 0, 2, 4]
    subscription.received(assigned, plan, answer._replace(batches=answer.batches[:2]))
    subscription.ended(assigned, plan)
    assert [lane.cursor for lane in assigned.lanes] == [2, 8]
    fill(subscription, assigned, shelf)
    assert [record.offset for record in drain(subscription)] == [6, 7, 0, 1, 2, 3, 4, 5]


# -- of transactions, what is committed ---------------------------------------------------


def test_only_the_answer_says_how_far_a_lane_is_stable() -> None:
    """Lane 1 has an open transaction at 3: what lane 0 has behind it must not move lane 1 past it."""
    subscription = Subscription(ConsumerSettings(), committed=True)
    assigned = AssignedPartition(P0, 1)
    subscription.begin(assigned, {0: 0, 1: 0}, {})
    subscription.add(assigned)
    plan = subscription.plan(assigned)
    assert plan is not None
    assert plan.request.flags == READ_COMMITTED
    batch = RecordBatch.encode([b"a", b"b"], timestamps=1)
    answer = FetchAnswer([FetchedBatch(6, 2, memoryview(batch))], 8, 0, (Cursor(1, 3), Cursor(0, 12)))
    subscription.received(assigned, plan, answer)
    assert [lane.cursor for lane in assigned.lanes] == [12, 3]
    assert [record.value for record in drain(subscription)] == [b"a", b"b"]
    assert assigned.positions() == {0: 12, 1: 3}, "past what is aborted behind the batch"


def test_a_rewind_goes_back_behind_the_last_transaction() -> None:
    subscription, assigned = begun()
    shelf = Shelf()
    shelf.append(10)
    fill(subscription, assigned, shelf)
    taken = subscription.take(4, lambda *_: None)
    assert taken is not None
    subscription.ack_handed()
    staging = Staging("g", subscription)
    assert [part.offsets for part in staging.parts] == [{0: 4}]
    staging.committed()
    assert Staging("g", subscription).parts == []
    drain(subscription)
    subscription.rewind()
    assert assigned.positions() == {0: 4}
    assert subscription.total_bytes == assigned.buffered_bytes == 0
    subscription.rewind()  # once more changes nothing
    assert assigned.positions() == {0: 4}
