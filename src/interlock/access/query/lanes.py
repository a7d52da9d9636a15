"""Serves what the process of a statement cannot reach: byte ranges of granted objects, scans of granted tables.

Each lane has a thread, since both the driver of PostgreSQL and the object store's are asked in the blocking way here. A
process can ask only by the numbers that its plan has; what they stand for never leaves the engine.
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

from interlock.access.query.tables import Snapshot, TableScan
from interlock.access.statement.protocol import ANSWER, ASK, READ, SCAN, receive_exactly
from interlock.errors import InterlockError, Unavailable

log = structlog.get_logger()

_MOST_READ: Final = 64 << 20
_JOIN_SECONDS: Final = 5.0


Reader = Callable[[int, int], bytes]
"""Bytes of one object: from an offset on, so many."""


@dataclass(slots=True)
class Lanes:
    """Of one statement."""

    readers: Sequence[Reader]
    snapshot: Snapshot | None
    scans: list[TableScan] = field(default_factory=list)
    failed: InterlockError | None = None
    """Why a store did not give what was asked for."""
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self, count: int) -> list[socket.socket]:
        """The other ends: for the process, and to be closed here once it has them."""
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
        if number < len(self.readers) and 0 < length <= _MOST_READ:
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
        """What breaks off has no last byte, and the process knows by that."""
        with os.fdopen(write, "wb") as sink:
            try:
                if self.snapshot is not None:
                    self.snapshot.stream(scan, sink)
            except BrokenPipeError:
                return
            except Exception as error:  # of a driver that may say anything, in a thread of its own
                log.warning("query.scan_failed", error=type(error).__name__)
                self.failed = self.failed or Unavailable(
                    "The data database broke off while a table was read: ask again."
                )

    def close(self) -> None:
        """What the threads wait for ends here. After the process was told to end, or its pipes would keep them."""
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
