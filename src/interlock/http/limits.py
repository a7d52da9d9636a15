"""Limits on HTTP connections. Cheap to import, because the rules of the runner include them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one listener. 0 disables a limit, except for `head_seconds`."""

    head_seconds: float = 10.0
    """Timeout from the connection, or the first byte of a request, to the end of its headers; also of TLS handshakes.
    """
    body_bytes_per_second: int = 256
    body_window_seconds: float = 20.0
    """Window over which the body rate is averaged. Only time in which the server reads counts."""
    reply_stall_seconds: float = 120.0
    """A client that reads no byte of a pending response for this long is disconnected."""
    connections: int = 4096
    per_peer: int = 1024
