"""What a process is told before it runs a user's code, and how it is told."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, Final

SANDBOX: Final = "sandbox"
"""Name of the machine, as user code sees it."""
WORK: Final = "/tmp"  # noqa: S108 - of a file tree that holds nothing else
BUNDLE: Final = "/bundle"
PROGRAMS: Final = "/opt/interlock"

PROBE: Final = "probe"
"""A language in which nothing can be said: a trial of the walls."""

EXIT_OUT_OF_MEMORY: Final = 76
EXIT_DISK_FULL: Final = 77
EXIT_PROCESS_LIMIT: Final = 78
EXIT_BAD_BUNDLE: Final = 79
EXIT_NOT_REPORTED: Final = 80
"""By these, the user's process says what it had too little of, or why its outcome was not told."""
EXIT_WALLS: Final = 81
"""The walls could not be made: no user code has run."""

_SIZE: Final = struct.Struct("!I")
_MOST_DESCRIPTORS: Final = 16


@dataclass(frozen=True)
class Place:
    """An address of the platform: where user code asks for it."""

    host: str
    port: int


@dataclass(frozen=True)
class Job:
    """One invocation, as the processes inside need to know it."""

    language: str
    entrypoint: str
    event: dict[str, Any]
    environment: dict[str, str]
    python: str
    node: str | None
    # Where things are: as the user's process sees them.
    bundle: str = BUNDLE
    work: str = WORK
    programs: str = PROGRAMS
    # Walls
    namespaces: bool = False
    """To be made by the launcher; false where bubblewrap has made them, or where there are none."""
    own_network: bool = False
    landlock: bool = False
    """The only wall: also refuse what namespaces would hide."""
    user: int = 0
    """User and group to become; 0 to stay who this is."""
    root: str = ""
    """An empty folder to build the file tree on."""
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
    """None when the runner is gone, or has no work any more."""
    header = _exactly(control, _SIZE.size)
    text = _exactly(control, _SIZE.unpack(header)[0]) if header else b""
    if not text:
        return None
    told = json.loads(text)
    return Job(**told | {"places": [Place(**place) for place in told["places"]]})


def _exactly(control: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = control.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def send_listeners(control: socket.socket, listeners: list[socket.socket]) -> None:
    """They stay in the network that they were made in, wherever the process is that accepts from them."""
    socket.send_fds(control, [b"L"], [listener.fileno() for listener in listeners[:_MOST_DESCRIPTORS]])


@dataclass(frozen=True)
class Ending:
    """How the user's process ended, as its keeper saw it."""

    exit_code: int | None
    signal: int | None
    disk_free: int
    files_free: int


def send_ending(control: socket.socket, ending: Ending) -> None:
    control.sendall(json.dumps(asdict(ending)).encode() + b"\n")
