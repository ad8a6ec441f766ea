"""Positions of the consumer groups in this partition.

Owns the GROUPS table: per group the newest generation that committed, an
offset per lane, whether it is pinned, and the group's own metadata. A commit of
an older generation is refused, and an offset does not go back unless that is
asked for, so a late commit of a consumer that lost the partition changes
nothing.

``held_at`` is the index of the last entry that made some group need records
which it, as far as anybody could know before, did not: a new group, a pin, a
position that went back. Where to trim is decided before the trim is in the log;
this is how applying it knows whether that decision still stands.

A position expires. One that somebody commits without being a member of a group
(generation 0) does so by the partition's clock, after its last commit. One of a
group with members lives as long as the coordinator knows the group, for a group
may read and have nothing to commit; ``expire`` is told once it does not. What is
pinned stays.

``floor`` is the highest generation of all groups that were deleted. A group
that is not known here must come with a later one: the coordinator begins a new
life of a group above every generation that it ever deleted, so only members of
a life that is over are refused. One number does for all groups that ever were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from struct import Struct

from rayqueue.errors import InvalidInputError, OffsetOutOfRangeError, RayQueueError, StaleGenerationError
from rayqueue.ids import Index, Offset
from rayqueue.log.store import LogStore
from rayqueue.partition.answers import Committed, Deleted, Pinned
from rayqueue.partition.clock import Clock
from rayqueue.partition.commands import CommitOffsets, ExpireGroups, ForgetGroup
from rayqueue.partition.rows import FLOOR_KEY, HELD_KEY, Rows
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.tables import GROUPS, META
from rayqueue.protocol.calls import Position

_STATE = Struct("<QH")  # generation, count of lanes and whether it is pinned
_PINNED = 0x8000
_STAMPED = 0x4000
_STAMP = Struct("<Q")  # time of the last commit; rows of before there was a clock have none
_LANE = Struct("<BQ")
_HELD = Struct("<Q")
_FLOOR = Struct("<Q")
_DUMPED = Struct("<BI")  # length of the name, length of the row


@dataclass(frozen=True, slots=True)
class Group:
    generation: int
    offsets: Mapping[int, Offset]
    """Lane to the offset of the next record to read."""
    metadata: bytes = b""
    pinned: bool = False
    """No trim passes what it has not committed."""
    used_ms: int = 0
    """When it committed last, by the partition's clock."""

    def position(self) -> Position:
        """The same, as a client is told."""
        return Position(self.generation, dict(self.offsets), self.metadata, self.pinned)

    def encode(self) -> bytes:
        lanes = b"".join(_LANE.pack(lane, self.offsets[lane]) for lane in sorted(self.offsets))
        marks = (_PINNED if self.pinned else 0) | (_STAMPED if self.used_ms else 0)
        stamp = _STAMP.pack(self.used_ms) if self.used_ms else b""
        return _STATE.pack(self.generation, len(self.offsets) | marks) + stamp + lanes + self.metadata

    @staticmethod
    def decode(row: bytes) -> Group:
        generation, counted = _STATE.unpack_from(row)
        lanes = counted & ~(_PINNED | _STAMPED)
        used_ms, lanes_at = 0, _STATE.size
        if counted & _STAMPED:
            used_ms, lanes_at = _STAMP.unpack_from(row, lanes_at)[0], lanes_at + _STAMP.size
        metadata_at = lanes_at + lanes * _LANE.size
        offsets = {lane: Offset(offset) for lane, offset in _LANE.iter_unpack(row[lanes_at:metadata_at])}
        return Group(generation, offsets, row[metadata_at:], bool(counted & _PINNED), used_ms)


class Groups:
    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, Group] = {}
        self.held_at = Index(0)
        self.floor = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def get(self, name: str) -> Group | None:
        return self._known.get(name)

    def items(self) -> list[tuple[str, Group]]:
        return [(name, self._known[name]) for name in self]

    def values(self) -> Collection[Group]:
        return self._known.values()

    def commit(
        self, command: CommitOffsets, index: Index, start: Offset, end: Offset, settings: PartitionSettings
    ) -> Committed | RayQueueError:
        """All of the command, or an error and nothing of it."""
        known = self._known.get(command.group)
        group = Group(0, {}) if known is None else known
        if known is None and len(self._known) >= settings.max_groups:
            return self._too_many()
        if command.generation < group.generation:
            return StaleGenerationError(
                f"group {command.group!r} is at generation {group.generation}, not {command.generation}",
                generation=command.generation,
                current=group.generation,
            )
        # Also if it is known by commits without a generation only: they tell nothing of who its members are.
        if group.generation == 0 and 0 < command.generation <= self.floor:
            return StaleGenerationError(
                f"group {command.group!r} was deleted; generation {command.generation} is of its earlier life",
                generation=command.generation,
                current=self.floor,
            )
        offsets = dict(group.offsets)
        held = known is None
        for lane, offset in command.offsets.items():
            if lane >= settings.lanes:
                return InvalidInputError(f"there is no lane {lane}; the partition has {settings.lanes}", lane=lane)
            if offset > end:
                return OffsetOutOfRangeError(
                    f"offset {offset} cannot be committed, the log ends at {end}", offset=offset, start=start, end=end
                )
            before = offsets.get(lane, 0)
            if command.rewind or offset >= before:
                offsets[lane] = Offset(offset)
                held = held or offset < before
        # A commit without offsets only claims the partition: what belongs to the offsets stays with them.
        metadata = command.metadata if command.offsets else command.metadata or group.metadata
        self._put(command.group, Group(command.generation, offsets, metadata, group.pinned, self._clock.now_ms))
        if held:
            self._hold(index)
        return Committed(command.generation, offsets, metadata, group.pinned)

    def pin(self, name: str, pinned: bool, index: Index, settings: PartitionSettings) -> Pinned | RayQueueError:
        """A group that is not known yet is one now, and holds everything."""
        group = self._known.get(name)
        if group is None:
            if not pinned:
                return Pinned(False)
            if len(self._known) >= settings.max_groups:
                return self._too_many()
            group = Group(0, {})
        if group.pinned != pinned:
            # One that is let go of expires a whole time later, not at once.
            self._put(name, replace(group, pinned=pinned, used_ms=self._clock.now_ms))
            if pinned:
                self._hold(index)
        return Pinned(pinned)

    def _too_many(self) -> InvalidInputError:
        count = len(self._known)
        return InvalidInputError(
            f"{count} groups have positions in this partition, which is the limit (PartitionSettings.max_groups): "
            "delete what nobody needs (rayqueue groups delete), or let unused ones expire sooner "
            "(cluster.group_retention_ms)",
            limit=count,
        )

    def _put(self, name: str, group: Group) -> None:
        self._known[name] = group
        self._store.put(GROUPS, name.encode(), group.encode())

    def _hold(self, index: Index) -> None:
        self.held_at = index
        self._store.put(META, HELD_KEY, _HELD.pack(index))

    def delete(self, name: str) -> Deleted:
        existed = self._known.pop(name, None) is not None
        if existed:
            self._store.delete(GROUPS, name.encode())
        return Deleted(existed)

    def forget(self, command: ForgetGroup) -> Deleted:
        if command.generation > self.floor:
            self._raise_floor(command.generation)
        known = self._known.get(command.group)
        if known is None:
            return Deleted(False)
        as_seen = (known.generation, known.offsets) == command.seen
        if not as_seen and (command.seen is not None or known.generation > command.generation):
            return Deleted(False)
        return self.delete(command.group)

    def has_expired(self, now_ms: int, retention_ms: int) -> bool:
        """Whether ``expire_unused`` would forget one if it were so late."""
        ahead_ms = now_ms - self._clock.now_ms
        return any(self._is_unused(group, retention_ms - ahead_ms) for group in self._known.values())

    def expire_unused(self, retention_ms: int) -> tuple[str, ...]:
        """Forget positions without membership that nobody committed for longer."""
        gone = tuple(name for name in self if self._is_unused(self._known[name], retention_ms))
        for name in gone:
            self.delete(name)
        return gone

    def _is_unused(self, group: Group, retention_ms: int) -> bool:
        return not group.generation and not group.pinned and self._clock.age_ms(group.used_ms) > retention_ms

    def expire(self, command: ExpireGroups) -> tuple[str, ...]:
        """Forget what members of these groups committed; they are the coordinator's no more."""
        if command.generation > self.floor:
            self._raise_floor(command.generation)
        gone: list[str] = []
        for name in command.groups:
            known = self._known.get(name)
            if known is not None and not known.pinned and 0 < known.generation <= command.generation:
                self.delete(name)
                gone.append(name)
        return tuple(gone)

    def _raise_floor(self, floor: int) -> None:
        self.floor = floor
        self._store.put(META, FLOOR_KEY, _FLOOR.pack(floor))

    # -- the table and the checkpoint ---------------------------------------------

    def load(self) -> None:
        self._known = read_groups(self._store)
        held = self._store.get(META, HELD_KEY)
        self.held_at = Index(0 if held is None else _HELD.unpack(held)[0])
        floor = self._store.get(META, FLOOR_KEY)
        self.floor = 0 if floor is None else _FLOOR.unpack(floor)[0]

    def dump(self) -> bytes:
        parts: list[bytes] = []
        if self.floor:  # a group without a name; those of earlier releases have none
            parts += (_DUMPED.pack(0, _FLOOR.size), _FLOOR.pack(self.floor))
        for name in self:
            key, row = name.encode(), self._known[name].encode()
            parts += (_DUMPED.pack(len(key), len(row)), key, row)
        return b"".join(parts)

    def restore(self, dumped: bytes, held_at: Index) -> None:
        """Take over a dump; the table is empty."""
        self._known.clear()
        self.floor = 0
        self._hold(held_at)
        at = 0
        while at < len(dumped):
            key_bytes, row_bytes = _DUMPED.unpack_from(dumped, at)
            key_at = at + _DUMPED.size
            row_at = key_at + key_bytes
            at = row_at + row_bytes
            key, row = dumped[key_at:row_at], dumped[row_at:at]
            if not key:
                self._raise_floor(_FLOOR.unpack(row)[0])
                continue
            self._known[key.decode()] = Group.decode(row)
            self._store.put(GROUPS, key, row)


def read_groups(rows: Rows) -> dict[str, Group]:
    return {key.decode(): Group.decode(row) for key, row in rows.scan(GROUPS)}
