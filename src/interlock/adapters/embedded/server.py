"""What starting, adopting and ending an embedded server have in common.

    start ─► lock the folder ─► does its server run? ── yes ─► wait until it answers: adopted
                                                     └─ no ──► end what is left of an earlier one,
                                                               make the data, choose a port, launch

A server runs in its own session and is known by three things together: the pid it wrote into its folder, a
command line that names the folder, and that it takes the folder's password. A pid file alone proves nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final

import psutil
import structlog

from interlock.adapters.embedded import files, ports, processes
from interlock.adapters.embedded.account import Account, server_account
from interlock.errors import InterlockError

PROBE_SECONDS: Final = 5.0
LAUNCHES: Final = 3
"""How often to try when another process takes the port first, or remains of an earlier server are about."""

_log = structlog.get_logger("interlock.embedded")


class EmbeddedServerError(InterlockError):
    """An embedded server that cannot be had; says why, what to do, and how its log ends."""

    default_code = "embedded_server"


class EmbeddedServer(ABC):
    """One server in one folder. `directory` belongs to this server alone; `name` is for people and logs.

    `patience` is in seconds: how long the server may take to answer, and how long to end when asked to. A
    server that recovers from a crash reads its log first, so this is no place for a tight limit.
    """

    product: ClassVar[str]

    def __init__(self, directory: Path, *, name: str, log: Path, patience: float = 60.0) -> None:
        self.directory = directory.resolve()
        self.name = name
        self.log = log.absolute()
        self.patience = patience
        self.data = self.directory / "data"
        self._process: psutil.Process | None = None
        self._launched_at_byte = 0
        self._last_answer = "none"
        self._probe_seconds = min(PROBE_SECONDS, patience)

    @property
    def pid(self) -> int | None:
        """The server this object started or adopted, alive or not; None before that and after `stop()`."""
        return self._process.pid if self._process else None

    def running(self) -> bool:
        return self._process is not None and processes.is_alive(self._process)

    async def start(self) -> str:
        """Starts or adopts the server and returns its URL. Also brings back one that has died."""
        try:
            await asyncio.to_thread(self._prepare_folders)
            async with files.locked(self.directory / "start.lock", self.patience):
                if not await self._adopt():
                    await self._launch()
                return self._url(self._port(), self._password())
        except OSError as error:
            raise self._failure(f"could not be started: {error}.") from error

    async def stop(self) -> None:
        """Ends the server, also one that another process started; harder when it does not listen."""
        process = self._process if self.running() else await asyncio.to_thread(self._find)
        if process is not None:
            await self._end(process)
            _log.info("server_stopped", server=self.name, pid=process.pid)
        self._process = None

    def trim_log(self) -> None:
        """Keeps the log and one earlier piece of it within bounds; every start does this, too."""
        files.trim_log(self.log)

    @cached_property
    def _account(self) -> Account:
        return server_account()

    @abstractmethod
    def _binary(self) -> Path: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _recognises(self, command: Sequence[str]) -> bool:
        """Whether a command line is that of this folder's server."""

    def _left_behind(self, command: Sequence[str]) -> bool:
        """Whether a command line is that of something an earlier server of this folder left running."""
        return self._recognises(command)

    @abstractmethod
    def _recorded_pid(self) -> int | None: ...

    @abstractmethod
    def _configure(self, port: int) -> None: ...

    @abstractmethod
    def _make_data(self) -> None:
        """Brings the data folder into being, whole or not at all; does nothing when it is there."""

    @abstractmethod
    async def _answers(self, port: int, password: str) -> bool:
        """Whether the server takes the password and answers; raises when it refuses the password."""

    @abstractmethod
    async def _end(self, process: psutil.Process) -> None: ...

    @abstractmethod
    def _url(self, port: int, password: str) -> str: ...

    def _prepare_folders(self) -> None:
        self._account.make_home(self.directory)
        self._account.let_through(self.data)
        binary = self._binary()
        self._account.let_through(binary)
        self._account.check_may_run(binary)
        self.trim_log()

    async def _adopt(self) -> bool:
        process = await asyncio.to_thread(self._find)
        if process is None:
            return False
        self._process = process
        if not await self._ready(process):  # it was on its way down
            return False
        _log.info("server_adopted", server=self.name, pid=process.pid)
        return True

    def _find(self) -> psutil.Process | None:
        pid = self._recorded_pid()
        return None if pid is None else processes.find(pid, self._account, self._recognises)

    async def _launch(self) -> None:
        await self._end_what_is_left()
        await asyncio.to_thread(self._make_data)
        for _ in range(LAUNCHES):
            port = ports.choose(self._port_before())
            files.write_private(self.directory / "port", f"{port}\n")
            self._configure(port)
            # Not in a thread: were this task cancelled meanwhile, nobody would know of the server.
            self._process = self._spawn()
            if await self._ready(self._process):
                _log.info("server_started", server=self.name, pid=self._process.pid, port=port)
                return
            if not await self._end_what_is_left() and ports.is_free(port):
                break
        raise self._failure("ended while it was starting.")

    def _spawn(self) -> psutil.Process:
        self._launched_at_byte = self.log.stat().st_size if self.log.exists() else 0
        with files.open_log(self.log) as log:
            return processes.spawn(self._command(), account=self._account, cwd=self.data, log=log.fileno())

    async def _ready(self, process: psutil.Process) -> bool:
        """True once the server answers, False when it ends instead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        while processes.is_alive(process):
            if await self._answers(self._port(), self._password()):
                return True
            if loop.time() > deadline:
                raise self._failure(
                    f"(pid {process.pid}) runs but has not answered for {self.patience:.0f} s (its last "
                    f"answer: {self._last_answer}). If it is recovering, start again to go on waiting; if it "
                    f"hangs, run `kill -KILL {process.pid}` and start again: what was committed is safe."
                )
            await asyncio.sleep(files.TICK)
        return False

    async def _end_what_is_left(self) -> bool:
        """Ends an earlier server of this folder that lost its pid file, and children without a server."""
        remains = await asyncio.to_thread(processes.find_all, self._account, self._left_behind)
        if not remains:
            return False
        _log.warning("server_remains_ended", server=self.name, pids=[process.pid for process in remains])
        if not await processes.kill_all(remains, self.patience):
            raise self._failure(f"has remains that cannot be killed: {[process.pid for process in remains]}.")
        return True

    def _port(self) -> int:
        port = self._port_before()
        if port is None:
            raise self._failure(
                f"runs, but {self.directory / 'port'} does not hold its port. End the server and start again."
            )
        return port

    def _port_before(self) -> int | None:
        path = self.directory / "port"
        text = path.read_text().strip() if path.is_file() else ""
        return int(text) if text.isdecimal() and 0 < int(text) < 65_536 else None

    @property
    def _password_file(self) -> Path:
        return self.directory / "password"

    def _password(self) -> str:
        if not self._password_file.is_file():
            raise self._failure(
                f"(pid {self.pid}) runs, but its password file {self._password_file} is missing. End it with "
                f"`kill -QUIT {self.pid}` and start again: a new password is then set."
            )
        return self._password_file.read_text().strip()

    def _make_password(self) -> str:
        if not self._password_file.is_file():
            files.write_private(self._password_file, f"{secrets.token_urlsafe(32)}\n")
        return self._password_file.read_text().strip()

    def _failure(self, what: str) -> EmbeddedServerError:
        lines = files.last_lines(self.log, self._launched_at_byte)
        sentence = f"The embedded {self.product} server {self.name!r} {what} Its log: {self.log}"
        return EmbeddedServerError(self._without_password("\n".join([sentence, *lines])))

    def _without_password(self, text: str) -> str:
        if not self._password_file.is_file():
            return text
        password = self._password_file.read_text().strip()
        return text.replace(password, "***") if password else text
