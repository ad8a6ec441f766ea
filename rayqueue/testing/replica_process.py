"""The process of one replica: ``python -m rayqueue.testing.replica_process FD``.

Serves clients on the replica's own port, as a replica's actor does, and takes
control calls from the socket ``FD``. The first of them, ``start``, says
everything about the replica, so that nothing is inherited from the test but the
socket. Ends when the other end is gone, and at once, without any ceremony, when
the replica meets an error it must not survive.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, ReplicaClosedError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import Answer
from rayqueue.replica.start import PartitionReplica, create_replica, start_replica
from rayqueue.testing.control import Control
from rayqueue.testing.usage import usage

FATAL_EXIT_CODE = 70

_log = logging.getLogger(__name__)


class ReplicaServer:
    """Serves one replica to the other end of the control connection. Each ``on_`` method is a call."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._replica: PartitionReplica | None = None
        self._setup_report: Callable[[], Any] | None = None

    def serve(self) -> None:
        """Until the other end is gone."""
        while (received := self._control.receive()) is not None:
            number, (name, arguments) = received
            self._take(number, name, arguments)

    def _take(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        def answer(result: Any) -> None:
            try:
                self._control.answer(number, result)
            except OSError:
                _log.warning("nobody is there to take the answer to %s", name)

        try:
            getattr(self, "on_" + name)(answer, **arguments)
        except RayQueueError as error:
            answer(error)

    @property
    def replica(self) -> PartitionReplica:
        if self._replica is None:
            raise ReplicaClosedError("the replica was not started")
        return self._replica

    def on_start(
        self,
        answer: Answer,
        *,
        path: str,
        group_id: GroupId,
        replica_id: ReplicaId,
        settings: dict[str, Any],
        partition: dict[str, Any],
        create: bool,
        voters: list[ReplicaId] | None,
        setup: str | None,
    ) -> None:
        if setup is not None:
            module, _, function = setup.partition(":")
            self._setup_report = getattr(import_module(module), function)()
        where, values = (Path(path), group_id, replica_id), Settings(**settings)
        if create:
            create_replica(*where, None if voters is None else ReplicaSet.of(voters), values)
        self._replica = start_replica(*where, values, partition=PartitionSettings(**partition), on_fatal=_die)
        answer(self._replica.status)

    def on_set_peers(self, answer: Answer, *, peers: Mapping[ReplicaId, tuple[str, int]]) -> None:
        self.replica.set_peers({replica_id: (host, port) for replica_id, (host, port) in peers.items()})
        answer(None)

    def on_inspect(self, answer: Answer) -> None:
        self.replica.inspect(answer)

    def on_endpoint(self, answer: Answer) -> None:
        status = self.replica.status
        answer(Endpoint(*status.address, self.replica.token, status.replica_id, status.leader, status.term))

    def on_usage(self, answer: Answer) -> None:
        self.replica.inspect(lambda status: answer(usage(status)))

    def on_setup_report(self, answer: Answer) -> None:
        answer(None if self._setup_report is None else self._setup_report())

    def on_change_replicas(self, answer: Answer, *, change: str, replica_id: ReplicaId) -> None:
        changed: Callable[[ReplicaSet], ReplicaSet] = {
            "add_learner": lambda members: members.with_learner(replica_id),
            "promote": lambda members: members.with_voter(replica_id),
            "remove": lambda members: members.without(replica_id),
        }[change]
        self.replica.change_replicas(changed, answer)

    def on_transfer(self, answer: Answer, *, target: ReplicaId) -> None:
        self.replica.transfer_leadership(target, answer)

    def on_confirm(self, answer: Answer) -> None:
        self.replica.confirm_leadership(answer)

    def on_close(self, answer: Answer) -> None:
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
        ReplicaServer(Control(socket.socket(fileno=int(sys.argv[1])))).serve()
    except BaseException:  # noqa: BLE001  # a bug in here is told in the log, by the exit code, and by nothing else
        _log.critical("the replica's process ends", exc_info=True)
        logging.shutdown()
        os._exit(FATAL_EXIT_CODE)
    os._exit(0)


if __name__ == "__main__":
    main()
