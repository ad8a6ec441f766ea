"""What a cluster keeps in its data directory besides logs: its secret, and which groups it has made.

A group's manifest is what tells "this replica never had data" from "this
replica lost its data", when all of Ray has been restarted and nobody remembers.
It is written before the first replica is made and marked complete once all of
them are. Both files are there completely or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rayqueue.actors.names import check_id
from rayqueue.config import Settings
from rayqueue.errors import StorageError
from rayqueue.ids import GroupId, NodeId

_SECRET_FILE = "secret"  # noqa: S105  # a file's name
_MANIFEST_FILE = "group.json"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Manifest:
    """The members a group was made with. Who belongs to it today is said in its log."""

    voters: tuple[NodeId, ...]
    complete: bool


def with_secret(settings: Settings) -> Settings:
    """The settings with what the replicas share: as configured, or kept in the data directory, or made now."""
    if settings.transport.secret is not None:
        return settings
    path = settings.data_dir / _SECRET_FILE
    if not path.exists():
        _write_once(path, secrets.token_urlsafe(_SECRET_BYTES))
    transport = settings.transport.model_copy(update={"secret": SecretStr(path.read_text())})
    return settings.model_copy(update={"transport": transport})


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
    _replace(_manifest_path(settings, group_id), json.dumps(asdict(manifest)))


def _manifest_path(settings: Settings, group_id: GroupId) -> Path:
    return settings.data_dir / check_id(group_id) / _MANIFEST_FILE


def _replace(path: Path, text: str) -> None:
    _synced_copy(path, text).rename(path)
    _sync_directory(path.parent)


def _write_once(path: Path, text: str) -> None:
    """Only the first of several that try at the same time succeeds; the others keep what it wrote."""
    copy = _synced_copy(path, text)
    try:
        os.link(copy, path)
    except FileExistsError:
        pass
    finally:
        copy.unlink()
    _sync_directory(path.parent)


def _synced_copy(path: Path, text: str) -> Path:
    """Beside ``path``; mkstemp makes it readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
