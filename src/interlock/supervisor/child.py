"""A child process of the supervisor: started, started again when it dies, and drained.

What a child needs is handed over through a socket: settings, as variables for its environment, and the socket it is to
listen on. So it may be started before these are there, and load its modules while the servers start; and no secret
stands where other processes could see it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from interlock.errors import InterlockError

log = structlog.get_logger()

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 30.0
"""A child that lived this long had a good start: the next pause is a short one again."""
EARLY_DEATHS: Final = 3
HURRIED_SECONDS: Final = 5.0
_STDERR: Final = 2


class ChildFailed(InterlockError):
    """A child that does not come up."""

    default_code = "child_failed"


@dataclass(frozen=True)
class Handover:
    settings: Mapping[str, str]
    listener: int | None = None


class Child:
    """`hand_over` is asked at every start, since a store may have come back under another URL; it may take its time."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        hand_over: Callable[[], Awaitable[Handover]],
        *,
        environment: Mapping[str, str],
        log_file: Path,
        drain_seconds: float,
        stderr: int | None = None,
    ) -> None:
        self.name = name
        self.drain_seconds = drain_seconds
        self._arguments = arguments
        self._hand_over = hand_over
        self._environment = environment
        self._log_file = log_file
        self._stderr = stderr
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._deaths = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """None while it is between two lives."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and alive else None

    async def run(self) -> None:
        """Keeps the child alive until `stop`."""
        while not self._stopping.is_set():
            started = time.monotonic()
            ended = await self._live()
            if self._stopping.is_set():
                return
            if time.monotonic() - started > STEADY_SECONDS:
                self._deaths = 0
            self._deaths += 1
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (self._deaths - 1), LONGEST_PAUSE_SECONDS)
            log.warning("child.died", child=self.name, ended=ended, again_in_seconds=pause)
            self._note_failure(ended)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _live(self) -> str:
        ours, theirs = socket.socketpair()
        try:
            self._process = await self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            return f"not started: {error}"
        finally:
            theirs.close()
        if self._stopping.is_set():  # asked for while it was being started
            self._signal(signal.SIGKILL)
        telling = asyncio.create_task(self._tell(ours))
        try:
            return _how(await self._process.wait())
        finally:
            telling.cancel()

    async def _spawn(self, handover: int) -> asyncio.subprocess.Process:
        """In a session of its own: Ctrl-C is for the supervisor, which then drains in order."""
        # -P: what lies in the working directory is for operators to import, not for this process.
        command = [sys.executable, "-P", "-m", "interlock.cli", *self._arguments]
        supervised = ["--log-file", str(self._log_file), "--parent", str(os.getpid()), "--handover", str(handover)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *supervised,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if self._stderr is None else self._stderr,  # ours is for what the user asked for
            stderr=self._stderr,
            pass_fds=[handover],
            start_new_session=True,
        )
        log.info("child.started", child=self.name, pid=process.pid)
        return process

    async def _tell(self, channel: socket.socket) -> None:
        with channel:
            handover = await self._hand_over()
            listener = [] if handover.listener is None else [handover.listener]
            with suppress(BrokenPipeError):  # it is dead already, as `_live` hears by itself
                socket.send_fds(channel, [msgspec.json.encode(handover.settings)], listener)

    def _note_failure(self, ended: str) -> None:
        """A child that leaves by itself has said why; one that was killed may be tried again."""
        refused = ended.startswith("exit")
        if (refused or self._deaths >= EARLY_DEATHS) and not self._failed.done():
            message = f"The {self.name} does not start ({ended}): its last lines say why, also in {self._log_file}."
            self._failed.set_exception(ChildFailed(message))
            self._failed.exception()

    async def failed(self) -> None:
        """Waits until the child has shown that it cannot start, and raises that. Of interest until it is ready."""
        await asyncio.shield(self._failed)

    def restart(self) -> None:
        """Lets it drain; `run` starts it again."""
        self._signal(signal.SIGTERM)

    async def stop(self, hurry: asyncio.Event) -> None:
        self._stopping.set()
        if self._process is None or self.pid is None:
            return
        self._signal(signal.SIGTERM)
        if not await self._ended(self.drain_seconds, hurry):
            self._signal(signal.SIGTERM)  # the second one: it drains no more
            if not await self._ended(HURRIED_SECONDS):
                log.error("child.killed", child=self.name, pid=self.pid)
                self._signal(signal.SIGKILL)
                await self._process.wait()
        log.info("child.stopped", child=self.name)

    async def _ended(self, seconds: float, hurry: asyncio.Event | None = None) -> bool:
        """Waits for its end: at most so long, and no longer once `hurry` is set."""
        if self._process is None:
            return True
        ending = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait({ending, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        ended = ending.done()
        ending.cancel()
        return ended

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
