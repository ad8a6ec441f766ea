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

    def is_majority(self, replica_ids: Iterable[ReplicaId]) -> bool:
        return len(self.voters.intersection(replica_ids)) * 2 > len(self.voters)

    def with_learner(self, replica_id: ReplicaId) -> ReplicaSet:
        if replica_id in self.everyone:
            raise InvalidInputError(f"{replica_id} belongs to the group already", replica_id=replica_id)
        return replace(self, learners=self.learners | {replica_id})

    def with_voter(self, replica_id: ReplicaId) -> ReplicaSet:
        if replica_id not in self.learners:
            raise InvalidInputError(f"{replica_id} is not a learner; add it as one first", replica_id=replica_id)
        return replace(self, voters=self.voters | {replica_id}, learners=self.learners - {replica_id})

    def without(self, replica_id: ReplicaId) -> ReplicaSet:
        if replica_id not in self.everyone:
            raise InvalidInputError(f"{replica_id} does not belong to the group", replica_id=replica_id)
        if self.voters == {replica_id}:
            raise InvalidInputError(
                f"{replica_id} is the last voter; a group without voters could never decide", replica_id=replica_id
            )
        return replace(self, voters=self.voters - {replica_id}, learners=self.learners - {replica_id})

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
