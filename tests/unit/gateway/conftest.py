"""A gateway on a queue in memory, over real HTTP and gRPC. Skipped where its extra is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

MISSING = [
    name for name in ("fastapi", "uvicorn", "fastapi_offline", "grpc_health", "httpx") if find_spec(name) is None
]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    import httpx

    from rayqueue.config import GatewaySettings
    from rayqueue.gateway.server import Gateway, GatewayThread
    from rayqueue.testing import memory

    @pytest.fixture
    def rq() -> Iterator[memory.MemoryQueue]:
        with memory.connect() as queue:
            yield queue

    @pytest.fixture
    def start(rq: memory.MemoryQueue) -> Iterator[Callable[..., Gateway]]:
        """Start a gateway, with these settings."""
        with ExitStack() as running:

            def begin(queue: memory.MemoryQueue | None = None, **settings: Any) -> Gateway:
                wanted = GatewaySettings(**{"rest_port": 0, "grpc_port": 0, **settings})
                return running.enter_context(GatewayThread(queue or rq, wanted))

            yield begin

    @pytest.fixture
    def gateway(start: Callable[..., Gateway]) -> Gateway:
        return start()

    @pytest.fixture
    def rest(gateway: Gateway) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as client:
            yield client
