"""The history of a partition: what producers wrote to it, and whether its replicas have it.

``Writer`` is an idempotent producer in a thread; its records are numbered.
``check_logs`` reads every replica's whole log and demands what was promised:
offsets without gaps, the same bytes everywhere, each producer's records in
order and once, and every acknowledged one where its acknowledgement said.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import TracebackType

from rayqueue.ids import ReplicaId
from rayqueue.partition import Appended, Fetched
from rayqueue.records import RecordBatch
from rayqueue.testing import PartitionClient, ProcessGroup

RECORDS_PER_BATCH = 5


def numbered(producer_id: int, first: int, count: int = RECORDS_PER_BATCH, padding_bytes: int = 0) -> bytes:
    """The producer's batch of records ``first`` to ``first + count - 1``."""
    padding = "." * padding_bytes
    values = [f"{producer_id}:{number}:{padding}".encode() for number in range(first, first + count)]
    return RecordBatch.encode(values, timestamps=1_700_000_000_000, producer_id=producer_id, sequence=first)


class Writer:
    """Writes until its ``with`` block ends, then waits until all it wrote is acknowledged."""

    def __init__(
        self, client: PartitionClient, producer_id: int, *, in_flight: int = 4, padding_bytes: int = 0
    ) -> None:
        self.producer_id = producer_id
        self.acked: list[Appended] = []
        """Answers, in the order of the batches: the n-th has the records from ``n * RECORDS_PER_BATCH`` on."""
        self._client = client
        self._in_flight = in_flight
        self._padding_bytes = padding_bytes
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"writer {producer_id}", daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)
        if error is None:
            assert not self._thread.is_alive()
            self._check()

    @property
    def written(self) -> int:
        """Records acknowledged so far. Raises what ended the writer, if something did."""
        self._check()
        return len(self.acked) * RECORDS_PER_BATCH

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for answer in self._client.append_each(self._batches(), in_flight=self._in_flight):
                self.acked.append(answer)
        except Exception as error:  # noqa: BLE001  # raised again where the test sees it
            self._error = error

    def _batches(self) -> Iterator[bytes]:
        first = 0
        while not self._stop.is_set():
            yield numbered(self.producer_id, first, padding_bytes=self._padding_bytes)
            first += RECORDS_PER_BATCH


def end_of(answer: Appended) -> int:
    """The offset after the batch."""
    return answer.base_offset + answer.count


def check_logs(group: ProcessGroup, *writers: Writer) -> list[Fetched]:
    """Every running replica has the whole history, and the same. Returns it."""
    end = max((end_of(answer) for writer in writers for answer in writer.acked), default=0)
    group.wait_for_offset(end)
    return check_history({node: group.client.read_log(via=node) for node in group.running}, *writers)


def check_history(logs: Mapping[ReplicaId, list[Fetched]], *writers: Writer) -> list[Fetched]:
    """These replicas' whole logs are the same, and have what was acknowledged. Returns it."""
    (first_node, log), *others = logs.items()
    for node, other in others:
        assert other == log, f"{node} and {first_node} differ"
    values = _values(log)
    for writer in writers:
        _check_writer(writer, values)
    return log


def _values(log: list[Fetched]) -> list[bytes | None]:
    values: list[bytes | None] = []
    for batch in log:
        assert batch.base_offset == len(values), "offsets have a gap"
        decoded = RecordBatch.decode(batch.payload).values()
        assert len(decoded) == batch.count
        values += decoded
    return values


def _check_writer(writer: Writer, values: list[bytes | None]) -> None:
    mine = [value for value in values if value is not None and value.startswith(b"%d:" % writer.producer_id)]
    numbers = [int(value.split(b":")[1]) for value in mine]
    assert numbers == list(range(len(numbers))), "records are missing, doubled or out of order"
    assert len(numbers) >= writer.written
    for position, answer in enumerate(writer.acked):
        first = position * RECORDS_PER_BATCH
        found = values[answer.base_offset : end_of(answer)]
        assert found == mine[first : first + RECORDS_PER_BATCH], f"batch {position} is not where {answer} says"
