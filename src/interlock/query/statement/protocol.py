"""The protocol between the engine and the process of a statement.

    engine  ── Job ──►  process      the text to parse, with files, folder and limits
    engine  ◄── TREE ──             the parsed statement
    engine  ── Plan ──►             permission to run, with the views
    engine  ◄── SCHEMA, BATCH … ──  the rows, each frame a message of an Arrow IPC stream
    engine  ◄── DONE | FAILED ──

In addition there are lanes: sockets over which the process requests bytes of a file, or a scan of a table, that it
cannot access itself.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Final, Literal

import msgspec
from msgspec import Struct

HEADER: Final = struct.Struct(">BI")
MAX_FRAME: Final = 64 << 20
"""Limits the memory that a compromised process can make the engine use per frame."""

# Messages to and from the warm process have fixed sizes, so that none is ever read partially
ORDER: Final = struct.Struct(">cQ")
FORK, KILL = b"F", b"K"
EXIT: Final = struct.Struct(">Qi")
READY: Final = EXIT.pack(0, 0)
MAX_DESCRIPTORS: Final = 16

# Messages of a lane
ASK: Final = struct.Struct(">BIQQ")
"""Kind, number of the file or table, offset, length."""
ANSWER: Final = struct.Struct(">BQ")
"""1 and the length of the following data, or 0 if the engine could not read it."""
READ, SCAN = 1, 2
SCAN_END: Final = b"\x01"
"""The byte after a complete scan. Without it, a truncated scan would look complete."""


WHOLE: Final = "BIGNUM"
"""DuckDB's arbitrary-precision integer type, which compares and adds without loss of precision."""


class Kind(IntEnum):
    JOB = 1
    TREE = 2
    PLAN = 3
    SCHEMA = 4
    BATCH = 5
    DONE = 6
    FAILED = 7


class Job(Struct, frozen=True):
    sql: str
    folder: str
    files: list[str]
    """Paths that DuckDB opens itself. Empty if it cannot be prevented from writing to them."""
    confined: bool
    seconds: float
    memory_mb: int
    threads: int
    temp_mb: int
    rows: int
    bytes: int
    export: str | None = None
    """Path of the Parquet file to write instead of sending rows."""


class Named(Struct, frozen=True):
    """A column of the dataset schema, with its DuckDB type."""

    name: str
    type: str


class LocalFiles(Struct, frozen=True, tag=True):
    paths: list[str]
    uniform: bool


class LaneFiles(Struct, frozen=True, tag=True):
    """Files by number, with their sizes."""

    files: list[tuple[int, int]]
    uniform: bool


class LaneTable(Struct, frozen=True, tag=True):
    number: int
    schema: bytes
    """Arrow IPC schema message."""
    types: list[Named]


class View(Struct, frozen=True):
    name: str
    source: LocalFiles | LaneFiles | LaneTable
    columns: list[Named] | None
    """If None, the columns of the source."""


class Plan(Struct, frozen=True):
    views: list[View]


class Schema(Struct, frozen=True):
    arrow: bytes
    columns: list[tuple[str, str]]


class Done(Struct, frozen=True):
    rows: int
    bytes: int
    truncated: bool


Why = Literal["invalid", "memory", "temp", "store", "row", "crash"]


class Failed(Struct, frozen=True):
    why: Why
    message: str


def framed(kind: Kind, payload: bytes | memoryview) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def encoded(kind: Kind, message: Struct) -> bytes:
    return framed(kind, msgspec.msgpack.encode(message))


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. Raises EOFError if the other side closed the socket."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)
