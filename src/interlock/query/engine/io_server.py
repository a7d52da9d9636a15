"""Lanes: serve data that the process of a statement cannot access itself, namely byte ranges of granted objects and
scans of granted tables.

Each lane has a thread, because both the PostgreSQL driver and the object store client block. A process can only request
the numbers in its plan; the locations behind them stay in the engine.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from interlock.errors import InterlockError, Unavailable
from interlock.query.engine.tables import Snapshot, TableScan
from interlock.query.statement.protocol import ANSWER, ASK, READ, SCAN, receive_exactly

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
