"""Which groups a data directory has: for groups that are run without a coordinator.

A group's manifest is what tells "this replica never had data" from "this
replica lost its data", when all of Ray has been restarted and nobody remembers.
It is written before the first replica is made and marked complete once all of
them are, and is there completely or not at all.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayqueue.actors.files import replace
from rayqueue.actors.home import with_secret
from rayqueue.actors.names import check_id
from rayqueue.config import Settings
from rayqueue.errors import StorageError
from rayqueue.ids import GroupId, NodeId

__all__ = ["Manifest", "load_manifest", "save_manifest", "with_secret"]

_MANIFEST_FILE = "group.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The members a group was made with. Who belongs to it today is said in its log."""

    voters: tuple[NodeId, ...]
    complete: bool


def load_manifest(settings: Settings, group_id: GroupId) -> Manifest | None:
    path = _manifest_path(settings, group_id)
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        return Manifest(tuple(map(NodeId, fields["voters"])), bool(fields["complete"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}", path=str(path)) from error


def save_manifest(settings: Settings, group_id: GroupId, manifest: Manifest) -> None:
    replace(_manifest_path(settings, group_id), json.dumps(asdict(manifest)))


def _manifest_path(settings: Settings, group_id: GroupId) -> Path:
    return settings.data_dir / check_id(group_id) / _MANIFEST_FILE
