"""How far each consumer group has come in this partition.

Owns the GROUPS table: per group the newest generation that committed, an
offset per lane, and the group's own metadata. A commit of an older generation
is refused, and an offset does not go back unless that is asked for, so a late
commit of a consumer that lost the partition changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct

from rayqueue.errors import InvalidInputError, OffsetOutOfRangeError, RayQueueError, StaleGenerationError
from rayqueue.ids import Offset
from rayqueue.log.store import LogStore, Table
from rayqueue.partition.answers import Committed, Deleted
from rayqueue.partition.commands import CommitOffsets
from rayqueue.partition.settings import PartitionSettings

_STATE = Struct("<QH")  # generation, count of lanes
_LANE = Struct("<BQ")
_DUMPED = Struct("<BI")  # length of the name, length of the row


@dataclass(frozen=True, slots=True)
class Group:
    generation: int
    offsets: Mapping[int, Offset]
    """Lane to the offset of the next record to read."""
    metadata: bytes = b""

    def encode(self) -> bytes:
        lanes = b"".join(_LANE.pack(lane, self.offsets[lane]) for lane in sorted(self.offsets))
        return _STATE.pack(self.generation, len(self.offsets)) + lanes + self.metadata

    @staticmethod
    def decode(row: bytes) -> Group:
        generation, lanes = _STATE.unpack_from(row)
        metadata_at = _STATE.size + lanes * _LANE.size
        offsets = {lane: Offset(offset) for lane, offset in _LANE.iter_unpack(row[_STATE.size : metadata_at])}
        return Group(generation, offsets, row[metadata_at:])


class Groups:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._known: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def get(self, name: str) -> Group | None:
        return self._known.get(name)

    def commit(
        self, command: CommitOffsets, start: Offset, end: Offset, settings: PartitionSettings
    ) -> Committed | RayQueueError:
        """All of the command, or an error and nothing of it."""
        group = self._known.get(command.group)
        if group is None:
            if len(self._known) >= settings.max_groups:
                return InvalidInputError(
                    f"there are {len(self._known)} groups here, which is the limit; delete one", limit=len(self._known)
                )
            group = Group(0, {})
        if command.generation < group.generation:
            return StaleGenerationError(
                f"group {command.group!r} is at generation {group.generation}, not {command.generation}",
                generation=command.generation,
                current=group.generation,
            )
        offsets = dict(group.offsets)
        for lane, offset in command.offsets.items():
            if lane >= settings.lanes:
                return InvalidInputError(f"there is no lane {lane}; the partition has {settings.lanes}", lane=lane)
            if offset > end:
                return OffsetOutOfRangeError(
                    f"offset {offset} cannot be committed, the log ends at {end}", offset=offset, start=start, end=end
                )
            if command.rewind or offset >= offsets.get(lane, 0):
                offsets[lane] = Offset(offset)
        changed = Group(command.generation, offsets, command.metadata)
        self._known[command.group] = changed
        self._store.put(Table.GROUPS, command.group.encode(), changed.encode())
        return Committed(changed.generation, changed.offsets)

    def delete(self, name: str) -> Deleted:
        existed = self._known.pop(name, None) is not None
        if existed:
            self._store.delete(Table.GROUPS, name.encode())
        return Deleted(existed)

    # -- the table and the checkpoint ---------------------------------------------

    def load(self) -> None:
        self._known = {key.decode(): Group.decode(row) for key, row in self._store.scan(Table.GROUPS)}

    def dump(self) -> bytes:
        parts: list[bytes] = []
        for name in self:
            key, row = name.encode(), self._known[name].encode()
            parts += (_DUMPED.pack(len(key), len(row)), key, row)
        return b"".join(parts)

    def restore(self, dumped: bytes) -> None:
        """Take over a dump; the table is empty."""
        self._known.clear()
        at = 0
        while at < len(dumped):
            key_bytes, row_bytes = _DUMPED.unpack_from(dumped, at)
            key_at = at + _DUMPED.size
            row_at = key_at + key_bytes
            at = row_at + row_bytes
            key, row = dumped[key_at:row_at], dumped[row_at:at]
            self._known[key.decode()] = Group.decode(row)
            self._store.put(Table.GROUPS, key, row)
