"""The coordinator's table. Its rows are said in ``catalog``, ``groups`` and ``transactions``."""

from __future__ import annotations

from rayqueue.log.store import Schema, Table

META = Table("meta", 5)

COORDINATOR = Schema("coordinator", 3, META)
