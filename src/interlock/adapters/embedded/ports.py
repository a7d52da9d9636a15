"""Loopback ports for servers whose address must survive a restart."""

from __future__ import annotations

import secrets
import socket
from typing import Final

LOOPBACK: Final = "127.0.0.1"
# Below the ports that Linux and macOS hand to outgoing connections: such a connection could otherwise hold
# the port of a server that is down, and the server would come back under another URL.
CHOICES: Final = range(20_000, 32_768)
_TRIES: Final = 200


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: connections in TIME_WAIT of the server's previous life do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def choose(preferred: int | None) -> int:
    """`preferred` when nobody else has it, else any free port."""
    if preferred is not None and is_free(preferred):
        return preferred
    for _ in range(_TRIES):
        port = secrets.choice(CHOICES)
        if is_free(port):
            return port
    raise OSError(f"no free port on {LOOPBACK} between {CHOICES.start} and {CHOICES.stop - 1}")
