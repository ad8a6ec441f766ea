"""Seals: the coordinator's proof, to a partition, that it has given a generation.

A partition refuses commits of older generations, so whoever could make up a
generation far ahead could silence a group. A partition does not know what the
coordinator has given, and does not ask it. Instead a grant comes with a seal: a
MAC over the group, the partition's Raft group (which names the topic's id) and
the generation, under a key made of the cluster's secret. Replicas hold the
secret, clients do not: a client can show what it was given, and nothing else.

A group without members may be fenced, to move its positions: that seal is of the
group and the generation, for every partition.

The end of a transaction is sealed, too: a partition takes a marker from
whoever can show that the coordinator has decided so, of this transaction and for
this partition.

A seal says who was granted what, not that this is still so: that is what the
generation itself is for. Generation 0, of consumers that no group knows, has
none.
"""

from __future__ import annotations

import hmac
from functools import lru_cache

from rayqueue.errors import UnknownGenerationError, UnknownTransactionError

_KEPT = 65_536


class Seals:
    """Made with the cluster's secret."""

    def __init__(self, secret: bytes) -> None:
        # A key of its own: the secret serves other purposes, whose MACs must mean nothing here.
        self._key = hmac.digest(secret, b"rayqueue generations\0", "sha256")
        self.grant = lru_cache(_KEPT)(self._grant)
        """For a member that is granted a partition. Not computed again for each heartbeat."""

    def _grant(self, group: str, raft_group: str, generation: int) -> bytes:
        return self._sealed("grant", group, raft_group, str(generation))

    def _sealed(self, *parts: str) -> bytes:
        return hmac.digest(self._key, "\0".join(parts).encode(), "sha256")

    def floor(self, generation: int) -> bytes:
        """For whoever tells partitions that every generation up to this one is over."""
        return self._sealed("floor", str(generation))

    def fence(self, group: str, generation: int) -> bytes:
        """For whoever moves the positions of a group without members, in any partition."""
        return self._sealed("fence", group, str(generation))

    def marker(self, raft_group: str, producer_id: int, epoch: int, *, commit: bool) -> bytes:
        """For whoever tells a partition how a transaction has ended."""
        return self._sealed("commit" if commit else "abort", raft_group, str(producer_id), str(epoch))

    def check_marker(self, seal: bytes, raft_group: str, producer_id: int, epoch: int, *, commit: bool) -> None:
        """``UnknownTransactionError`` unless the coordinator has decided this, for this partition."""
        if not hmac.compare_digest(seal, self.marker(raft_group, producer_id, epoch, commit=commit)):
            raise UnknownTransactionError(
                f"the coordinator has not decided that transaction {epoch} of producer {producer_id} is "
                f"{'committed' if commit else 'aborted'} here",
                producer_id=producer_id,
                epoch=epoch,
            )

    def check_grant(self, seal: bytes, group: str, raft_group: str, generation: int) -> None:
        """``UnknownGenerationError`` unless the coordinator has given this generation for this."""
        if (
            generation
            and not hmac.compare_digest(seal, self._grant(group, raft_group, generation))
            and not hmac.compare_digest(seal, self.fence(group, generation))
        ):
            raise UnknownGenerationError(
                f"the coordinator has not given generation {generation} of group {group!r} to whoever commits with it",
                group=group,
                generation=generation,
            )

    def check_floor(self, seal: bytes, generation: int) -> None:
        if generation and not hmac.compare_digest(seal, self.floor(generation)):
            raise UnknownGenerationError(
                f"the coordinator has not said that generation {generation} is over", generation=generation
            )
