"""The wrapper's side of a child process: start it, assign work, read its reports, end it, and explain its exit.

`Tenancy` decides which tasks may share a process, so that operators find no secrets of another org or of the platform.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast
from uuid import UUID

import structlog

from interlock.processes import child
from interlock.processes.child import Child
from interlock.wire.tasks import Crash
from interlock.workers import protocol
from interlock.workers.claimed_tasks import Held, Variables
from interlock.workers.operators import runs_users_code
from interlock.workers.redaction import Redaction

if TYPE_CHECKING:
    from interlock.workers.claimed_tasks import Lease


class Tenancy:
    """The kinds of tasks that a process was assigned, which decide what it may be assigned next.

    An operator can search the memory of its process, and can leave a thread there that searches it later. If two tasks
    must not share a process, neither may therefore come first.
    """

    def __init__(self) -> None:
        self._orgs: set[UUID] = set()
        self._private = False
        self._credentials = False
        self._users_code = False

    def admits(self, lease: Lease) -> bool:
        if (self._private or lease.private) and not self._orgs <= {lease.org_id}:
            return False
        credentials = self._credentials or lease.credentials
        return not credentials or not (self._users_code or runs_users_code(lease.work.operator))

    def add(self, lease: Lease) -> None:
        self._orgs.add(lease.org_id)
        self._private |= lease.private
        self._credentials |= lease.credentials
        self._users_code |= runs_users_code(lease.work.operator)


_cgroup_line = re.compile(r"^\d+:(?P<controllers>[^:]*):(?P<path>.*)$", re.MULTILINE)
_killed = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Returns the number of OOM kills in this process's control group; None if the kernel has no counter."""
    for path in _counters():
        try:
            found = _killed.search(path.read_text())
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _counters() -> list[Path]:
    """Returns possible files of the counter: `memory.events` with cgroup v2, `memory.oom_control` with v1."""
    try:
        lines = _cgroup_line.findall(Path("/proc/self/cgroup").read_text())
    except OSError:
        return []
    unified = [ROOT / path.lstrip("/") / "memory.events" for controllers, path in lines if not controllers]
    legacy = [
        ROOT / "memory" / path.lstrip("/") / "memory.oom_control"
        for controllers, path in lines
        if "memory" in controllers.split(",")
    ]
    return unified + legacy


class KernelKills:
    """Attributes OOM kills to children. The kernel only counts them, so each count explains one death."""

    def __init__(self) -> None:
        self._explained = oom_kills()

    def explain(self) -> bool:
        """Returns True if an OOM kill explains the child that was just killed."""
        kills = oom_kills()
        if kills is None or self._explained is None or kills <= self._explained:
            return False
        self._explained += 1
        return True


def crash_of(returncode: int, kernel_kills: KernelKills) -> Crash:
    """Describes an exit. `returncode` has the meaning that it has in `subprocess`: negative for a signal."""
    if returncode >= 0:
        return Crash(exit_code=returncode, oom=returncode == EXIT_OUT_OF_MEMORY)
    oom = returncode == -signal.SIGKILL and kernel_kills.explain()
    return Crash(signal=signal_name(-returncode), oom=oom)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sentence(crash: Crash, process: str = "The process that ran this task") -> str:
    if crash.oom:
        return f"{process} ran out of memory: give the runtime more memory, or split the task."
    how = f"was killed by {crash.signal}" if crash.signal else f"ended with exit code {crash.exit_code}"
    return f"{process} {how}."


EXIT_OUT_OF_MEMORY = 76
"""The child's own code ran out of memory, outside an operator."""
EXIT_SPARK_DIED = 77
"""The JVM of the driver has ended."""


log = structlog.get_logger()

PIPE_BYTES = 1 << 20
"""Buffer for reports while the wrapper is busy. A child blocks when it is full."""
READ_PAUSE_SECONDS = 0.002
"""Pause between two reads, so that reports in quick succession are read together. The first is read immediately."""
STUCK_SECONDS = 0.5
EOF_SECONDS = 5.0
OUTPUT_SECONDS = 0.2
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
    """Returns the environment for operator code: only listed variables, and never a setting of Interlock."""
    locale = (name for name in environment if name.startswith("LC_"))
    return child.scrubbed(environment, (*PASSED_ON, *locale, *also)) | {"PYTHONUNBUFFERED": "1"}


def python(module: str) -> list[str]:
    """Returns the command that runs a module of the platform.

    -P: the working directory may contain files of users, and the module's own imports run before it is confined.
    """
    return [sys.executable, "-P", "-m", module]


@dataclass(frozen=True)
class Launch:
    """Options with which every child of a worker is started."""

    memory_mb: int | None = None
    result_limit: int = 1 << 20
    modules: tuple[str, ...] = ()
    """Modules that the child imports when it starts."""
    operators: tuple[str, ...] = ()
    """Folders and modules whose declared operators may be run."""
    hidden: tuple[str, ...] = ()
    """Files and folders that operators cannot open."""
    kept: tuple[str, ...] = ()
    """Folders inside the hidden ones that operators can use."""
    reload: bool = False
    """Tasks run with the operators' current files, in a new process if they were edited."""
    environment: tuple[str, ...] = ()
    """Names of further variables for the environment of the process itself."""
    data_url: str | None = field(default=None, repr=False)
    """Sent with tasks of the platform's own operators, and never through the environment."""
    outbound: protocol.Outbound | None = field(default=None, repr=False)
    """Sent in the same way to operators that send requests to other servers."""
    variables: Variables = field(default_factory=dict, repr=False)
    """Sent with tasks of their org, and never through the environment."""
    kernel_kills: KernelKills = field(default_factory=KernelKills)
    """Shared by all children, since the kernel has one counter for them."""

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
        flags += ["--reload"] if self.reload else []
        return [*python("interlock.workers.child"), *flags, *self.modules]


class OperatorProcess:
    """A process that runs operators: its pipes and its exit."""

    def __init__(self, process: Child, work: asyncio.WriteTransport, reports: Reports) -> None:
        self._process, self._work, self._reports = process, work, reports
        self.pid = process.pid
        self.ready = False
        self.redaction = Redaction()
        self.output_ended = asyncio.Event()
        """Set when everything that bypassed Python's streams is read, such as the last words of a crash."""
        self.stopping: tuple[Why, int] | None = None
        """The reason why it was killed, and the slot on whose account."""

    @property
    def alive(self) -> bool:
        return self._process.alive

    def answer_emit(self, answer: protocol.EmitAnswered) -> None:
        self._send(answer)

    def _send(self, message: protocol.ToChild | protocol.ToDriver) -> None:
        if isinstance(message, protocol.Assign):
            self.redaction.given(message)
        if not self._work.is_closing():
            self._work.write(protocol.frame(message))

    def kill(self, why: Why, slot: int = 0) -> None:
        """Kills the process and everything that it started."""
        if self.stopping is None:
            self.stopping = (why, slot)
            self._process.kill()

    def retire(self) -> None:
        """Lets an idle process exit by closing its work pipe."""
        self._work.close()

    async def _gone(self) -> int:
        """Waits until the process is dead and all its reports are handled. Returns the exit code."""
        try:
            returncode = await self._process.wait_for_group()
            await self._reports.wait_for_end(EOF_SECONDS)
            with suppress(TimeoutError):  # a program that the operator started may keep it open
                await asyncio.wait_for(self.output_ended.wait(), OUTPUT_SECONDS)
        finally:
            self._work.close()
            self._reports.close()
        return returncode


class ChildProcess(OperatorProcess):
    """A child process. `assigned` holds its unanswered tasks, in the order in which it runs them."""

    def __init__(
        self,
        process: Child,
        work: asyncio.WriteTransport,
        reports: Reports,
        control: int,
        kernel_kills: KernelKills,
    ) -> None:
        super().__init__(process, work, reports)
        self._control = control
        self._kernel_kills = kernel_kills
        self.assigned: deque[Held] = deque()
        self.load = 0.0
        """Estimated seconds of assigned work."""
        self.head_since = 0.0
        """Time at which the first task of `assigned` became the first."""
        self.recalled = False
        self.tenancy = Tenancy()
        self.first_assigned_at = math.inf
        self.stale = False
        """It gets no new work and ends after its tasks, because of newer code or tasks that it may not run."""

    @property
    def head(self) -> Held | None:
        return self.assigned[0] if self.assigned else None

    @property
    def head_seconds(self) -> float:
        return time.monotonic() - self.head_since if self.assigned else 0.0

    @property
    def stuck(self) -> bool:
        """True if it has run one task for long, or runs an always-on source. It then gets no more tasks."""
        return self.head_seconds > STUCK_SECONDS or (self.head is not None and self.head.lease.always_on)

    @property
    def idle_seconds(self) -> float:
        """Seconds since its last task. 0 if it has tasks, or never had one."""
        never = math.isinf(self.first_assigned_at)
        return 0.0 if self.assigned or never else time.monotonic() - self.head_since

    def assign(self, tasks: list[Held]) -> None:
        if not self.assigned:
            self.head_since = time.monotonic()
            self.first_assigned_at = min(self.first_assigned_at, self.head_since)
        self.assigned.extend(tasks)
        self.load += sum(held.estimate for held in tasks)
        for lease, together in groupby(tasks, attrgetter("lease")):
            self._send(protocol.Assign(lease.work, [held.assignment() for held in together]))

    def answered(self, slot: int) -> Held:
        """Removes and returns the task that the child has answered, which is the first, since it works in order."""
        held = self.assigned.popleft()
        if held.slot != slot:
            raise RuntimeError(f"child {self.pid} answered slot {slot}, expected slot {held.slot}")
        self._lighten(held)
        self.head_since = time.monotonic()
        return held

    def given_back(self, slots: Iterable[int]) -> list[Held]:
        """Removes and returns the tasks that the child gives back unstarted, which are the last ones."""
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
        """Raises TaskCanceled in the operator, or prevents its start."""
        self._order(protocol.CANCEL, held.slot)

    def pause(self, held: Held) -> None:
        """Notifies the operator that it is paused or resumed."""
        self._order(protocol.PAUSE if held.paused else protocol.RESUME, held.slot)

    def recall(self) -> None:
        """Requests all tasks that are not started. The child answers with GivenBack."""
        if not self.recalled:
            self.recalled = True
            self._order(protocol.RECALL, 0)

    def _order(self, kind: int, slot: int) -> None:
        # A dead child has no reader. Its supervisor notices the death independently.
        with suppress(BrokenPipeError, ProcessLookupError):
            os.write(self._control, protocol.CONTROL.pack(kind, slot))
            os.kill(self.pid, signal.SIGUSR1)

    async def ended(self) -> Crash:
        try:
            returncode = await self._gone()
        finally:
            os.close(self._control)
        return crash_of(returncode, self._kernel_kills)


class Reports(asyncio.Protocol):
    """The reading end of a child's reports. Passes them on in batches, at most one per READ_PAUSE_SECONDS."""

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

    async def wait_for_end(self, seconds: float) -> None:
        """Waits for the last report, with a timeout: a program that left the child's session may hold the pipe open."""
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
    """Reads the child's file descriptors 1 and 2, to which programs that it starts and a crashing interpreter write."""

    def __init__(self) -> None:
        self._rest = b""
        self.heard: Callable[[str], None] = lambda _: None
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self.heard(line[:LINE].decode("utf-8", "replace"))

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._rest:
            self.heard(self._rest[:LINE].decode("utf-8", "replace"))
        self.ended.set()


class Pipe:
    """A pipe. Each of its ends has exactly one owner, which closes it."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        with suppress(OSError):  # an unprivileged user may have used up the quota for large pipes
            fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


P = TypeVar("P", bound=OperatorProcess)


@dataclass(frozen=True)
class Handlers(Generic[P]):
    """Callbacks for the reports of a process, and for output that bypasses Python's streams."""

    heard: Callable[[P, list[protocol.ToWrapper]], None]
    printed: Callable[[P, str], None]


async def start(
    launch: Launch,
    heard: Callable[[ChildProcess, list[protocol.ToWrapper]], None],
    printed: Callable[[ChildProcess, str], None],
) -> ChildProcess:
    """Starts a child. It accepts work after it has reported `Ready`."""
    control = Pipe()

    def made(process: Child, work: asyncio.WriteTransport, reports: Reports) -> ChildProcess:
        return ChildProcess(process, work, reports, control.write, launch.kernel_kills)

    try:
        return await spawn(
            lambda work, reports: launch.command(work, control.read, reports),
            scrubbed(os.environ, launch.environment),
            made,
            Handlers(heard, printed),
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
    made: Callable[[Child, asyncio.WriteTransport, Reports], P],
    handlers: Handlers[P],
    *also: int,
) -> P:
    """Starts a process with pipes for work and reports, whose descriptors `command` gets. It also inherits `also`."""
    work, reports, output = Pipe(), Pipe(), Pipe()
    try:
        process = await Child.start(
            command(work.read, reports.write),
            environment=environment,
            descriptors=(work.read, reports.write, *also),
            stdout=output.write,
            stderr=output.write,
        )
    finally:
        for descriptor in (work.read, reports.write, output.write):
            os.close(descriptor)
    loop = asyncio.get_running_loop()
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(work.write, "wb", 0))
    reader, output_reader = Reports(), Output()
    started = made(process, writer, reader)
    reader.heard = lambda messages: handlers.heard(started, started.redaction.cleaned(messages))
    started.output_ended = output_reader.ended
    output_reader.heard = lambda line: handlers.printed(started, started.redaction.line(line))
    await loop.connect_read_pipe(lambda: reader, os.fdopen(reports.read, "rb", 0))
    await loop.connect_read_pipe(lambda: output_reader, os.fdopen(output.read, "rb", 0))
    return started
