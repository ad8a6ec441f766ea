"""Puts and acknowledgements that count once a transaction is committed.

A job that was put in a transaction is delayed until that has ended, for longer than
there is time. Committed, it is as one that was put just now; aborted, it is gone.

A job whose acknowledgement is staged has a row, counts as leased, and is in no
lease any more: neither the lease's end nor the worker's reaches it, only the
transaction's (``rayqueue.partition.transactions``). Committed, it is done; aborted,
its delivery has failed, and it is tried again by the queue's rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayqueue.partition.jobs import runs
from rayqueue.partition.jobs.queue import JobQueue
from rayqueue.partition.jobs.rows import Kind, Note
from rayqueue.partition.jobs.states import PENDING_MS
from rayqueue.protocol.jobs import Settled

Runs = tuple[tuple[int, int], ...]


class StagingQueue(JobQueue):
    """A queue whose jobs may be put and acknowledged in transactions."""

    def end_put(self, runs_put: Iterable[tuple[int, int]], *, commit: bool) -> None:
        """The transaction has ended that has put these, from the first to before the end."""
        now_ms = self._clock.now_ms
        for first, end in runs_put:
            for job_id in range(first, end):
                row = self.rows.get(job_id)
                if row is None:  # cancelled
                    continue
                due_ms = row.due_ms - PENDING_MS
                self._leave(row)
                if commit:
                    self._wait_or_ready(row, due_ms, now_ms)
                else:
                    self._forget(row)

    def stage(self, token: int, jobs: Runs, before: Iterable[tuple[int, int]]) -> tuple[Settled, Runs]:
        """Take these out of the lease. Which of them were not in it, and those that are new: ``before`` are those that
        the transaction has staged already."""
        lease = self.leases.get(token)
        known = list(before)
        lost: list[tuple[int, int]] = []
        taken: list[tuple[int, int]] = []
        for first, count in jobs:
            given = [] if lease is None else runs.subtract(lease.runs, first, count)
            for start, length, lane in given:
                for job_id in range(start, start + length):
                    self.rows.put(self._new_row(job_id, lane, token))
                runs.add(taken, start, length)
            for start, length in runs.without(first, count, given):
                for job_id in range(start, start + length):
                    if lease is not None and lease.ids.pop(job_id, None) is not None:
                        runs.add(taken, job_id, 1)
                    elif not runs.holds(known, job_id) and not runs.holds(taken, job_id):
                        runs.add(lost, job_id, 1)
        if lease is not None:
            self.leases.changed(lease)
        return Settled(tuple(lost)), tuple(taken)

    def end_staged(self, worker: str, token: int, jobs: Runs, *, commit: bool) -> None:
        """The transaction has ended."""
        lease = self.leases.get(token)
        for first, count in jobs:
            for job_id in range(first, first + count):
                row = self._row(job_id)
                self.counts.leased -= 1
                self._end_key(row)
                if commit:
                    self._finish(row, None)
                else:
                    note = Note(self._clock.now_ms, Kind.NACK, worker)
                    self._retry(row, note, self._backoff_ms(row))
            if commit and lease is not None:
                runs.add(lease.done, first, count)  # a repeated acknowledgement is one
        if commit and lease is not None:
            self.leases.changed(lease)
