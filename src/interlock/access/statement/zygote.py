"""The warm process: DuckDB and Arrow are loaded, a bare connection is open, and forks of it wait for statements.

It has one thread, holds no secret and opens nothing. `FORK` comes with the sockets of a statement, which a fork that
waits is given; each serves one statement. Another one is made when that one has ended, or has taken a while: not at
once, since a fork costs processor time that a short statement would wait for. `KILL` ends one, and each end is told
with its status. When the engine is gone, so are all that were forked.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

import pyarrow as pa

from interlock.access.sql_gate import bare_connection
from interlock.access.statement import process
from interlock.access.statement.confinement import bound_all_alike, die_with_parent, let_go
from interlock.access.statement.protocol import EXIT, FORK, MOST_DESCRIPTORS, ORDER, READY

_BEGIN: Final = b"B"
_SPARES: Final = 2
"""One for the next statement, and one for that which comes before another is ready."""
_SPARE_SECONDS: Final = 0.25
"""A statement that takes longer does not notice another fork."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """A fork that has no statement yet."""

    pid: int
    door: socket.socket

    def give(self, descriptors: list[int]) -> bool:
        """False if it has died meanwhile."""
        with self.door:
            try:
                socket.send_fds(self.door, [_BEGIN], descriptors)
            except OSError:
                os.waitpid(self.pid, 0)
                return False
        return True


class Zygote:
    def __init__(self, engine: socket.socket) -> None:
        self._engine = engine
        self._pids: dict[int, int] = {}
        """By number of the statement: those that are not reaped, so that a number kills nobody else."""
        self._spares: list[_Spare] = []
        self._reaped = False
        """A statement has ended since spares were made: orders come first, and then another one is."""
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        pa.set_memory_pool(pa.system_memory_pool())
        connection = bare_connection()
        process.warm(connection)
        # What is there now stays: collecting it in a fork would copy its pages.
        gc.freeze()
        self._engine.sendall(READY)
        self._make_spares(connection)
        try:
            while self._serve_one(connection):
                pass
        finally:
            self._end_all()

    def _serve_one(self, connection: process.Connection) -> bool:
        engine = self._engine.fileno()
        wait = None if len(self._spares) == _SPARES else 0.0 if self._reaped else _SPARE_SECONDS
        readable, _, _ = select.select([engine, self._woken], [], [], wait)
        if self._woken in readable:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        if engine not in readable:
            self._make_spares(connection)
            return True
        data, descriptors, _, _ = socket.recv_fds(self._engine, ORDER.size, MOST_DESCRIPTORS)
        if len(data) < ORDER.size:
            return False
        order, number = ORDER.unpack(data)
        if order == FORK:
            self._begin(number, descriptors, connection)
        elif pid := self._pids.get(number):
            os.kill(pid, signal.SIGKILL)
        return True

    def _begin(self, number: int, descriptors: list[int], connection: process.Connection) -> None:
        spare = self._spares.pop(0) if self._spares else None
        if spare is None or not spare.give(descriptors):
            spare = self._forked(connection)
            spare.give(descriptors)
        self._pids[number] = spare.pid
        for descriptor in descriptors:
            os.close(descriptor)

    def _make_spares(self, connection: process.Connection) -> None:
        """While the machine has no room for one, statements wait for a fork of their own."""
        self._reaped = False
        with suppress(OSError):
            while len(self._spares) < _SPARES:
                self._spares.append(self._forked(connection))

    def _forked(self, connection: process.Connection) -> _Spare:
        parent = os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._live(parent, theirs, connection)
        theirs.close()
        return _Spare(pid, ours)

    def _live(self, parent: int, door: socket.socket, connection: process.Connection) -> NoReturn:
        # Whatever happens, this copy never goes on with the loop above.
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            let_go([door.fileno()])
            bound_all_alike()
            process.warm(connection)
            said, descriptors, _, _ = socket.recv_fds(door, len(_BEGIN), MOST_DESCRIPTORS)
            door.close()
            if said:
                process.run(descriptors, connection)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                del self._pids[number]
                self._reaped = True
                with suppress(BrokenPipeError):
                    self._engine.sendall(EXIT.pack(number, os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        for pid in [*self._pids.values(), *(spare.pid for spare in self._spares)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    # Ctrl-C goes to the whole group, and a drain lets statements end: only the engine's end is the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = socket.socket(fileno=int(sys.argv[1]))
    Zygote(engine).serve()


if __name__ == "__main__":
    main()
    # Without the interpreter's end: DuckDB's bindings have much to say there.
    os._exit(0)
