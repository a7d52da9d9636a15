"""Limits on HTTP connections. Light to import: settings and the runner's rules carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Figures of one listener. 0 turns a limit off, except for `head_seconds`."""

    head_seconds: float = 10.0
    """From the connection or the first byte of a request to the end of its headers; also for a TLS handshake."""
    body_bytes_per_second: int = 256
    body_window_seconds: float = 20.0
    """The body rate is an average over windows of this length, counted only while the server reads."""
    reply_stall_seconds: float = 120.0
    """A client that takes no byte of a pending reply for this long is disconnected."""
    most: int = 4096
    most_per_peer: int = 1024
