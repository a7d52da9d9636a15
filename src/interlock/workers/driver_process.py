"""The driver of a Spark session, seen from the wrapper: many tasks at once, answered in any order."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from interlock.wire import Crash, TaskData
from interlock.workers import crash, protocol
from interlock.workers.held import Held, Variables
from interlock.workers.process import Ears, OperatorProcess, Reports, scrubbed, spawn
from interlock.workers.scratch import Scratch

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
"""Variables that Spark's own programs go by."""
SPARK_OUT_OF_MEMORY: Final = 52
"""Spark's own exit code for it."""
PLATFORM: Final = "platform"
"""The key of the driver for operators that are told the state database's URL. It runs nobody else's code: neither
operators nor modules nor variables of users come into it."""


@dataclass(frozen=True)
class DriverLaunch:
    """What every driver of a worker is started with."""

    options: protocol.SparkOptions = field(repr=False)
    result_limit: int = 65_536
    modules: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    """Folders and modules whose declared operators may be run."""
    hidden: tuple[str, ...] = ()
    """Files and folders that operators cannot open."""
    kept: tuple[str, ...] = ()
    """Of these, what they can."""
    environment: tuple[str, ...] = ()
    """Names of further variables for the environment of the process itself."""
    data_url: str | None = field(default=None, repr=False)
    """Told with a task that reads a table of it, or whose operator is built in."""
    state_url: str | None = field(default=None, repr=False)
    """Told with a task that loads a staged list."""
    outbound: protocol.Outbound | None = field(default=None, repr=False)
    """Told with a task of an operator that asks other servers."""
    variables: Variables = field(default_factory=dict, repr=False)
    """Told with tasks of their org, and never through the environment."""
    kernel_kills: crash.KernelKills = field(default_factory=crash.KernelKills)

    def command(self, work: int, reports: int, scratch: Path, key: str = "") -> list[str]:
        numbers = {"--work": work, "--reports": reports, "--parent": os.getpid(), "--result-limit": self.result_limit}
        flags = [part for name, number in numbers.items() for part in (name, str(number))]
        flags += [part for given in self.operators for part in ("--operators", given)]
        flags += [part for path in self.hidden for part in ("--hidden", path)]
        flags += [part for path in self.kept for part in ("--kept", path)]
        driver = [sys.executable, "-m", "interlock.pipeline.driver"]
        modules = () if key == PLATFORM else self.modules
        return [*driver, *flags, "--scratch", str(scratch), *modules]

    def work_of(self, held: Held, data: TaskData, key: str = "") -> protocol.Work:
        work = held.lease.work
        by_table = any(one.table is not None for one in data.inputs)
        told = self.data_url if by_table or ":" not in work.operator else None
        state_url = self.state_url if data.list_load is not None and key == PLATFORM else None
        return msgspec.structs.replace(work, data=msgspec.json.encode(data), data_url=told, state_url=state_url)


class DriverProcess(OperatorProcess):
    def __init__(
        self,
        process: asyncio.subprocess.Process,
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
        """What it has and has not answered, by slot."""
        self.zombies = 0
        """Threads in it that would not stop: nobody waits for them any more."""
        self.spent_since: float | None = None
        """Since when it gets no new work."""
        self.retired_at: float | None = None
        self._spark_died: int | None = None
        self._send(launch.options)

    @property
    def spent(self) -> bool:
        return self.spent_since is not None

    def spend(self) -> None:
        """Give it no new work; what it has goes on."""
        if self.spent_since is None:
            self.spent_since = time.monotonic()

    def assign(self, held: Held, data: TaskData) -> None:
        self.assigned[held.slot] = held
        self.used_at = time.monotonic()
        self._send(protocol.Assign(self._launch.work_of(held, data, self.key), [held.assignment()]))

    def assign_together(self, tasks: list[Held]) -> None:
        """Of one lease: the operator takes them at once, and each is answered by itself."""
        self.assigned |= {held.slot: held for held in tasks}
        self.used_at = time.monotonic()
        self._send(protocol.Assign(tasks[0].lease.work, [held.assignment() for held in tasks]))

    def stop(self, held: Held) -> None:
        """Raise TaskCanceled in the operator, and cancel what it has running in Spark."""
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
        """When it is gone, with all that it started and all its files: how it died, and a sentence about it."""
        try:
            returncode = await self._gone()
        finally:
            await asyncio.to_thread(self._scratch.remove)
        if self._spark_died is None:
            cause = crash.crash_of(returncode, self._launch.kernel_kills)
            return cause, crash.sentence(cause)
        cause = crash.crash_of(self._spark_died, self._launch.kernel_kills)
        if cause.exit_code == SPARK_OUT_OF_MEMORY:
            cause = msgspec.structs.replace(cause, oom=True)
        return cause, crash.sentence(cause, "The Spark JVM that ran this task")


async def start(launch: DriverLaunch, ears: Ears[DriverProcess], key: str = "") -> DriverProcess:
    """Start a driver. Its session starts with its first task."""
    scratch = await asyncio.to_thread(Scratch)
    passed = () if key == PLATFORM else launch.environment
    environment = scrubbed(os.environ, (*OF_SPARK, *passed)) | {"TMPDIR": str(scratch.path)}

    def made(process: asyncio.subprocess.Process, work: asyncio.WriteTransport, reports: Reports) -> DriverProcess:
        return DriverProcess(process, work, reports, launch, scratch, key)

    def command(work: int, reports: int) -> list[str]:
        return launch.command(work, reports, scratch.path, key)

    try:
        return await spawn(command, environment, made, ears)
    except BaseException:
        scratch.remove()
        raise
