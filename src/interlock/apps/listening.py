"""The socket that a process serves."""

from __future__ import annotations

import socket

from interlock.http.listener import bind, require_public_urls, require_safe
from interlock.settings import Settings


def listener_of(settings: Settings, address: str, name: str, descriptor: int | None) -> socket.socket:
    """Takes over the supervisor's socket, so that a restart keeps the port and drops no connection, or binds one."""
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    require_safe(address, settings)
    require_public_urls(settings)
    return bind(address, setting=name)
