"""What the engine and the process of a statement say to each other.

    engine  ── Job ──►  process      parse this; these are the files, the folder and the limits
    engine  ◄── TREE ──             the parsed statement
    engine  ── Plan ──►             it may run, over these views
    engine  ◄── SCHEMA, BATCH … ──  the rows, each frame a message of an Arrow IPC stream
    engine  ◄── DONE | FAILED ──

Besides there are lanes: sockets by which the process asks for bytes of a file, or for a scan of a table, that it has no
way to reach itself.
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
"""Whatever a process has become, it does not make the engine hold more than this at once."""

# To the process that others are forked from, and back: fixed sizes, so that none is ever read in part
ORDER: Final = struct.Struct(">cQ")
FORK, KILL = b"F", b"K"
EXIT: Final = struct.Struct(">Qi")
READY: Final = EXIT.pack(0, 0)
MOST_DESCRIPTORS: Final = 16

# Of a lane
ASK: Final = struct.Struct(">BIQQ")
"""Kind, number of the file or the table, offset, length."""
ANSWER: Final = struct.Struct(">BQ")
"""1 and the length of what follows, or 0: the engine knows why."""
READ, SCAN = 1, 2
SCAN_END: Final = b"\x01"
"""After a scan's last byte: one that broke off ends like any other otherwise."""


WHOLE: Final = "BIGNUM"
"""DuckDB's integers of any length, compared and added up without losing a digit."""


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
    """Paths that DuckDB opens itself. Empty where it cannot be kept from writing to them."""
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
    """A column as the dataset's schema has it, with DuckDB's word for its type."""

    name: str
    type: str


class LocalFiles(Struct, frozen=True, tag=True):
    paths: list[str]
    uniform: bool


class LaneFiles(Struct, frozen=True, tag=True):
    """By their numbers, with their sizes."""

    files: list[tuple[int, int]]
    uniform: bool


class LaneTable(Struct, frozen=True, tag=True):
    number: int
    schema: bytes
    """Arrow IPC."""
    types: list[Named]


class View(Struct, frozen=True):
    name: str
    source: LocalFiles | LaneFiles | LaneTable
    columns: list[Named] | None
    """None: those of the source."""


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
    """Raises EOFError when the other side is gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)
