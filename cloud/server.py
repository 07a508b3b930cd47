"""The gRPC server: the verifier's service with health and reflection, how it listens, and how it stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cloud.service import VerifierService
from cloud.verifier import Verifier
from protos import ciar_pb2 as pb
from protos import ciar_pb2_grpc
from shared.errors import LinkError, SettingsError

__all__ = ["MAX_MESSAGE_BYTES", "Server", "ServerSettings"]

MAX_MESSAGE_BYTES = 1 << 20
_DAY = 86400


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and how the service listens.

    Args:
        host, port: address; port 0 takes a free one.
        idle_seconds: a device that is silent for so long loses its slot.
        drain_seconds: how long pictures in progress may go on after a stop was asked for.

    Raises:
        SettingsError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    idle_seconds: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port: 0 to 65535 is needed, not {self.port}")
        for name in ("idle_seconds", "drain_seconds"):
            if not 0 < getattr(self, name) <= _DAY:
                raise SettingsError(
                    f"{name}: a number of seconds above 0 and up to {_DAY} is needed, not {getattr(self, name)}"
                )

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Server:
    """A gRPC server with the verifier's service, health and reflection.

    Args:
        verifier: runs the generations.
        settings: where and how to listen.
    """

    def __init__(self, verifier: Verifier, settings: ServerSettings) -> None:
        self.settings = settings
        self.service = VerifierService(verifier, settings.idle_seconds)
        self._health = health.aio.HealthServicer()
        self._names = (pb.DESCRIPTOR.services_by_name["Verifier"].full_name, "")
        self._server = grpc.aio.server(
            options=[
                # Two verifiers on one port would share its calls at random.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                # Devices ping every 10 s (device/link.py); fewer would be answered with GOAWAY.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_time_ms", 20000),
                ("grpc.keepalive_timeout_ms", 10000),
                ("grpc.http2.bdp_probe", 0),  # as on the device: device/link.py
                # While data flows other pings are under way, with a patience of their own: a minute by default.
                ("grpc.http2.ping_timeout_ms", 10000),
            ]
        )

    async def start(self) -> int:
        """Begins to listen and returns the port.

        Raises:
            LinkError: the port is in use, or the address cannot be had.
        """
        ciar_pb2_grpc.add_VerifierServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*self._names[:1], health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        try:
            port = self._server.add_insecure_port(self.settings.address)
        except RuntimeError as error:
            raise LinkError(
                f"cannot listen on {self.settings.address}: the port is in use or the address is not this host's"
            ) from error
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return int(port)

    async def stop(self) -> None:
        """Refuses new pictures, lets those in progress end within `drain_seconds`, and stops."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        # Not by the server's own grace: it closes the port at once, so that health cannot be asked, and waits for those
        # who watch it.
        await self.service.drain(self.settings.drain_seconds)
        await self._server.stop(None)

    async def _set_health(self, status: Any) -> None:
        for name in self._names:
            await self._health.set(name, status)
