"""An `interlock up` that the test kills, completely or in part, and restarts on the same folder."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from valkey.asyncio import Valkey

from interlock.client import Client
from tests.support.deployment import OPERATORS, clean_environment
from tests.support.polls import PATIENCE

SETTINGS = {
    "worker_concurrency": "2",
    "log_level": "warning",
    "reconcile_seconds": "1",
    "reconcile_grace_seconds": "3",
    # Far above the load: each request is counted in Valkey, but none is refused.
    "requests_per_second": "100000",
}


@dataclass
class Installation:
    folder: Path
    process: asyncio.subprocess.Process | None = None
    info: dict[str, Any] = field(default_factory=dict)
    ports: tuple[str, str] = ("127.0.0.1:0", "127.0.0.1:0")

    @property
    def journal(self) -> Path:
        """A file for operators, which have no access to the platform's folder."""
        return self.folder.with_name("work") / "journal"

    async def start(self) -> None:
        where = ["--dir", str(self.folder), "--gateway", self.ports[0], "--internal", self.ports[1]]
        where += ["--query", "127.0.0.1:0"]
        # Stderr goes to a file: a pipe that is not read would fill up and block the system.
        with (self.folder / "up.stderr").open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "interlock.cli", "up", "--json", "--operators", str(OPERATORS), *where),
                env=clean_environment(SETTINGS),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, (self.folder / "up.stderr").read_text()[-3000:]
        self.info = json.loads(line)
        self.ports = (self.info["gateway"].removeprefix("http://"), self.info["internal"].removeprefix("http://"))

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def client(self) -> Client:
        return Client(self.info["gateway"], self.info["admin_key"], patience=PATIENCE)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 120)

    def kill_child(self, name: str) -> bool:
        """Kills a child. Returns False if there was none, because it is being restarted."""
        assert self.process is not None
        for process in psutil.Process(self.process.pid).children():
            try:
                if name in process.cmdline():
                    process.kill()
                    return True
            except psutil.NoSuchProcess:
                continue
        return False

    def kill_server(self, pid_file: str) -> bool:
        """Kills a server by the pid file in its folder."""
        try:
            psutil.Process(int((self.folder / pid_file).read_text().split()[0])).kill()
        except (FileNotFoundError, IndexError, psutil.NoSuchProcess):
            return False
        return True

    async def flush(self) -> bool:
        """Deletes all data in Valkey."""
        endpoints = json.loads((self.folder / "endpoints.json").read_text())
        async with Valkey.from_url(endpoints["valkey_url"]) as valkey:
            return bool(await valkey.flushall())


@asynccontextmanager
async def installation() -> AsyncIterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="interlock-crash-") as path:
        for name in ("platform", "work"):
            (Path(path) / name).mkdir()
        here = Installation(Path(path) / "platform")
        await here.start()
        try:
            yield here
        except BaseException:
            print((here.folder / "up.stderr").read_text()[-5000:])  # noqa: T201 - shown when the test fails
            raise
        finally:
            assert await here.stop() == 0
