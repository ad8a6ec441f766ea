"""A gateway on a queue in memory, for the tests of the TypeScript client: prints its ports, obeys lines on its input.

``restart``: the gateway ends and another one begins on the same ports and the same queue. ``key GRANT...``: a key.
``transactions TOPIC``: a record of a transaction that is aborted, and one of another that is committed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rayqueue.config import GatewaySettings
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.server import GatewayThread
from rayqueue.testing import memory


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    with memory.connect() as rq:
        thread = GatewayThread(rq, GatewaySettings(rest_port=0, grpc_port=0, drain_timeout_ms=1000))
        gateway = thread.start()
        ports = {"rest_port": gateway.rest_port, "grpc_port": gateway.grpc_port}
        say(**ports)
        for line in sys.stdin:
            command, *words = line.split()
            if command == "restart":
                thread.stop()
                thread = GatewayThread(rq, GatewaySettings(drain_timeout_ms=1000, **ports))
                thread.start()
                say(restarted=True)
            elif command == "key":
                token, _ = KeyStore(rq).create("typescript", words)
                say(key=token.text)
            elif command == "transactions":
                with rq.producer(transactional_id="typescript") as producer:
                    aborted = producer.transaction()
                    aborted.begin()
                    aborted.send(words[0], b"aborted").result()
                    aborted.abort()
                    with producer.transaction() as tx:
                        tx.send(words[0], b"committed")
                say(committed=True)
        thread.stop()


main()
