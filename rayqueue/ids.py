"""The names of things, as types.

Owns the ``NewType`` of every identifier that crosses a module boundary, so
that an offset cannot be passed where a Raft index is meant.
"""

from __future__ import annotations

from typing import NewType

ReplicaId = NewType("ReplicaId", str)
"""One replica of one partition. Never reused: a replica that lost its disk comes back under a new id."""

GroupId = NewType("GroupId", str)
"""One Raft group, which is one partition (``orders-3``) or the coordinator's own."""

COORDINATOR = GroupId("coordinator")
"""The coordinator's own."""

Offset = NewType("Offset", int)
"""A record's position in its partition."""

Index = NewType("Index", int)
"""A Raft entry's position in its group's log."""

Term = NewType("Term", int)
"""A Raft entry's epoch."""

ProducerId = NewType("ProducerId", int)
"""Who wrote a batch. 0 means: not idempotent."""

Lane = NewType("Lane", int)
"""A priority level inside a partition; 0 is the most urgent."""
