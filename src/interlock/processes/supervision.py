"""Supervision: child processes that are restarted when they die, and signals to the supervisor.

The supervisor sends settings (as environment variables) and the listening socket through a socket pair. A child can
therefore start and load its modules before these exist, while the servers start. No secret appears in a command line or
environment that other processes can see.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog

from interlock.errors import InterlockError
from interlock.processes.child import Child
from interlock.processes.linux import ORPHANED

log = structlog.get_logger()

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 30.0
"""A child that lived this long started successfully: the backoff is reset."""
EARLY_DEATHS: Final = 3
HURRIED_SECONDS: Final = 5.0
_STDERR: Final = 2


class ChildFailed(InterlockError):
    """Raised when a child does not start."""

    default_code = "child_failed"


@dataclass(frozen=True)
class Handover:
    settings: Mapping[str, str]
    listener: int | None = None


class SupervisedChild:
    """Runs one child. `hand_over` is awaited at every start, because a store may have moved to another URL."""

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
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._deaths = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """The process id, or None while the child is not running."""
        return self._child.pid if self._child is not None and self._child.alive else None

    async def run(self) -> None:
        """Keeps the child running until `stop`."""
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
            self._child = await self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            return f"not started: {error}"
        finally:
            theirs.close()
        if self._stopping.is_set():  # stop() was called during the start
            self._child.kill()
        sending = asyncio.create_task(self._send_handover(ours))
        try:
            return _exit_text(await self._child.wait())
        finally:
            sending.cancel()

    async def _spawn(self, handover: int) -> Child:
        # -P: operators import modules from the working directory; this process must not.
        command = [sys.executable, "-P", "-m", "interlock.cli", *self._arguments]
        supervised = ["--log-file", str(self._log_file), "--parent", str(os.getpid()), "--handover", str(handover)]
        child = await Child.start(
            [*command, *supervised],
            environment=self._environment,
            descriptors=[handover],
            # Our stdout is for the output that the user requested.
            stdout=_STDERR if self._stderr is None else self._stderr,
            stderr=self._stderr,
        )
        log.info("child.started", child=self.name, pid=child.pid)
        return child

    async def _send_handover(self, channel: socket.socket) -> None:
        with channel:
            handover = await self._hand_over()
            listener = [] if handover.listener is None else [handover.listener]
            with suppress(BrokenPipeError):  # the child is already dead, which `_live` notices
                socket.send_fds(channel, [msgspec.json.encode(handover.settings)], listener)

    def _note_failure(self, ended: str) -> None:
        """Records that the child cannot start.

        A child that exited printed the reason; one that was killed may be retried.
        """
        refused = ended.startswith("exit")
        if (refused or self._deaths >= EARLY_DEATHS) and not self._failed.done():
            message = f"The {self.name} does not start ({ended}); see its last log lines, also in {self._log_file}."
            self._failed.set_exception(ChildFailed(message))
            self._failed.exception()

    async def failed(self) -> None:
        """Waits until the child has failed to start, and raises the error. Only relevant until the child is ready."""
        await asyncio.shield(self._failed)

    def restart(self) -> None:
        """Asks the child to drain; `run` starts it again."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    async def stop(self, hurry: asyncio.Event) -> None:
        self._stopping.set()
        if self._child is None or not self._child.alive:
            return
        self._child.signal(signal.SIGTERM)
        # The signal of `stop` is the second one, which ends the drain.
        if not await self._child.ended(self.drain_seconds, hurry) and not await self._child.stop(HURRIED_SECONDS):
            log.error("child.killed", child=self.name, pid=self._child.pid)
        log.info("child.stopped", child=self.name)


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


_MAX_BYTES: Final = 1 << 16


def take_over(channel: int) -> int | None:
    """Waits for the supervisor's handover: environment variables, and optionally a listening socket."""
    with socket.socket(fileno=channel) as supervisor:
        received, listeners, _, _ = socket.recv_fds(supervisor, _MAX_BYTES, 1)
        while more := supervisor.recv(_MAX_BYTES):
            received += more
    if not received:  # the supervisor ended before the handover
        os._exit(ORPHANED)
    os.environ.update(msgspec.json.decode(received, type=dict[str, str]))
    return listeners[0] if listeners else None


T = TypeVar("T")

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """Raised when a drain is requested before the current work is complete."""


class Interrupts:
    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurry = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            log.warning("hurrying", signal=number.name)
            self.hurry.set()
        else:
            log.info("draining", signal=number.name, hint="send it again to hurry")
            self.requested.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. If a drain is requested first, cancels `work` and raises Interrupted."""
        working = asyncio.create_task(work)
        requested = asyncio.create_task(self.requested.wait())
        try:
            await asyncio.wait({working, requested}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted
        finally:
            requested.cancel()
            working.cancel()
            await asyncio.wait({working})
