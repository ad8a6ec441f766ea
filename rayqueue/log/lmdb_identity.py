"""A store's identity: whose it is, its format and its tables, checked before anything else of it is read.

``Opening`` compares what the identity says with what the opener expects. A
format or a schema that is newer than this release is refused at once, with
nothing changed (``StoreFormatError``). One that is older is brought to this
release's by the store's first transaction, together with what is replayed from
the write-ahead file: all of it or nothing, and never without it, since a new
transaction makes that file outdated.

A table that the identity names must be there, else the store is damaged; one
that it does not name is new, and made. A table that the opener does not know is
refused: its rows would be left behind.
"""

from __future__ import annotations

from pathlib import Path

import lmdb

from rayqueue.errors import DamagedLogError, StoreFormatError, StoreIdentityError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_codec import (
    CHECKPOINTS,
    ENTRIES,
    HARD,
    Identity,
    StoredState,
    TableSum,
    encode_row,
    encode_state,
)
from rayqueue.log.lmdb_rows import IDENTITY_KEY, STATE_KEY, Spaces, View
from rayqueue.log.ops import EMPTY_STATE
from rayqueue.log.store import Schema, Table

_ALWAYS = (ENTRIES, CHECKPOINTS, HARD)


def count_spaces(schema: Schema) -> int:
    """The number of databases that LMDB must be able to open."""
    return len(_ALWAYS) + len(schema.tables)


def write_empty(
    env: lmdb.Environment, group_id: GroupId, replica_id: ReplicaId, wal_bytes: int, schema: Schema
) -> None:
    """All that a new store has, in one transaction."""
    with env.begin(write=True) as txn:
        names = (*_ALWAYS, *(table.space for table in schema.tables))
        spaces: Spaces = {name: env.open_db(name, txn=txn) for name in names}
        identity = Identity.of(group_id, replica_id, wal_bytes, schema).encode()
        txn.put(IDENTITY_KEY, encode_row(HARD, IDENTITY_KEY, identity), db=spaces[HARD])
        state = encode_state(txn.id(), EMPTY_STATE, {table: TableSum() for table in schema.tables if table.summed})
        txn.put(STATE_KEY, encode_row(HARD, STATE_KEY, state), db=spaces[HARD])


class Opening:
    """The databases of an open environment, in ``spaces``; those of new tables once ``upgrade`` has made them."""

    def __init__(
        self, env: lmdb.Environment, path: Path, group_id: GroupId, replica_id: ReplicaId, schema: Schema
    ) -> None:
        self._env = env
        self._schema = schema
        self.spaces: Spaces = {HARD: env.open_db(HARD, create=False)}
        with env.begin(buffers=True) as txn:
            found = View(txn, self.spaces).row(HARD, IDENTITY_KEY)
        if found is None:
            raise DamagedLogError("the store's identity is missing", path=str(path))
        self.identity = Identity.decode(found)
        _check(self.identity, path, group_id, replica_id, schema)
        self._wanted = Identity.of(group_id, replica_id, self.identity.wal_bytes, schema)
        self.outdated = self.identity != self._wanted
        """True until ``upgrade`` is committed."""
        made = {name for _, name in self.identity.tables}
        self._new = [table for table in schema.tables if table.name not in made]
        for space in (ENTRIES, CHECKPOINTS, *(table.space for table in schema.tables if table.name in made)):
            self.spaces[space] = env.open_db(space, create=False)

    def sums(self, stored: StoredState) -> dict[Table, TableSum | None]:
        """The expected sums of the summed tables. A new one has no rows; None for one that was not summed before."""
        known = self._schema.by_number
        for number, each in stored.sums.items():
            if number not in known and each.rows:
                raise StoreFormatError(f"the store has rows in a table {number} that {self._schema.name} does not have")
        return {
            table: stored.sums.get(table.number, TableSum() if table in self._new else None)
            for table in self._schema.tables
            if table.summed
        }

    def upgrade(self, txn: lmdb.Transaction[memoryview]) -> Spaces:
        """Make new tables and write the identity of this release. The databases, if the transaction is committed."""
        spaces = dict(self.spaces)
        for table in self._new:
            spaces[table.space] = self._env.open_db(table.space, txn=txn)
        txn.put(IDENTITY_KEY, encode_row(HARD, IDENTITY_KEY, self._wanted.encode()), db=spaces[HARD])
        return spaces

    def upgraded(self, spaces: Spaces) -> None:
        """It is committed."""
        self.spaces, self.identity, self.outdated = spaces, self._wanted, False


def _check(found: Identity, path: Path, group_id: GroupId, replica_id: ReplicaId, schema: Schema) -> None:
    if (found.group_id, found.replica_id) != (group_id, replica_id):
        raise StoreIdentityError(
            f"{path} belongs to {found.replica_id} of {found.group_id}, not to {replica_id} of {group_id}",
            replica_id=found.replica_id,
            group_id=found.group_id,
        )
    if found.schema and found.schema != schema.name:
        raise StoreIdentityError(
            f"{path} is the store of a {found.schema}, not of a {schema.name or 'log alone'}", schema=found.schema
        )
    if found.version > schema.version:
        raise StoreFormatError(
            f"{path} has version {found.version} of a {schema.name}'s tables, this release reads up to "
            f"{schema.version}; a newer release wrote it: run that one",
            found=found.version,
            newest=schema.version,
        )
    if found.format == 2:
        return  # of the tables that all stores had, this one may not need some: see ``sums``
    known = {(table.number, table.name) for table in schema.tables}
    unknown = [name for number, name in found.tables if (number, name) not in known]
    if unknown:
        raise StoreFormatError(
            f"{path} has tables that this release does not know: {', '.join(unknown)}; run the release that wrote it",
            tables=unknown,
        )
