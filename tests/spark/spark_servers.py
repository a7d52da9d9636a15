"""Starts a real Spark for a test, a standalone cluster or a Connect server, from the programs in PySpark.

Every process is a child of the test and ends with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psutil

from interlock.spark import java

START_SECONDS: Final = 60.0
SMALL_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
CONNECT: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
"""The class that `sbin/start-connect-server.sh` would start as a daemon."""


def spark_home() -> Path:
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@dataclass
class Programs:
    """Spark's own programs."""

    folder: Path
    environment: Mapping[str, str]
    """Additional environment variables. Executors inherit them."""
    memory: str
    running: list[asyncio.subprocess.Process] = field(default_factory=list)
    listeners: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, *command: str) -> asyncio.subprocess.Process:
        given = java.find().environment(os.environ) | {
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": self.memory,
            "SPARK_DAEMON_JAVA_OPTS": SMALL_JAVA,
            "SPARK_LOCAL_DIRS": str(self.folder),
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.folder,
            env={**given, **self.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    async def wait_for_output(self, process: asyncio.subprocess.Process, pattern: str) -> str:
        """Waits for the first match in the program's output and returns its first group."""
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(START_SECONDS):
            async for line in process.stdout:
                lines.append(line.decode(errors="replace"))
                if found := re.search(pattern, lines[-1]):
                    self.listen(process)
                    return found[1]
        raise AssertionError(f"Spark ended before it was up: {''.join(lines)}")

    def listen(self, process: asyncio.subprocess.Process) -> None:
        """Reads the rest of the output, since a full pipe would block the program."""

        async def drain() -> None:
            assert process.stdout is not None
            while await process.stdout.read(1 << 16):
                continue

        self.listeners.append(asyncio.create_task(drain()))

    async def end(self) -> None:
        """Kills the programs and all their child processes, and waits for their end."""
        alive = [process for process in self.running if process.returncode is None]
        below = [child for process in alive for child in _children(process.pid)]
        for process in alive:
            os.killpg(process.pid, signal.SIGKILL)
        for child in below:
            _kill(child)
        await asyncio.to_thread(psutil.wait_procs, below, 30)
        for process in self.running:
            await process.wait()
        for listener in self.listeners:
            listener.cancel()
        await asyncio.gather(*self.listeners, return_exceptions=True)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@asynccontextmanager
async def standalone(folder: Path, environment: Mapping[str, str], workers: int = 2) -> AsyncIterator[str]:
    """Starts a master and its workers, each with one core. Yields the master's URL."""
    programs = Programs(folder, environment, memory="256m")
    program = str(spark_home() / "bin" / "spark-class")
    deploy, here = "org.apache.spark.deploy", ("--host", "127.0.0.1", "--webui-port", "0")
    try:
        master = await programs.start(program, f"{deploy}.master.Master", *here, "--port", "0")
        url = await programs.wait_for_output(master, r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            place = ("-c", "1", "-m", "1g", "-d", str(folder / f"worker-{number}"))
            programs.listen(await programs.start(program, f"{deploy}.worker.Worker", *here, *place, url))
        yield url
    finally:
        await programs.end()


@asynccontextmanager
async def connect_server(folder: Path, environment: Mapping[str, str]) -> AsyncIterator[str]:
    """Starts a Spark Connect server over a local Spark. Yields its sc:// URL."""
    programs = Programs(folder, environment, memory="1g")
    port = _free_port()
    properties = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": SMALL_JAVA,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    flags = [part for name, value in properties.items() for part in ("--conf", f"{name}={value}")]
    try:
        server = await programs.start(
            *(str(spark_home() / "bin" / "spark-submit"), "--class", CONNECT),
            *("--master", "local[2]", *flags, "spark-internal"),
        )
        await programs.wait_for_output(server, r"(Spark Connect server started)")
        yield f"sc://127.0.0.1:{port}"
    finally:
        await programs.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def executor_of(python: int) -> psutil.Process:
    """Returns the executor to which this Python process belongs."""
    above = psutil.Process(python).parents()
    return next(process for process in above if any(EXECUTOR in word for word in process.cmdline()))


def lose_machine(python: int) -> None:
    """Kills Spark's worker and its executor, like the loss of a machine: nothing can start another executor there."""
    executor = executor_of(python)
    worker = executor.parent()
    assert worker is not None
    worker.kill()
    executor.kill()
