"""A process of either release, whose code is on the path: a replica, or a client of replicas.

Calls come as lines of JSON on standard input, answers leave on standard output.
Only what both releases have is used here; where names differ, both are tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from rayqueue.cluster import commands
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId
from rayqueue.protocol.data import READ_FOLLOWER, Cursor, FetchRequest
from rayqueue.records import RecordBatch

try:
    from rayqueue.ids import ReplicaId
    from rayqueue.net.channel import Channel
    from rayqueue.net.endpoint import Endpoint
    from rayqueue.raft.replica_set import ReplicaSet
    from rayqueue.replica.coordinator_service import start_coordinator
    from rayqueue.replica.start import create_replica, start_replica
except ImportError:  # the release before
    from rayqueue.actors.endpoint import Endpoint  # type: ignore[import-not-found, no-redef]
    from rayqueue.client.channel import Channel  # type: ignore[import-not-found, no-redef]
    from rayqueue.cluster.tables import COORDINATOR as TABLES
    from rayqueue.ids import NodeId as ReplicaId  # type: ignore[attr-defined, no-redef]
    from rayqueue.raft.members import Members as ReplicaSet  # type: ignore[import-not-found, no-redef]
    from rayqueue.replica import create_replica, start_replica  # type: ignore[no-redef, attr-defined]
    from rayqueue.replica.coordinator import CoordinatorReplica  # type: ignore[import-not-found]
    from rayqueue.replica.start import open_replica

    def start_coordinator(  # type: ignore[misc]
        path: Path, group_id: Any, replica_id: Any, settings: Settings, *, host: str, on_change: Any, on_fatal: Any
    ) -> Any:
        store, transport = open_replica(path, group_id, replica_id, settings, TABLES, host=host)
        return CoordinatorReplica(store, transport, settings=settings, on_change=on_change, on_fatal=on_fatal)


SETTINGS = Settings(transport={"secret": "only for this test"})
ANY_LANE = 0xFF
PATIENCE_S = 20.0


class Caller:
    def __init__(self) -> None:
        self._replica: Any = None

    # -- a replica ------------------------------------------------------------------------

    def start(self, path: str, node: str, voters: list[str] | None, coordinator: bool = False) -> list[Any]:
        group_id, replica_id = GroupId("coordinator" if coordinator else "upgrade-0"), ReplicaId(node)
        if voters is not None:
            create_replica(Path(path), group_id, replica_id, ReplicaSet.of(voters), SETTINGS)
        if coordinator:
            self._replica = start_coordinator(
                Path(path), group_id, replica_id, SETTINGS, host="127.0.0.1", on_change=lambda: None, on_fatal=_die
            )
        else:
            self._replica = start_replica(Path(path), group_id, replica_id, SETTINGS, on_fatal=_die)
        return list(self._replica.status.address)

    def peers(self, addresses: dict[str, list[Any]]) -> None:
        self._replica.set_peers({node: (host, port) for node, (host, port) in addresses.items()})

    def status(self) -> dict[str, Any]:
        status = self._asked(self._replica.inspect)
        return {"role": status.role, "term": status.term, "end": status.high_watermark, "last": status.last_index}

    def endpoint(self) -> list[Any]:
        return [*self._replica.status.address, self._replica.token.hex()]

    def change(self, command: str, arguments: list[Any]) -> None:
        """Of a coordinator: let the group apply this."""
        made = getattr(commands, command)(*arguments)
        self._asked(lambda answer: self._replica.service.change(made, answer))

    def transfer(self, to: str) -> None:
        self._asked(lambda answer: self._replica.transfer_leadership(to, answer))

    def close(self) -> None:
        self._replica.close()

    def _asked(self, ask: Any) -> Any:
        done, found = threading.Event(), []

        def answer(result: Any) -> None:
            found.append(result)
            done.set()

        ask(answer)
        if not done.wait(PATIENCE_S):
            raise TimeoutError("no answer")
        if isinstance(found[0], RayQueueError):
            raise found[0]
        return found[0]

    # -- a client -------------------------------------------------------------------------

    def write(self, endpoints: list[list[Any]], producer: int, first: int, count: int) -> list[int]:
        """Numbered records, each a batch of its own, to whoever leads; again until each is acknowledged."""
        return asyncio.run(self._write(endpoints, producer, first, count))

    async def _write(self, endpoints: list[list[Any]], producer: int, first: int, count: int) -> list[int]:
        offsets: list[int] = []
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        channel: Any = None
        turn = 0
        while len(offsets) < count:
            number = first + len(offsets)
            value = b"%d:%d" % (producer, number)
            batch = RecordBatch.encode([value], timestamps=1, producer_id=producer, epoch=0, sequence=number)
            try:
                if channel is None:
                    channel = await Channel.open(_endpoint(endpoints[turn % len(endpoints)]), SETTINGS)
                offsets.append((await asyncio.wait_for(channel.append(batch), 5)).base_offset)
            except (RayQueueError, asyncio.TimeoutError, OSError):
                if loop.time() > deadline_s:
                    raise
                if channel is not None:
                    channel.close()
                channel, turn = None, turn + 1
                await asyncio.sleep(0.02)
        channel.close()
        return offsets

    def read(self, endpoint: list[Any]) -> list[str]:
        """Everything that this replica has."""
        return asyncio.run(self._read(endpoint))

    async def _read(self, endpoint: list[Any]) -> list[str]:
        channel = await Channel.open(_endpoint(endpoint), SETTINGS)
        values: list[str] = []
        while True:
            wanted = FetchRequest((Cursor(ANY_LANE, len(values)),), 1 << 20, 0, READ_FOLLOWER)
            found = await channel.fetch(wanted)
            if not found.batches:
                channel.close()
                return values
            for batch in found.batches:
                values += [(value or b"").decode() for value in RecordBatch.decode(bytes(batch.payload)).values()]


def _endpoint(told: list[Any]) -> Any:
    host, port, token = told
    return Endpoint(host, port, bytes.fromhex(token), "?", None, 0)  # type: ignore[arg-type]


def _die(error: BaseException) -> None:
    print(f"the replica stops: {error!r}", file=sys.stderr, flush=True)
    os._exit(70)


def main() -> None:
    caller = Caller()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(caller, name)(**arguments)}
        except RayQueueError as error:
            answer = {"error": error.code, "text": str(error)}
        except Exception as error:  # noqa: BLE001  # whatever it is, the test is told
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
