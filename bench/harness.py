"""Starts the subject of a benchmark: an embedded server and Interlock's real processes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from interlock.client import Client, WorkerClient


@dataclass
class Installation:
    """A running `interlock up --no-workers`, and the workers a benchmark adds to it."""

    info: dict[str, Any]
    directory: Path
    workers: list[asyncio.subprocess.Process] = field(default_factory=list)

    def client(self) -> Client:
        return Client(self.info["gateway"], self.info["admin_key"])

    def worker_client(self) -> WorkerClient:
        return WorkerClient(self.info["internal"], self.info["worker_token"])

    async def connect(self) -> asyncpg.Connection[Any]:
        return await asyncpg.connect(self.info["state_url"])

    async def start_worker(self, concurrency: int = 1, runtime: str = "platform") -> None:
        environment = os.environ | {
            "INTERLOCK_DIR": str(self.directory),
            "INTERLOCK_INTERNAL_URL": self.info["internal"],
            "INTERLOCK_WORKER_TOKEN": self.info["worker_token"],
            "INTERLOCK_WORKER_CONCURRENCY": str(concurrency),
            "INTERLOCK_LOG_LEVEL": "warning",
            "PYTHONPATH": str(Path(__file__).parents[1]),  # for the benchmarks' own operators
        }
        self.workers.append(
            await _spawn(["serve", "worker", "--runtime", runtime, "--operators", "bench"], environment)
        )

    async def settle(self, max_seconds: int = 60) -> None:
        """Waits until all earlier work is finished, so that it is not measured with the rest."""
        supervisor = json.loads((self.directory / "endpoints.json").read_text())["pid"]
        await _settled(psutil.Process(int(supervisor)), max_seconds)

    async def stop_workers(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            await worker.wait()
        self.workers.clear()


async def _spawn(arguments: list[str], environment: dict[str, str], **more: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "interlock.cli", *arguments, env=environment, **more
    )


@asynccontextmanager
async def installation(**settings: str) -> AsyncIterator[Installation]:
    """Starts an installation. Settings are environment variables without the prefix: `range_size="1000"`."""
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as folder:
        environment = os.environ | {f"INTERLOCK_{k.upper()}": v for k, v in settings.items()}
        environment |= {"INTERLOCK_LOG_LEVEL": "warning"}
        arguments = [
            "up",
            "--json",
            "--no-workers",
            "--dir",
            folder,
            "--gateway",
            "127.0.0.1:0",
            "--internal",
            "127.0.0.1:0",
            "--query",
            "127.0.0.1:0",
        ]
        process = await _spawn(arguments, environment, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        running = Installation(json.loads(await process.stdout.readline()), Path(folder))
        try:
            yield running
        finally:
            await running.stop_workers()
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _settled(family: psutil.Process, max_seconds: int) -> None:
    """Waits for a second with little CPU use."""
    before = _seconds(family)
    for _ in range(max_seconds):
        await asyncio.sleep(1)
        now = _seconds(family)
        if now - before < _CALM:
            return
        before = now


_CALM = 0.15
"""CPU seconds per second below which an installation counts as idle, all of its processes together."""


def _seconds(family: psutil.Process) -> float:
    total = 0.0
    for process in [family, *family.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:,.0f} ({min(values):,.0f}-{max(values):,.0f})"
