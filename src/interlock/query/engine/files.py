"""Files of relations: those that DuckDB opens itself, and those that the engine reads for it over lanes.

Lanes serve data that the process of a statement cannot access itself, namely byte ranges of granted objects and
scans of granted tables.

Each lane has a thread, because both the PostgreSQL driver and the object store client block. A process can only request
the numbers in its plan; the locations behind them stay in the engine.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import obstore
import structlog
from obstore.exceptions import BaseError, NotFoundError

from interlock.errors import ConfigurationError, InterlockError, Unavailable
from interlock.query.engine.jobs import DataFile
from interlock.query.engine.tables import Snapshot, TableScan
from interlock.query.sql_pushdown import Filter, folded
from interlock.query.statement.protocol import ANSWER, ASK, READ, SCAN, receive_exactly

_GLOB: Final = re.compile(r"[*?\[\]{}]")
"""DuckDB would interpret such a path as a pattern."""
_REMOTE: Final = re.compile(r"(?P<root>[a-z][a-z0-9+.-]*://[^/]+)/(?P<key>.+)")

Store = Any
"""Any obstore store; its type stubs have no common base class."""
OpenStore = Callable[[str], Store]


def local_path(location: str) -> str | None:
    """Returns the local path, or None for a location in an object store."""
    if location.startswith("file://"):
        return unquote(location.removeprefix("file://"))
    return location if location.startswith("/") else None


def opened_by_duckdb(location: str, *, confined: bool) -> str | None:
    """Returns the path if DuckDB may open it. Without Landlock, COPY could write wherever DuckDB can read."""
    path = local_path(location)
    return path if confined and path is not None and not _GLOB.search(path) else None


@dataclass(slots=True)
class Reading:
    """Reads objects for lanes."""

    open_store: OpenStore | None
    _stores: dict[str, Store] = field(default_factory=dict)

    def size(self, file: DataFile) -> int:
        if file.size is not None:
            return file.size
        path = local_path(file.location)
        try:
            if path is not None:
                return Path(path).stat().st_size
            store, key = self._found(file.location)
            return int(obstore.head(store, key)["size"])
        except (BaseError, OSError, NotFoundError) as error:
            raise _away(error) from error

    def reader(self, file: DataFile) -> Callable[[int, int], bytes]:
        path = local_path(file.location)
        if path is not None:
            return lambda offset, length: _read_local(Path(path), offset, length)
        store, key = self._found(file.location)
        return lambda offset, length: _read_range(store, key, offset, length)

    def _found(self, location: str) -> tuple[Store, str]:
        parts = _REMOTE.fullmatch(location)
        if parts is None or self.open_store is None:
            raise ConfigurationError(f"Queries cannot read from a store with the scheme {location.split(':', 1)[0]!r}.")
        root = parts["root"]
        if root not in self._stores:
            self._stores[root] = self.open_store(root)
        return self._stores[root], parts["key"]


def _read_local(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise _away(error) from error


def _read_range(store: Store, key: str, offset: int, length: int) -> bytes:
    try:
        return bytes(obstore.get_range(store, key, start=offset, length=length))
    except (BaseError, OSError) as error:
        raise _away(error) from error


def _away(error: Exception) -> Unavailable:
    return Unavailable(f"A data file cannot be read ({type(error).__name__}); retry later.")


def pruned(files: Iterable[DataFile], filters: Sequence[Filter]) -> list[DataFile]:
    wanted = [one for one in filters if one.operator != "is not null"]
    return [file for file in files if all(_may_match(file, one) for one in wanted)]


def _may_match(file: DataFile, condition: Filter) -> bool:
    bounds = {folded(name): values for name, values in file.bounds.items()}.get(folded(condition.column))
    if bounds is None:
        return True
    if condition.operator == "is null":
        return False
    low, high = bounds
    numbers = [value for value in condition.values if isinstance(value, int)]
    if len(numbers) < len(condition.values):
        return True
    return any(_overlaps(condition.operator, number, low, high) for number in numbers)


def _overlaps(operator: str, number: int, low: int, high: int) -> bool:
    match operator:
        case "=" | "in":
            return low <= number <= high
        case "<":
            return low < number
        case "<=":
            return low <= number
        case ">":
            return high > number
        case ">=":
            return high >= number
        case _:
            return True


log = structlog.get_logger()

_MAX_READ: Final = 64 << 20
_JOIN_SECONDS: Final = 5.0


Reader = Callable[[int, int], bytes]
"""Reads `length` bytes of one object from an offset."""


@dataclass(slots=True)
class Lanes:
    """The lanes of one statement."""

    readers: Sequence[Reader]
    snapshot: Snapshot | None
    scans: list[TableScan] = field(default_factory=list)
    failed: InterlockError | None = None
    """The first error of a store."""
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self, count: int) -> list[socket.socket]:
        """Opens lanes. Returns the ends for the process, which the caller closes after passing them on."""
        theirs = []
        for number in range(count):
            ours, other = socket.socketpair()
            self._sockets.append(ours)
            theirs.append(other)
            self._start(f"query-lane-{number}", partial(self._serve, ours))
        return theirs

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, lane: socket.socket) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, number, offset, length = ASK.unpack(receive_exactly(lane, ASK.size))
                if kind == READ:
                    self._read(lane, number, offset, length)
                elif kind == SCAN:
                    self._scan(lane, number)

    def _read(self, lane: socket.socket, number: int, offset: int, length: int) -> None:
        data = b""
        there = 0
        if number < len(self.readers) and 0 < length <= _MAX_READ:
            try:
                data, there = self.readers[number](offset, length), 1
            except InterlockError as error:
                self.failed = self.failed or error
        lane.sendall(ANSWER.pack(there, len(data)))
        lane.sendall(data)

    def _scan(self, lane: socket.socket, number: int) -> None:
        if self.snapshot is None or number >= len(self.scans):
            lane.sendall(ANSWER.pack(0, 0))
            return
        read, write = os.pipe()
        scan = self.scans[number]
        self._start(f"query-scan-{number}", lambda: self._stream(scan, write))
        try:
            socket.send_fds(lane, [ANSWER.pack(1, 0)], [read])
        finally:
            os.close(read)

    def _stream(self, scan: TableScan, write: int) -> None:
        """Streams a scan. A truncated stream lacks the final byte, which the process notices."""
        with os.fdopen(write, "wb") as sink:
            try:
                if self.snapshot is not None:
                    self.snapshot.stream(scan, sink)
            except BrokenPipeError:
                return
            except Exception as error:  # a driver may raise anything, and this is a separate thread
                log.warning("query.scan_failed", error=type(error).__name__)
                self.failed = self.failed or Unavailable(
                    "The connection to the data database broke while a table was read; retry later."
                )

    def close(self) -> None:
        """Closes the lanes and ends their threads.

        Kill the process first; its open pipes would keep the threads waiting.
        """
        for lane in self._sockets:
            with suppress(OSError):
                lane.shutdown(socket.SHUT_RDWR)
        if self.snapshot is not None:
            self.snapshot.cancel()
        for thread in self._threads:
            thread.join(timeout=_JOIN_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            log.warning("query.lane_left_open", seconds=_JOIN_SECONDS)
            return
        if self.snapshot is not None:
            self.snapshot.close()
        for lane in self._sockets:
            lane.close()
