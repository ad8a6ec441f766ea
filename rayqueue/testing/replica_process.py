"""The process of one replica: ``python -m rayqueue.testing.replica_process FD``.

Reads calls from the socket ``FD`` and answers them there. The first call,
``start``, says everything about the replica, so that nothing is inherited from
the test but the socket. Ends when the other end is gone, and at once, without
any ceremony, when the replica meets an error it must not survive.

The main thread takes the calls; appends and control calls are answered by the
engine's thread; fetches, which may wait, have a small pool.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, ReplicaClosedError
from rayqueue.ids import GroupId, NodeId
from rayqueue.partition import Fetched, PartitionSettings
from rayqueue.raft.members import Members
from rayqueue.replica import Answer, PartitionReplica, Status, create_replica, start_replica
from rayqueue.testing.channel import Channel, Frame, pack_error
from rayqueue.testing.load import LoadReport, drive, usage

FATAL_EXIT_CODE = 70
_FETCH_THREADS = 8
_REPORTED = ("batches", "records", "batch_bytes", "wall_s")

_log = logging.getLogger(__name__)


class ReplicaServer:
    """Serves one replica to the other end of the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, "fetch")
        self._replica: PartitionReplica | None = None
        self._setup_report: Callable[[], Any] | None = None

    def serve(self) -> None:
        """Until the other end is gone."""
        while (frame := self._channel.receive()) is not None:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        call_id = frame.head["id"]

        def answer(result: Any) -> None:
            self._reply(call_id, result)

        try:
            call: Callable[[dict[str, Any], list[bytes], Answer], None] = getattr(self, "on_" + frame.head["call"])
            call(frame.head, frame.blobs, answer)
        except RayQueueError as error:
            answer(error)

    def _reply(self, call_id: int, result: Any) -> None:
        head: dict[str, Any] = {"id": call_id}
        blobs: Sequence[bytes] = ()
        match result:
            case RayQueueError():
                head["error"] = pack_error(result)
            case LoadReport():
                head["result"] = {
                    name: getattr(result, name) for name in ("batches", "records", "batch_bytes", "wall_s")
                }
                blobs = (result.latencies_ms.tobytes(),)
            case Status():
                head["result"] = asdict(result)
            case [*batches] if all(isinstance(batch, Fetched) for batch in batches):
                head["result"] = [(batch.base_offset, batch.count) for batch in batches]
                blobs = [batch.payload for batch in batches]
            case _:
                head["result"] = result
        try:
            self._channel.send(head, blobs)
        except OSError:
            _log.warning("nobody is there to take the answer to call %d", call_id)

    @property
    def replica(self) -> PartitionReplica:
        if self._replica is None:
            raise ReplicaClosedError("the replica was not started")
        return self._replica

    def _later(self, work: Callable[[], Any], answer: Answer) -> None:
        """Off the main thread, which must stay free to take calls."""

        def run() -> None:
            try:
                result = work()
            except RayQueueError as error:
                result = error
            answer(result)

        self._pool.submit(run)

    # -- calls ----------------------------------------------------------------------------

    def on_start(self, head: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        path, group_id, node_id = Path(head["path"]), GroupId(head["group_id"]), NodeId(head["node_id"])
        settings = Settings(**head["settings"])
        if head["setup"] is not None:
            module, _, function = head["setup"].partition(":")
            self._setup_report = getattr(import_module(module), function)()
        if head["create"]:
            members = None if head["voters"] is None else Members.of(head["voters"])
            create_replica(path, group_id, node_id, members, settings)
        partition = PartitionSettings(**head["partition"])
        self._replica = start_replica(path, group_id, node_id, settings, partition=partition, on_fatal=_die)
        answer(self._replica.status)

    def on_set_peers(self, head: dict[str, Any], _: list[bytes], answer: Answer) -> None:
        self.replica.set_peers({NodeId(node): (host, port) for node, (host, port) in head["peers"].items()})
        answer(None)

    def on_append(self, _: dict[str, Any], blobs: list[bytes], answer: Answer) -> None:
        self.replica.append(blobs[0], answer)

    def on_command(self, _: dict[str, Any], blobs: list[bytes], answer: Answer) -> None:
        self.replica.command(blobs[0], lambda result: answer(result if isinstance(result, RayQueueError) else None))

    def on_fetch(self, head: dict[str, Any], _: list[bytes], answer: Answer) -> None:
        self._later(lambda: self._fetch(head), answer)

    def _fetch(self, head: dict[str, Any]) -> list[Fetched]:
        offset, max_bytes, lane = head["offset"], head["max_bytes"], head["lane"]
        replica = self.replica
        if head["max_wait_ms"] > 0:
            self._wait_for(offset, head["max_wait_ms"] / 1000)
        found = replica.read_tail(offset, max_bytes, lane)
        if found is None or head["from_disk"]:
            found = replica.read_disk(offset, max_bytes, lane)
        return found

    def _wait_for(self, offset: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        longer = threading.Event()

        def wake(_: Any) -> None:
            longer.set()

        while self.replica.high_watermark <= offset and time.monotonic() < deadline_s:
            longer.clear()
            self.replica.when_longer(offset, wake)
            if not longer.wait(max(0.0, deadline_s - time.monotonic())):
                self.replica.forget_reader(wake)

    def on_inspect(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        self.replica.inspect(answer)

    def on_token(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        answer(self.replica.token.hex())

    def on_usage(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        self.replica.inspect(lambda status: answer(asdict(usage(status))))

    def on_setup_report(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        answer(None if self._setup_report is None else self._setup_report())

    def on_load(self, head: dict[str, Any], blobs: list[bytes], answer: Answer) -> None:
        count, in_flight, timeout_s = head["count"], head["in_flight"], head["timeout_s"]
        self._later(lambda: drive(self.replica, blobs[0], count, in_flight, timeout_s), answer)

    def on_change_members(self, head: dict[str, Any], _: list[bytes], answer: Answer) -> None:
        node = NodeId(head["node"])
        change: Callable[[Members], Members] = {
            "add_learner": lambda members: members.with_learner(node),
            "promote": lambda members: members.with_voter(node),
            "remove": lambda members: members.without(node),
        }[head["change"]]
        self.replica.change_members(change, answer)

    def on_transfer(self, head: dict[str, Any], _: list[bytes], answer: Answer) -> None:
        self.replica.transfer_leadership(NodeId(head["target"]), answer)

    def on_confirm(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        self.replica.confirm_leadership(answer)

    def on_close(self, _: dict[str, Any], __: list[bytes], answer: Answer) -> None:
        """The replica closes; the process stays, and answers that it is closed."""
        self.replica.close()
        answer(None)


def _die(error: BaseException) -> None:
    # The engine's thread has logged it. No cleaning up: a crash must look like one.
    logging.shutdown()
    os._exit(FATAL_EXIT_CODE)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        ReplicaServer(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    except BaseException:  # noqa: BLE001  # a bug in here is told in the log, by the exit code, and by nothing else
        _log.critical("the replica's process ends", exc_info=True)
        logging.shutdown()
        os._exit(FATAL_EXIT_CODE)
    os._exit(0)


if __name__ == "__main__":
    main()
