"""Who belongs to a Raft group, as a value.

A membership entry holds the whole membership after it, not a difference: the
one in force is simply the last one in the log, and dropping an entry brings
the one before it back.

Only single-step changes are allowed (Ongaro's thesis, §4.1): two memberships
that differ by one voter always share a majority member.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from rayqueue.errors import InvalidInputError, InvariantBrokenError
from rayqueue.ids import NodeId


@dataclass(frozen=True, slots=True)
class Members:
    """Voters decide; learners only receive the log. Nobody is both."""

    voters: frozenset[NodeId]
    learners: frozenset[NodeId] = frozenset()

    @classmethod
    def of(cls, voters: Iterable[str], learners: Iterable[str] = ()) -> Members:
        return cls(frozenset(map(NodeId, voters)), frozenset(map(NodeId, learners)))

    @property
    def everyone(self) -> frozenset[NodeId]:
        return self.voters | self.learners

    def is_majority(self, nodes: Iterable[NodeId]) -> bool:
        return len(self.voters.intersection(nodes)) * 2 > len(self.voters)

    def with_learner(self, node: NodeId) -> Members:
        if node in self.everyone:
            raise InvalidInputError(f"{node} belongs to the group already", node=node)
        return Members(self.voters, self.learners | {node})

    def with_voter(self, node: NodeId) -> Members:
        if node not in self.learners:
            raise InvalidInputError(f"{node} is not a learner; add it as one first", node=node)
        return Members(self.voters | {node}, self.learners - {node})

    def without(self, node: NodeId) -> Members:
        if node not in self.everyone:
            raise InvalidInputError(f"{node} does not belong to the group", node=node)
        if self.voters == {node}:
            raise InvalidInputError(f"{node} is the last voter; a group without voters could never decide", node=node)
        return Members(self.voters - {node}, self.learners - {node})

    def encode(self) -> bytes:
        return json.dumps({"voters": sorted(self.voters), "learners": sorted(self.learners)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Members:
        try:
            fields = json.loads(data)
            return cls.of(fields["voters"], fields["learners"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # It was committed by a majority and passed its checksum: only a bug can have written it.
            raise InvariantBrokenError(f"a membership entry cannot be read: {error}") from error
