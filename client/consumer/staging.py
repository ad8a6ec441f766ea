"""Positions of a consumer on their way into a transaction.

What was polled and is in no committed transaction is *open*. A transaction takes
all of it along, or is told that some went to another member with its partition:
then its results would be there twice, and it must be aborted. After an abort the
consumer goes back (``Subscription.rewind``).
"""

from __future__ import annotations

from typing import NamedTuple

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.errors import StaleGenerationError


class StagedPartition(NamedTuple):
    assigned: AssignedPartition
    epoch: int
    """Of the assignment, which a seek ends."""
    offsets: dict[int, int]


class Staging:
    """All that a consumer has polled, as of when this was made, in the I/O thread, where partitions are lost."""

    def __init__(self, group: str, subscription: Subscription) -> None:
        self.group = group
        self._subscription = subscription
        forfeited = subscription.take_forfeited()
        if forfeited:
            names = ", ".join(map(str, sorted(forfeited)))
            raise StaleGenerationError(f"{names} went to another member with what was polled of it: abort")
        self.parts: list[StagedPartition] = []
        with subscription.lock:
            for assigned in subscription.assigned.values():
                offsets = assigned.due() if assigned.begun else None
                if offsets is not None:
                    self.parts.append(StagedPartition(assigned, assigned.epoch, offsets))

    def committed(self) -> None:
        """The transaction is: this is where the group goes on."""
        with self._subscription.lock:
            for assigned, epoch, offsets in self.parts:
                assigned.sent = offsets
                if assigned.epoch == epoch:
                    assigned.origin = offsets
