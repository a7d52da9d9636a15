"""Resources of this machine for embedded servers: free ports that survive restarts, and memory."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Final

import psutil

LOOPBACK: Final = "127.0.0.1"
# Below the ephemeral ports of Linux and macOS: an outgoing connection could otherwise take the port of a stopped
# server,
# and the server would restart with another URL.
CHOICES: Final = range(20_000, 32_768)
_TRIES: Final = 200


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # The servers also set this: connections in TIME_WAIT from an earlier run do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def choose(preferred: int | None) -> int:
    """Returns `preferred` if it is free, otherwise any free port."""
    if preferred is not None and is_free(preferred):
        return preferred
    for _ in range(_TRIES):
        port = secrets.choice(CHOICES)
        if is_free(port):
            return port
    raise OSError(f"no free port on {LOOPBACK} between {CHOICES.start} and {CHOICES.stop - 1}")


_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def memory_mib() -> int:
    """Returns the memory of the machine, or the limit of the container."""
    total = psutil.virtual_memory().total
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else ""
    return (min(total, int(limit)) if limit.isdecimal() else total) // (1024 * 1024)
