"""Serving: the gRPC listener, with its services, bounds, health and reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rayqueue.errors import ConfigError
from rayqueue.gateway.rpc.admin import Admin
from rayqueue.gateway.rpc.calls import Letting
from rayqueue.gateway.rpc.queues import WorkQueues
from rayqueue.gateway.rpc.records import Records
from rayqueue.gateway.rpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    queues_pb2,
    queues_pb2_grpc,
    records_pb2,
    records_pb2_grpc,
)

SERVICES = (
    records_pb2.DESCRIPTOR.services_by_name["RecordService"],
    queues_pb2.DESCRIPTOR.services_by_name["QueueService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
_MIN_PING_MS = 5000
_TELL_S = 2.0


class RpcServer:
    """From ``start`` to ``stop``."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._server: Any = None
        self._health: Any = None
        self.port = 0

    async def start(self) -> None:
        settings = self._gateway.settings
        options = [
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", settings.max_connections_per_source),
            ("grpc.server_handshake_timeout_ms", settings.slow_timeout_ms),
            ("grpc.max_connection_idle_ms", settings.idle_timeout_ms),
            ("grpc.keepalive_time_ms", settings.idle_timeout_ms // 2 or 1),
            ("grpc.keepalive_timeout_ms", settings.slow_timeout_ms),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
            ("grpc.max_metadata_size", 16_384),
            ("grpc.so_reuseport", 0),
        ]
        server = self._server = grpc.aio.server(
            interceptors=[Letting(self._gateway)],
            options=options,
            maximum_concurrent_rpcs=settings.max_connections,
        )
        add_records: Any = records_pb2_grpc.add_RecordServiceServicer_to_server
        add_queues: Any = queues_pb2_grpc.add_QueueServiceServicer_to_server
        add_admin: Any = admin_pb2_grpc.add_AdminServiceServicer_to_server
        add_records(Records(self._gateway), server)
        add_queues(WorkQueues(self._gateway), server)
        add_admin(Admin(self._gateway), server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [each.full_name for each in SERVICES]
        told = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(told, server)
        where = f"{settings.host if ':' not in settings.host else f'[{settings.host}]'}:{settings.grpc_port}"
        try:
            if settings.tls_cert_path is None:
                self.port = server.add_insecure_port(where)
            else:
                pair = (settings.tls_key_path.read_bytes(), settings.tls_cert_path.read_bytes())
                self.port = server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ConfigError(f"gRPC cannot listen on {where}: is the port taken? ({error})") from None
        await server.start()
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """No new calls; those under way may take ``drain_timeout_ms``, and are told if they are not through then."""
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        if self._server is not None:
            drain_s = self._gateway.settings.drain_timeout_ms / 1000
            stopping = asyncio.ensure_future(self._server.stop(drain_s + _TELL_S))
            await self._gateway.drain.finish(drain_s)
            await stopping
