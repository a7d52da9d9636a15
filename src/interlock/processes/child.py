"""A child process in a session of its own: start it, signal it, keep the tail of its output, end it with its group.

Embedded servers have their own form, because they outlive the process that started them, and so do the forks of the
warm query process and the Lambda function, which run without an event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

_CHUNK: Final = 1 << 16
_TAIL_SECONDS: Final = 2.0


def scrubbed(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Returns only the named variables, and never a setting of Interlock."""
    kept = {name for name in names if not name.upper().startswith("INTERLOCK_")}
    return {name: value for name, value in environment.items() if name in kept}


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.tail = bytearray()
        """The last bytes of its output, after `keep_tail`."""
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Iterable[int] = (),
        stdout: int = subprocess.DEVNULL,
        stderr: int | None = None,
        cwd: str | None = None,
    ) -> Child:
        """Starts it in a new session: Ctrl-C in the terminal reaches only this process, which ends its children."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """Negative for a signal, as in `subprocess`; None while the child runs."""
        return self._process.returncode

    @property
    def output(self) -> asyncio.StreamReader:
        """Its standard output, if it was started with `stdout=PIPE`."""
        if self._process.stdout is None:
            raise RuntimeError(f"child {self.pid} was started without a pipe for its output")
        return self._process.stdout

    def keep_tail(self, size: int) -> None:
        """Reads all output, so that the child never blocks, and keeps the last `size` bytes."""
        self._reading = asyncio.create_task(self._read(size))

    async def _read(self, size: int) -> None:
        while chunk := await self.output.read(_CHUNK):
            self.tail += chunk
            del self.tail[:-size]

    def signal(self, number: signal.Signals) -> None:
        """Signals the child, not its group."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the child and its group. Does nothing after its end, because its id may belong to another process."""
        if self.alive:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for the end of the child, and briefly for its last output, which a detached process may hold open."""
        returncode = await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_TAIL_SECONDS)
            self._reading.cancel()
        return returncode

    async def wait_for_group(self) -> int:
        """Waits for the end of the child, and at once kills what it left running in its group.

        Not for a child with `stdout=PIPE`: Python 3.11 waits until no process holds the pipe any more.
        """
        returncode = await self._process.wait()
        self._kill_group()
        return returncode

    async def ended(self, seconds: float, hurry: asyncio.Event | None = None) -> bool:
        """Waits for the end of the child, up to `seconds`, or until `hurry` is set. Returns True if it ended."""
        waits = {asyncio.ensure_future(self._process.wait())}
        if hurry is not None:
            waits.add(asyncio.ensure_future(hurry.wait()))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        return not self.alive

    async def stop(self, seconds: float) -> bool:
        """Sends SIGTERM, and kills the group after `seconds`. Returns True if that was not necessary."""
        self.signal(signal.SIGTERM)
        in_time = await self.ended(seconds)
        self.kill()
        await self.wait()
        return in_time
