"""Interlock as separate processes, as on several machines. The test starts, kills, freezes and arms each of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from interlock.apps.up.folder import Credentials, Folder, ensure_credentials
from interlock.client import Client, WorkerClient
from interlock.http.listener import bind
from interlock.settings import Settings
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedValkey
from interlock.stores.postgres import Database, migrate
from interlock.tasks.operators import Operators
from interlock.wire.tasks import OperatorsReport
from interlock.workers.catalogue import sources
from interlock.workers.operators import catalogue_of
from tests.support.fork_client import Forked, fork_server
from tests.support.polls import PATIENCE, answered, eventually

OPERATORS = Path(__file__).parents[1] / "crash" / "operators"
SETTINGS = {
    "log_level": "warning",
    "reap_seconds": "0.2",
    "reconcile_seconds": "0.5",
    "reconcile_grace_seconds": "1",
    "retention_seconds": "1",
    "drain_seconds": "0",
    # Webhook receivers run in the test process. A call that a killed dispatcher had open is soon repeated.
    "outbound_allow": '["127.0.0.1"]',
    "webhook_timeout_seconds": "1",
}


def clean_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns our environment without settings of Interlock."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return kept | _variables(settings or {})


def _variables(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"INTERLOCK_{name.upper()}": value for name, value in settings.items()}


@dataclass
class Process:
    """One process of a deployment, which the test can restart any number of times."""

    name: str
    arguments: Sequence[str]
    settings: Mapping[str, str]
    errors: Path
    listener: socket.socket | None = None
    on_start: Callable[[int], None] = lambda _pid: None
    """Called with its pid before it receives its arguments."""
    _running: Forked | None = None

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    @property
    def alive(self) -> bool:
        return self._running is not None and self._running.returncode is None

    @property
    def url(self) -> str:
        assert self.listener is not None
        host, port = self.listener.getsockname()
        return f"http://{host}:{port}"

    async def start(self, failpoints: str = "", **settings: str) -> None:
        """Starts it without waiting until it is ready: an armed process may die before that."""
        assert not self.alive, f"{self.name} is already running"
        armed = {"failpoints": failpoints} if failpoints else {}
        variables = _variables({**SETTINGS, **self.settings, **settings, **armed})
        ours, theirs = socket.socketpair()
        with ours:
            with self.errors.open("ab") as errors, theirs:
                self._running = await (await fork_server(clean_environment())).fork(self.arguments, errors, theirs)
            self.on_start(self.pid)
            listener = [] if self.listener is None else [self.listener.fileno()]
            socket.send_fds(ours, [json.dumps(variables).encode()], listener)

    async def ready(self) -> None:
        async with WorkerClient(self.url, "", patience=PATIENCE) as client:
            await client.health()

    async def ended(self) -> int:
        """Waits for its end and returns the exit code."""
        assert self._running is not None
        async with asyncio.timeout(PATIENCE):
            return await self._running.wait()

    async def killed_itself(self) -> None:
        """Checks that it died at its failpoint. Nothing else sends SIGKILL at that time."""
        assert await self.ended() == -signal.SIGKILL, self.last_words()

    async def kill(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            await self.ended()

    async def give_up(self) -> None:
        """Kills it and closes its listener."""
        await self.kill()
        if self.listener is not None:
            self.listener.close()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def frozen(self) -> None:
        """Waits until it is stopped, by the test or by a failpoint."""
        process = psutil.Process(self.pid)
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED or not self.alive)
        assert self.alive, self.last_words()

    def drain(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        with suppress(ProcessLookupError):  # a process that was not frozen may have ended
            self.thaw()

    async def stop(self) -> int:
        """Stops it once its signal handler is installed: before that, the signal would kill it."""
        await eventually(lambda: not self.alive or _catches(self.pid, signal.SIGTERM))
        self.drain()
        return await self.ended()

    def last_words(self) -> str:
        lines = self.errors.read_text(errors="replace").splitlines() if self.errors.exists() else []
        return "\n".join([f"Last output of {self.name}:", *lines[-15:]])


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


UNTAKEN_OPERATORS = ("publisher", "writer")
"""Names of jobs whose tasks the tests claim themselves, in a runtime without a worker."""


async def declare_operators(state_url: str) -> None:
    """Reports the operators as a worker does, so that no test waits for the first report."""
    names = [*catalogue_of(sources([str(OPERATORS)]), spark=False).names(), *UNTAKEN_OPERATORS]
    database = await Database.open(state_url, size=1, name="test")
    try:
        for queue in ("platform", "udf"):
            report = OperatorsReport(queue=queue, worker_id="test", operators=names)
            await Operators(database, Settings()).report(report)
    finally:
        await database.close()


@dataclass
class Deployment:
    folder: Path
    state: EmbeddedPostgres
    state_url: str
    credentials: Credentials
    settings: Mapping[str, str]
    valkey_url: str
    processes: dict[str, Process] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    @property
    def work(self) -> Path:
        """A folder for operators, which have no access to the platform's folder."""
        return self.folder.with_name("work")

    @property
    def journal(self) -> Path:
        return self.work / "journal"

    @property
    def gateway_url(self) -> str:
        return self["gateway"].url

    def client(self) -> Client:
        """Returns a client that keeps retrying while the gateway is down."""
        return Client(self.gateway_url, self.credentials.admin_key, patience=PATIENCE)

    def worker_client(self, dispatcher: str = "dispatcher") -> WorkerClient:
        return WorkerClient(self[dispatcher].url, self.credentials.worker_token, patience=PATIENCE)

    async def ask(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        """Reads directly from the state database, for invariants that must hold there regardless of the API."""
        connection = await asyncpg.connect(self.state_url)
        try:
            return await connection.fetch(sql, *arguments)
        finally:
            await connection.close()

    async def until(self, sql: str, *arguments: Any) -> Any:
        """Polls for one value until it is true."""
        connection = await asyncpg.connect(self.state_url)
        try:
            return await answered(lambda: connection.fetchval(sql, *arguments))
        finally:
            await connection.close()

    def add_listening(self, kind: str, name: str, *, listener: socket.socket | None = None, **settings: str) -> Process:
        """Adds a gateway or dispatcher, on the `listener` of another one or on its own port."""
        door = listener or bind("127.0.0.1:0", setting=kind)
        stores = {"state_url": self.state_url, "valkey_url": self.valkey_url}
        return self._add(kind, name, [], stores | settings, door)

    def add_scheduler(self, name: str, **settings: str) -> Process:
        return self._add("scheduler", name, [], {"state_url": self.state_url} | settings, None)

    def add_worker(self, name: str, dispatcher: str = "dispatcher", **settings: str) -> Process:
        arguments = ["--operators", str(OPERATORS), "--concurrency", "2", "--id", name]
        secrets = {"internal_url": self[dispatcher].url, "worker_token": self.credentials.worker_token}
        return self._add("worker", name, arguments, secrets | settings, None)

    def _add(
        self, kind: str, name: str, more: Sequence[str], settings: Mapping[str, str], listener: socket.socket | None
    ) -> Process:
        arguments = ["serve", kind, "--dir", str(self.folder), *more]
        errors = self.folder / f"{name}.stderr"
        made = Process(name, arguments, {**self.settings, **settings}, errors, listener)
        self.processes[name] = made
        return made

    async def start(self, *names: str) -> None:
        """Starts the named processes, or all that are not running. Returns when every listener answers."""
        chosen = [self[name] for name in names] or [p for p in self.processes.values() if not p.alive]
        for process in chosen:
            await process.start()
        for process in chosen:
            if process.listener is not None:
                await process.ready()

    async def stop(self) -> dict[str, int]:
        """Drains all running processes, workers first, and returns their exit codes."""
        running = [process for process in self.processes.values() if process.alive]
        codes = {}
        for process in sorted(running, key=lambda one: one.listener is not None):
            codes[process.name] = await process.stop()
        return codes

    async def abandon(self) -> None:
        for process in self.processes.values():
            await process.give_up()
        await self.state.stop()


@asynccontextmanager
async def deployed(**settings: str) -> AsyncIterator[Deployment]:
    """Starts a database server, a gateway, a dispatcher and a worker, and waits for them. They must drain cleanly."""
    with tempfile.TemporaryDirectory(prefix="interlock-crash-") as path:
        folder = Folder(Path(path) / "platform")
        folder.logs.mkdir(parents=True)
        (Path(path) / "work").mkdir()
        state = EmbeddedPostgres(folder.path / "state", name="state", log=folder.log_of("postgres"))
        valkey = EmbeddedValkey(folder.path / "valkey", name="valkey", log=folder.log_of("valkey"))
        url, valkey_url = await asyncio.gather(state.start(), valkey.start())
        await migrate(url)
        credentials = await ensure_credentials(url, folder)
        made = Deployment(folder.path, state, url, credentials, settings, valkey_url)
        await declare_operators(url)
        made.add_listening("gateway", "gateway")
        made.add_listening("dispatcher", "dispatcher")
        made.add_worker("worker")
        try:
            await made.start()
            yield made
            codes = await made.stop()
            assert set(codes.values()) <= {0}, codes
        except BaseException:
            for process in made.processes.values():
                print(process.last_words())  # noqa: T201 - shown when the test fails
            raise
        finally:
            await made.abandon()
            await valkey.stop()
