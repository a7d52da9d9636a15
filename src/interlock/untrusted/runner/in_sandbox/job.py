"""The job that a process receives before it runs user code, and its encoding."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, Final

SANDBOX: Final = "sandbox"
"""The hostname inside the walls."""
WORK: Final = "/tmp"  # noqa: S108 - inside a private file tree
BUNDLE: Final = "/bundle"
PROGRAMS: Final = "/opt/interlock"

PROBE: Final = "probe"
"""A pseudo-language that runs no code: a trial of the walls."""

EXIT_OUT_OF_MEMORY: Final = 76
EXIT_DISK_FULL: Final = 77
EXIT_PROCESS_LIMIT: Final = 78
EXIT_BAD_BUNDLE: Final = 79
EXIT_NOT_REPORTED: Final = 80
"""Exit codes with which the user process reports which resource was exhausted, or why its outcome was not reported."""
EXIT_WALLS: Final = 81
"""The walls could not be built; no user code has run."""

_SIZE: Final = struct.Struct("!I")
_MAX_DESCRIPTORS: Final = 16


@dataclass(frozen=True)
class Place:
    """An address at which user code reaches the platform."""

    host: str
    port: int


@dataclass(frozen=True)
class Job:
    """One invocation, for the processes inside the walls."""

    language: str
    entrypoint: str
    event: dict[str, Any]
    environment: dict[str, str]
    python: str
    node: str | None
    # Paths, as the user process sees them.
    bundle: str = BUNDLE
    work: str = WORK
    programs: str = PROGRAMS
    # Walls
    namespaces: bool = False
    """The launcher creates the namespaces. False if bubblewrap has created them, or if there are none."""
    own_network: bool = False
    landlock: bool = False
    """Landlock is the only wall: also refuse what namespaces would hide."""
    user: int = 0
    """User and group to switch to; 0 for no switch."""
    root: str = ""
    """An empty folder on which the file tree is built."""
    links: dict[str, str] = field(default_factory=dict)
    read_only: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    # Limits
    memory_bytes: int = 0
    cpu_seconds: int = 0
    processes: int = 0
    disk_bytes: int = 0
    most_files: int = 0


def encode(job: Job) -> bytes:
    text = json.dumps(asdict(job)).encode()
    return _SIZE.pack(len(text)) + text


def receive(control: socket.socket) -> Job | None:
    """Returns None if the runner is gone or has no more work."""
    header = _exactly(control, _SIZE.size)
    text = _exactly(control, _SIZE.unpack(header)[0]) if header else b""
    if not text:
        return None
    fields = json.loads(text)
    return Job(**fields | {"places": [Place(**place) for place in fields["places"]]})


def _exactly(control: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = control.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def send_listeners(control: socket.socket, listeners: list[socket.socket]) -> None:
    """Sends listening sockets. They stay in the network where they were created, whichever process accepts on them."""
    socket.send_fds(control, [b"L"], [listener.fileno() for listener in listeners[:_MAX_DESCRIPTORS]])


@dataclass(frozen=True)
class Ending:
    """How the user process ended, as observed by its keeper."""

    exit_code: int | None
    signal: int | None
    disk_free: int
    files_free: int


def send_ending(control: socket.socket, ending: Ending) -> None:
    control.sendall(json.dumps(asdict(ending)).encode() + b"\n")
