"""Scratch folders of driver processes, removed after every kind of exit.

The worker holds the lock file of a folder. If the worker is killed, the lock is free, and the next worker of this user
on this machine removes the folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from interlock.processes.child import Child
from interlock.wire.attempts import TaskData
from interlock.wire.tasks import Crash
from interlock.workers import process, protocol
from interlock.workers.claimed_tasks import Held, Variables
from interlock.workers.process import Handlers, OperatorProcess, Reports, scrubbed, spawn

PREFIX: Final = "interlock-spark-"
_LOCK: Final = ".lock"
_YOUNG_SECONDS: Final = 3600.0
"""A younger folder without a lock file may be one that is being created."""


class Scratch:
    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> int:
    """Removes the folders of killed workers. Returns their number."""
    left = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_left(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def _is_left(path: Path) -> bool:
    with suppress(FileNotFoundError):  # another worker is removing it
        about = path.lstat()
        if about.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
            return False
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return time.time() - about.st_mtime > _YOUNG_SECONDS
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True
    return False


OF_SPARK: Final = (
    "HADOOP_CONF_DIR",
    "JAVA_HOME",
    "PYSPARK_PYTHON",
    "SPARK_CONF_DIR",
    "SPARK_HOME",
    "SPARK_LOCAL_IP",
    "XDG_CACHE_HOME",
    "YARN_CONF_DIR",
)
"""Variables that Spark's own programs read."""
SPARK_OUT_OF_MEMORY: Final = 52
"""Exit code of Spark when it is out of memory."""
PLATFORM: Final = "platform"
"""The key of the driver for operators that get the URL of the state database. It runs only the platform's code: no
operators, modules or variables of users."""


@dataclass(frozen=True)
class DriverLaunch:
    """Options with which every driver of a worker is started."""

    options: protocol.SparkOptions = field(repr=False)
    result_limit: int = 1 << 20
    modules: tuple[str, ...] = ()
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
    """Sent with a task that reads one of its tables, or whose operator is built in."""
    state_url: str | None = field(default=None, repr=False)
    """Sent with a task that loads a staged list."""
    outbound: protocol.Outbound | None = field(default=None, repr=False)
    """Sent with a task whose operator sends requests to other servers."""
    variables: Variables = field(default_factory=dict, repr=False)
    """Sent with tasks of their org, and never through the environment."""
    kernel_kills: process.KernelKills = field(default_factory=process.KernelKills)

    def command(self, work: int, reports: int, scratch: Path, key: str = "") -> list[str]:
        numbers = {"--work": work, "--reports": reports, "--parent": os.getpid(), "--result-limit": self.result_limit}
        flags = [part for name, number in numbers.items() for part in (name, str(number))]
        flags += [part for given in self.operators if key != PLATFORM for part in ("--operators", given)]
        flags += [part for path in self.hidden for part in ("--hidden", path)]
        flags += [part for path in self.kept for part in ("--kept", path)]
        flags += ["--reload"] if self.reload else []
        modules = () if key == PLATFORM else self.modules
        return [*process.python("interlock.spark.driver"), *flags, "--scratch", str(scratch), *modules]

    def work_of(self, held: Held, data: TaskData, key: str = "") -> protocol.Work:
        work = held.lease.work
        by_table = any(one.table is not None for one in data.inputs)
        data_url = self.data_url if by_table or ":" not in work.operator else None
        state_url = self.state_url if data.list_load is not None and key == PLATFORM else None
        return msgspec.structs.replace(work, data=msgspec.json.encode(data), data_url=data_url, state_url=state_url)


class DriverProcess(OperatorProcess):
    def __init__(
        self,
        process: Child,
        work: asyncio.WriteTransport,
        reports: Reports,
        launch: DriverLaunch,
        scratch: Scratch,
        key: str = "",
    ) -> None:
        super().__init__(process, work, reports)
        self._launch, self._scratch = launch, scratch
        self.key = key
        """Only tasks of this key run in it."""
        self.used_at = time.monotonic()
        self.assigned: dict[int, Held] = {}
        """Unanswered tasks, by slot."""
        self.zombies = 0
        """Number of threads that did not stop and were given up."""
        self.spent_since: float | None = None
        """Time since which it gets no new work."""
        self.retired_at: float | None = None
        self._spark_died: int | None = None
        self._send(launch.options)

    @property
    def spent(self) -> bool:
        return self.spent_since is not None

    def spend(self) -> None:
        """Assigns no new tasks to it. Its running tasks continue."""
        if self.spent_since is None:
            self.spent_since = time.monotonic()

    def assign(self, held: Held, data: TaskData) -> None:
        self.assigned[held.slot] = held
        self.used_at = time.monotonic()
        self._send(protocol.Assign(self._launch.work_of(held, data, self.key), [held.assignment()]))

    def assign_together(self, tasks: list[Held]) -> None:
        """Assigns tasks of one lease as a batch. Each task gets its own answer."""
        self.assigned |= {held.slot: held for held in tasks}
        self.used_at = time.monotonic()
        self._send(protocol.Assign(tasks[0].lease.work, [held.assignment() for held in tasks]))

    def stop(self, held: Held) -> None:
        """Raises TaskCanceled in the operator, and cancels its Spark jobs."""
        self._send(protocol.Stop(held.slot))

    def hold(self, held: Held) -> None:
        self._send(protocol.Hold(held.slot, held.paused))

    def spark_died(self, returncode: int) -> None:
        self.spend()
        self._spark_died = returncode

    def retire(self) -> None:
        if self.retired_at is None:
            self.retired_at = time.monotonic()
            super().retire()

    async def ended(self) -> tuple[Crash, str]:
        """Waits until it is gone with its subprocesses and files. Returns how it died, and a message about it."""
        try:
            returncode = await self._gone()
        finally:
            await asyncio.to_thread(self._scratch.remove)
        if self._spark_died is None:
            cause = process.crash_of(returncode, self._launch.kernel_kills)
            return cause, process.sentence(cause)
        cause = process.crash_of(self._spark_died, self._launch.kernel_kills)
        if cause.exit_code == SPARK_OUT_OF_MEMORY:
            cause = msgspec.structs.replace(cause, oom=True)
        return cause, process.sentence(cause, "The Spark JVM that ran this task")


async def start(launch: DriverLaunch, handlers: Handlers[DriverProcess], key: str = "") -> DriverProcess:
    """Starts a driver. Its session starts with its first task."""
    scratch = await asyncio.to_thread(Scratch)
    passed = () if key == PLATFORM else launch.environment
    environment = scrubbed(os.environ, (*OF_SPARK, *passed)) | {"TMPDIR": str(scratch.path)}
    if key == PLATFORM:
        # Spark starts its Python workers in the working directory, with a command of its own.
        environment |= {"PYTHONSAFEPATH": "1"}

    def made(process: Child, work: asyncio.WriteTransport, reports: Reports) -> DriverProcess:
        return DriverProcess(process, work, reports, launch, scratch, key)

    def command(work: int, reports: int) -> list[str]:
        return launch.command(work, reports, scratch.path, key)

    try:
        return await spawn(command, environment, made, handlers)
    except BaseException:
        scratch.remove()
        raise
