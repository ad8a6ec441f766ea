"""Requests that wait: found by what they wait for, by their client, by their deadline, and once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rayqueue.replica.parking import Parking


@dataclass(frozen=True, eq=False)
class Waiting:
    client: int
    keys: tuple[int, ...]
    deadline_s: float


numbers = st.integers(0, 4)


class ParkingModel(RuleBasedStateMachine):
    """The same as a plain list that is looked through."""

    def __init__(self) -> None:
        super().__init__()
        self.parking: Parking[Waiting] = Parking()
        self.model: list[Waiting] = []
        self.now_s = 100.0

    @rule(client=numbers, keys=st.lists(numbers, min_size=1, unique=True), wait_s=st.floats(0.0, 3.0))
    def add(self, client: int, keys: list[int], wait_s: float) -> None:
        waiter = Waiting(client, tuple(keys), self.now_s + wait_s)
        self.parking.add(waiter)
        self.model.append(waiter)

    @rule(keys=st.lists(numbers, max_size=3))
    def take(self, keys: list[int]) -> None:
        self.taken(self.parking.take(keys), [each for each in self.model if set(keys) & set(each.keys)])

    @rule(client=numbers)
    def take_client(self, client: int) -> None:
        self.taken(self.parking.take_client(client), [each for each in self.model if each.client == client])

    @rule(passed_s=st.floats(0.0, 1.0))
    def pass_time(self, passed_s: float) -> None:
        self.now_s += passed_s
        expired = self.parking.take_expired(self.now_s)
        assert all(each.deadline_s <= self.now_s for each in expired)  # never early
        late = [each for each in self.model if each.deadline_s < self.now_s - 0.01]
        assert set(late) <= set(expired)
        self.taken(expired, expired)

    def taken(self, found: list[Waiting], expected: list[Waiting]) -> None:
        assert len(found) == len(set(found))
        assert set(found) == set(expected)
        self.model = [each for each in self.model if each not in set(found)]

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert len(self.parking) == len(self.model)
        if self.model:
            assert self.parking.next_deadline_s <= min(each.deadline_s for each in self.model) + 0.01

    def teardown(self) -> None:
        self.taken(self.parking.take_all(), self.model)
        assert len(self.parking) == 0
        assert not self.parking._by_key
        assert not self.parking._by_client


ParkingModel.TestCase.settings = settings(deadline=None, max_examples=60)
TestParking = ParkingModel.TestCase
