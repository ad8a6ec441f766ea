"""The coordinator's table. Its rows are said in ``catalog`` and ``groups``."""

from __future__ import annotations

from rayqueue.log.store import Schema, Table

META = Table("meta", 5)

COORDINATOR = Schema("coordinator", 2, META)
