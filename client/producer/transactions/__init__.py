"""Transactions of a producer: their life (no I/O), the tasks that carry them out, and what an application holds."""
