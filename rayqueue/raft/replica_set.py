"""The membership of a Raft group, as a value: voters and learners.

A membership entry holds the whole membership after it, not a difference: the
one in force is simply the last one in the log, and dropping an entry brings
the one before it back.

Only single-step changes are allowed (Ongaro's thesis, §4.1): two memberships
that differ by one voter always have a voter in common in their majorities.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rayqueue.errors import InvalidInputError, InvariantBrokenError
from rayqueue.ids import ReplicaId


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Voters decide; learners only receive the log. Nobody is both."""

    voters: frozenset[ReplicaId]
    learners: frozenset[ReplicaId] = frozenset()
    epoch: int = 0
    """How often the group went on without a majority (``rayqueue.raft.recovery``)."""

    @classmethod
    def of(cls, voters: Iterable[str], learners: Iterable[str] = ()) -> ReplicaSet:
        return cls(frozenset(map(ReplicaId, voters)), frozenset(map(ReplicaId, learners)))

    @property
    def everyone(self) -> frozenset[ReplicaId]:
        return self.voters | self.learners

    def is_majority(self, nodes: Iterable[ReplicaId]) -> bool:
        return len(self.voters.intersection(nodes)) * 2 > len(self.voters)

    def with_learner(self, node: ReplicaId) -> ReplicaSet:
        if node in self.everyone:
            raise InvalidInputError(f"{node} belongs to the group already", node=node)
        return replace(self, learners=self.learners | {node})

    def with_voter(self, node: ReplicaId) -> ReplicaSet:
        if node not in self.learners:
            raise InvalidInputError(f"{node} is not a learner; add it as one first", node=node)
        return replace(self, voters=self.voters | {node}, learners=self.learners - {node})

    def without(self, node: ReplicaId) -> ReplicaSet:
        if node not in self.everyone:
            raise InvalidInputError(f"{node} does not belong to the group", node=node)
        if self.voters == {node}:
            raise InvalidInputError(f"{node} is the last voter; a group without voters could never decide", node=node)
        return replace(self, voters=self.voters - {node}, learners=self.learners - {node})

    def encode(self) -> bytes:
        fields = {"voters": sorted(self.voters), "learners": sorted(self.learners)}
        return json.dumps(fields | {"epoch": self.epoch} if self.epoch else fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> ReplicaSet:
        try:
            fields = json.loads(data)
            return replace(cls.of(fields["voters"], fields["learners"]), epoch=int(fields.get("epoch", 0)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # It was committed by a majority and passed its checksum: only a bug can have written it.
            raise InvariantBrokenError(f"a membership entry cannot be read: {error}") from error
