"""A child process, seen from the wrapper: start it, hand it work, hear from it, end it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Generic, Literal, TypeVar, cast

import structlog

from interlock.wire import Crash
from interlock.workers import crash, protocol
from interlock.workers.held import Held, Variables
from interlock.workers.redaction import Redaction

log = structlog.get_logger()

PIPE_BYTES = 1 << 20
"""Room for reports while the wrapper is busy: a child waits when it is full."""
READ_PAUSE_SECONDS = 0.002
"""Reports that follow close on each other are read together. The first one is read at once."""
STUCK_SECONDS = 0.5
EOF_SECONDS = 5.0
LINE = 2_000

PASSED_ON = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)

Why = Literal["cancel", "lost", "timeout", "drain", "spent"]


def scrubbed(environment: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """What operator code may know of the environment: what is listed, and never a setting of Interlock."""
    listed = PASSED_ON | {name for name in also if not name.upper().startswith("INTERLOCK_")}
    kept = {name: value for name, value in environment.items() if name in listed or name.startswith("LC_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Launch:
    """What every child of a worker is started with."""

    memory_mb: int | None = None
    result_limit: int = 65_536
    modules: tuple[str, ...] = ()
    """Imported at the start."""
    operators: tuple[str, ...] = ()
    """Folders and modules whose declared operators may be run."""
    hidden: tuple[str, ...] = ()
    """Files and folders that operators cannot open."""
    kept: tuple[str, ...] = ()
    """Folders in these that they work in all the same."""
    environment: tuple[str, ...] = ()
    """Names of further variables for the environment of the process itself."""
    data_url: str | None = field(default=None, repr=False)
    """Told with a task of an operator of the platform's own, and never through the environment."""
    outbound: protocol.Outbound | None = field(default=None, repr=False)
    """Told in the same way to operators that ask other servers."""
    variables: Variables = field(default_factory=dict, repr=False)
    """Told with tasks of their org, and never through the environment."""
    kernel_kills: crash.KernelKills = field(default_factory=crash.KernelKills)
    """Of all children together: the kernel counts them in one."""

    def command(self, work: int, control: int, reports: int) -> list[str]:
        numbers = {
            "--work": work,
            "--control": control,
            "--reports": reports,
            "--parent": os.getpid(),
            "--memory-mb": self.memory_mb or 0,
            "--result-limit": self.result_limit,
        }
        flags = [part for name, number in numbers.items() for part in (name, str(number))]
        flags += [part for given in self.operators for part in ("--operators", given)]
        flags += [part for path in self.hidden for part in ("--hidden", path)]
        flags += [part for path in self.kept for part in ("--kept", path)]
        return [sys.executable, "-m", "interlock.workers.child", *flags, *self.modules]


class OperatorProcess:
    """A process that runs operators: its pipes, and its end."""

    def __init__(self, process: asyncio.subprocess.Process, work: asyncio.WriteTransport, reports: Reports) -> None:
        self._process, self._work, self._reports = process, work, reports
        self.pid = process.pid
        self.ready = False
        self.redaction = Redaction()
        self.stopping: tuple[Why, int] | None = None
        """Why it was killed, and the slot that was meant."""

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def answer_emit(self, answer: protocol.EmitAnswered) -> None:
        self._send(answer)

    def _send(self, message: protocol.ToChild | protocol.ToDriver) -> None:
        if isinstance(message, protocol.Assign):
            self.redaction.given(message)
        if not self._work.is_closing():
            self._work.write(protocol.frame(message))

    def kill(self, why: Why, slot: int = 0) -> None:
        """End the process and whatever it started, now."""
        if self.stopping is None:
            self.stopping = (why, slot)
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def retire(self) -> None:
        """Let an idle process end by itself: its work pipe ends."""
        self._work.close()

    async def _gone(self) -> int:
        """When the process is dead and every report it managed to write has been heard. Its return code."""
        try:
            returncode = await self._process.wait()
            self._kill_group()
            await self._reports.heard_out(EOF_SECONDS)
        finally:
            self._work.close()
            self._reports.close()
        return returncode


class ChildProcess(OperatorProcess):
    """`assigned` holds what the child has and has not answered, in the order in which it runs them."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        work: asyncio.WriteTransport,
        reports: Reports,
        control: int,
        kernel_kills: crash.KernelKills,
    ) -> None:
        super().__init__(process, work, reports)
        self._control = control
        self._kernel_kills = kernel_kills
        self.assigned: deque[Held] = deque()
        self.load = 0.0
        """Seconds of work assigned, by the estimates."""
        self.head_since = 0.0
        """When the first of `assigned` became the first."""
        self.recalled = False
        self.stale = False
        """It gets no new work, and ends with what it has: newer code has come."""

    @property
    def head(self) -> Held | None:
        return self.assigned[0] if self.assigned else None

    @property
    def head_seconds(self) -> float:
        return time.monotonic() - self.head_since if self.assigned else 0.0

    @property
    def stuck(self) -> bool:
        """Long on one task: nothing is queued behind it."""
        return self.head_seconds > STUCK_SECONDS

    def assign(self, tasks: list[Held]) -> None:
        if not self.assigned:
            self.head_since = time.monotonic()
        self.assigned.extend(tasks)
        self.load += sum(held.estimate for held in tasks)
        for lease, together in groupby(tasks, attrgetter("lease")):
            self._send(protocol.Assign(lease.work, [held.assignment() for held in together]))

    def answered(self, slot: int) -> Held:
        """The slot that the child has just dealt with: the first, as it works in order."""
        held = self.assigned.popleft()
        if held.slot != slot:
            raise RuntimeError(f"child {self.pid} answered slot {slot} while {held.slot} was next")
        self._lighten(held)
        self.head_since = time.monotonic()
        return held

    def given_back(self, slots: Iterable[int]) -> list[Held]:
        """The slots that the child returns unstarted: the last ones."""
        back = set(slots)
        returned = [held for held in self.assigned if held.slot in back]
        if returned:
            self.assigned = deque(held for held in self.assigned if held.slot not in back)
        for held in returned:
            self._lighten(held)
        self.recalled = False
        return returned

    def _lighten(self, held: Held) -> None:
        self.load = self.load - held.estimate if self.assigned else 0.0

    def cancel(self, held: Held) -> None:
        """Raise TaskCanceled in the operator, or keep it from starting."""
        self._order(protocol.CANCEL, held.slot)

    def pause(self, held: Held) -> None:
        """Let the operator know whether it is to hold still."""
        self._order(protocol.PAUSE if held.paused else protocol.RESUME, held.slot)

    def recall(self) -> None:
        """Ask for all that is not started; a GivenBack answers."""
        if not self.recalled:
            self.recalled = True
            self._order(protocol.RECALL, 0)

    def _order(self, kind: int, slot: int) -> None:
        # A dead child has no reader: its supervision hears of the death by itself.
        with suppress(BrokenPipeError, ProcessLookupError):
            os.write(self._control, protocol.CONTROL.pack(kind, slot))
            os.kill(self.pid, signal.SIGUSR1)

    async def ended(self) -> Crash:
        try:
            returncode = await self._gone()
        finally:
            os.close(self._control)
        return crash.crash_of(returncode, self._kernel_kills)


class Reports(asyncio.Protocol):
    """The reading end of a child's reports. Hands on whole batches of them, at most one per READ_PAUSE_SECONDS."""

    def __init__(self) -> None:
        self._frames = protocol.for_wrapper()
        self._transport: asyncio.ReadTransport | None = None
        self._resume: asyncio.TimerHandle | None = None
        self.heard: Callable[[list[protocol.ToWrapper]], None] = lambda _: None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        messages = self._frames.feed(data)
        if self._transport is not None and self._resume is None:
            self._transport.pause_reading()
            self._resume = asyncio.get_running_loop().call_later(READ_PAUSE_SECONDS, self._go_on)
        self.heard(messages)

    def _go_on(self) -> None:
        self._resume = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self.ended.set()

    async def heard_out(self, seconds: float) -> None:
        """When nothing can follow. A program that left the child's session may keep the pipe open: not for ever."""
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            log.warning("worker.reports_left_open", seconds=seconds)

    def close(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
        if self._transport is not None:
            self._transport.close()


class Output(asyncio.Protocol):
    """What a child writes to its file descriptors 1 and 2 past Python: programs it starts, the interpreter's end."""

    def __init__(self) -> None:
        self._rest = b""
        self.heard: Callable[[str], None] = lambda _: None

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self.heard(line[:LINE].decode("utf-8", "replace"))

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._rest:
            self.heard(self._rest[:LINE].decode("utf-8", "replace"))


class Pipe:
    """A pipe whose ends are owned by exactly one party each; closing is safe to repeat."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        with suppress(OSError):  # an unprivileged user may have used up the budget for large pipes
            fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


P = TypeVar("P", bound=OperatorProcess)


@dataclass(frozen=True)
class Ears(Generic[P]):
    """Who hears what a process reports, and what it prints past Python."""

    heard: Callable[[P, list[protocol.ToWrapper]], None]
    printed: Callable[[P, str], None]


async def start(
    launch: Launch,
    heard: Callable[[ChildProcess, list[protocol.ToWrapper]], None],
    printed: Callable[[ChildProcess, str], None],
) -> ChildProcess:
    """Start a child. It is of use once it has reported `Ready`."""
    control = Pipe()

    def made(process: asyncio.subprocess.Process, work: asyncio.WriteTransport, reports: Reports) -> ChildProcess:
        return ChildProcess(process, work, reports, control.write, launch.kernel_kills)

    try:
        return await spawn(
            lambda work, reports: launch.command(work, control.read, reports),
            scrubbed(os.environ, launch.environment),
            made,
            Ears(heard, printed),
            control.read,
        )
    except BaseException:
        os.close(control.write)
        raise
    finally:
        os.close(control.read)


async def spawn(
    command: Callable[[int, int], list[str]],
    environment: Mapping[str, str],
    made: Callable[[asyncio.subprocess.Process, asyncio.WriteTransport, Reports], P],
    ears: Ears[P],
    *also: int,
) -> P:
    """Start a process with pipes for work and reports, whose descriptors `command` is given; it inherits `also`."""
    work, reports, output = Pipe(), Pipe(), Pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command(work.read, reports.write),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.write,
            stderr=output.write,
            env=environment,
            pass_fds=(work.read, reports.write, *also),
            start_new_session=True,
        )
    finally:
        for descriptor in (work.read, reports.write, output.write):
            os.close(descriptor)
    loop = asyncio.get_running_loop()
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(work.write, "wb", 0))
    reader, output_reader = Reports(), Output()
    started = made(process, writer, reader)
    reader.heard = lambda messages: ears.heard(started, started.redaction.cleaned(messages))
    output_reader.heard = lambda line: ears.printed(started, started.redaction.line(line))
    await loop.connect_read_pipe(lambda: reader, os.fdopen(reports.read, "rb", 0))
    await loop.connect_read_pipe(lambda: output_reader, os.fdopen(output.read, "rb", 0))
    return started
