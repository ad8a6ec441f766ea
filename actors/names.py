"""The names of replicas: in Ray, where their peers and clients find them, and on disk."""

from __future__ import annotations

import re
from typing import Any

from rayqueue.errors import InvalidInputError
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId

_PARTITION = re.compile(r"(.+)-(\d+)(?:\.\d+)?")  # the last number is the topic's id
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check_id(identifier: Any) -> str:
    """It becomes the name of a directory: ``InvalidInputError`` unless that is safe."""
    if not isinstance(identifier, str) or not _ID.fullmatch(identifier):
        raise InvalidInputError(
            f"{identifier!r} cannot be an id: letters, digits, dots, underscores and hyphens, at most 200"
        )
    return identifier


def topic_partition(group_id: GroupId) -> tuple[str, str]:
    """The topic and the number of the partition that a Raft group is; ("coordinator", "") of the coordinator's."""
    found = _PARTITION.fullmatch(group_id)
    return (found[1], found[2]) if found else (str(group_id), "")


def readable(group_id: GroupId, replica_id: ReplicaId) -> str:
    """Such as ``orders-3 r2``."""
    topic, partition = topic_partition(group_id)
    return f"{topic}-{partition} {replica_id}" if partition else f"{topic} {replica_id}"


def actor_name(group_id: GroupId, replica_id: ReplicaId) -> str:
    return f"rayqueue/{group_id}/{replica_id}"


PREFIX = "rayqueue/"
COORDINATOR_PREFIX = actor_name(COORDINATOR, ReplicaId(""))
GATEWAY_PREFIX = "rayqueue-gateway/"
"""Of gateways, which are no replicas: not the keeper looks after them, but the first of them
(``rayqueue.gateway.tending``)."""
STARTER = "rayqueue/starter"
