"""The warm process: has DuckDB and Arrow loaded and a bare connection open, and keeps idle forks for statements.

It has one thread, no secrets and opens nothing. `FORK` carries the sockets of a statement, which it passes to an idle
fork; each fork serves one statement. It forks a replacement when a statement has ended or has run for a while, not
immediately, because a fork costs CPU time that a short statement would wait for. `KILL` ends a fork. The exit status of
each fork is reported. When the engine ends, all forks end.
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

from interlock.processes.linux import die_with
from interlock.query.sql_gate import bare_connection
from interlock.query.statement import process
from interlock.query.statement.process import drop_descriptors, set_common_limits
from interlock.query.statement.protocol import EXIT, FORK, MAX_DESCRIPTORS, ORDER, READY

_BEGIN: Final = b"B"
_SPARES: Final = 2
"""One for the next statement, and one for a statement that arrives before a replacement is ready."""
_SPARE_SECONDS: Final = 0.25
"""A statement that runs longer than this is not noticeably delayed by a fork."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """A fork without a statement."""

    pid: int
    channel: socket.socket

    def give(self, descriptors: list[int]) -> bool:
        """Passes a statement to the fork. Returns False if the fork has died."""
        with self.channel:
            try:
                socket.send_fds(self.channel, [_BEGIN], descriptors)
            except OSError:
                os.waitpid(self.pid, 0)
                return False
        return True


class Zygote:
    def __init__(self, engine: socket.socket) -> None:
        self._engine = engine
        self._pids: dict[int, int] = {}
        """Process ids by statement number, until they are reaped, so that a kill never hits a reused process id."""
        self._spares: list[_Spare] = []
        self._reaped = False
        """True if a statement ended since the last forks: pending orders are handled first, then a replacement is
        forked.
        """
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        pa.set_memory_pool(pa.system_memory_pool())
        connection = bare_connection()
        process.warm(connection)
        # Everything loaded now stays; a garbage collection in a fork would copy its pages.
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
        data, descriptors, _, _ = socket.recv_fds(self._engine, ORDER.size, MAX_DESCRIPTORS)
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
        """Forks replacements. If the machine lacks memory for them, statements wait for their own fork."""
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

    def _live(self, parent: int, channel: socket.socket, connection: process.Connection) -> NoReturn:
        # Whatever happens, this copy must never continue the loop of the parent.
        try:
            signal.set_wakeup_fd(-1)
            die_with(parent)
            drop_descriptors([channel.fileno()])
            set_common_limits()
            process.warm(connection)
            received, descriptors, _, _ = socket.recv_fds(channel, len(_BEGIN), MAX_DESCRIPTORS)
            channel.close()
            if received:
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
    # A stop signal to all processes must let statements finish, as a drain does. Only the end of the engine ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = socket.socket(fileno=int(sys.argv[1]))
    Zygote(engine).serve()


if __name__ == "__main__":
    main()
    # Skip the shutdown of the interpreter, in which DuckDB's bindings print many messages.
    os._exit(0)
