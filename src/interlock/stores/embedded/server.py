"""The base class of embedded servers: start, adoption and stop.

    start ─► lock the folder ─► is its server running? ─ yes ─► wait until it responds: adopted
                                                       └ no ──► end the remains of an earlier one,
                                                                create the data, choose a port, launch

A server runs in its own session. It is identified by three things together: the pid in its folder, a command line that
names the folder, and that it accepts the folder's password. A pid file alone proves nothing.
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

from interlock.errors import InterlockError
from interlock.stores.embedded import files, machine, processes
from interlock.stores.embedded.account import Account, server_account

PROBE_SECONDS: Final = 5.0
LAUNCHES: Final = 3
"""Number of attempts if another process takes the port first, or if remains of an earlier server interfere."""

_log = structlog.get_logger("interlock.embedded")


class EmbeddedServerError(InterlockError):
    """Raised when an embedded server cannot start. Contains the reason, what to do, and the last log lines."""

    default_code = "embedded_server"


class EmbeddedServer(ABC):
    """One server in one folder. `directory` is exclusive to this server; `name` is for people and logs.

    `patience` is the timeout in seconds for the server to respond, and to stop. Keep it generous: after a crash, a
    server
    reads its log before it responds.
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
        """The process id of the server that this object started or adopted, alive or not; None before and after."""
        return self._process.pid if self._process else None

    def running(self) -> bool:
        return self._process is not None and processes.is_alive(self._process)

    async def start(self) -> str:
        """Starts or adopts the server and returns its URL. Also restarts a server that has died."""
        try:
            await asyncio.to_thread(self._prepare_folders)
            async with files.locked(self.directory / "start.lock", self.patience):
                if not await self._adopt():
                    await self._launch()
                return self._url(self._port(), self._password())
        except OSError as error:
            raise self._failure(f"could not be started: {error}.") from error

    async def stop(self) -> None:
        """Stops the server, even if another process started it. Escalates signals if it does not respond."""
        process = self._process if self.running() else await asyncio.to_thread(self._find)
        if process is not None:
            await self._end(process)
            _log.info("server_stopped", server=self.name, pid=process.pid)
        self._process = None

    def trim_log(self) -> None:
        """Limits the size of the log and its previous part. Every start does this as well."""
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
        """Returns True for the command line of this folder's server."""

    def _left_behind(self, command: Sequence[str]) -> bool:
        """Returns True for the command line of a process that an earlier server of this folder left running."""
        return self._recognises(command)

    @abstractmethod
    def _recorded_pid(self) -> int | None: ...

    @abstractmethod
    def _configure(self, port: int) -> None: ...

    @abstractmethod
    def _make_data(self) -> None:
        """Creates the data folder atomically; does nothing if it exists."""

    @abstractmethod
    async def _answers(self, port: int, password: str) -> bool:
        """Returns True if the server accepts the password and responds. Raises if it rejects the password."""

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
        if not await self._ready(process):  # it was shutting down
            return False
        _log.info("server_adopted", server=self.name, pid=process.pid)
        return True

    def _find(self) -> psutil.Process | None:
        pid = self._recorded_pid()
        return None if pid is None else processes.find(pid, self._account, self._recognises)

    async def _launch(self) -> None:
        await self._end_remains()
        await asyncio.to_thread(self._make_data)
        for _ in range(LAUNCHES):
            port = machine.choose(self._port_before())
            files.write_private(self.directory / "port", f"{port}\n")
            self._configure(port)
            # Not in a thread: if this task were cancelled in the meantime, nothing would know about the server.
            self._process = self._spawn()
            if await self._ready(self._process):
                _log.info("server_started", server=self.name, pid=self._process.pid, port=port)
                return
            if not await self._end_remains() and machine.is_free(port):
                break
        raise self._failure("ended during its start.")

    def _spawn(self) -> psutil.Process:
        self._launched_at_byte = self.log.stat().st_size if self.log.exists() else 0
        with files.open_log(self.log) as log:
            return processes.spawn(self._command(), account=self._account, cwd=self.data, log=log.fileno())

    async def _ready(self, process: psutil.Process) -> bool:
        """Returns True once the server responds, or False if it ends."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        while processes.is_alive(process):
            if await self._answers(self._port(), self._password()):
                return True
            if loop.time() > deadline:
                raise self._failure(
                    f"(pid {process.pid}) is running but has not responded for {self.patience:.0f} s (its last "
                    f"answer: {self._last_answer}). If it is recovering, start again to continue waiting; if it "
                    f"hangs, run `kill -KILL {process.pid}` and start again: committed data is safe."
                )
            await asyncio.sleep(files.TICK)
        return False

    async def _end_remains(self) -> bool:
        """Ends an earlier server of this folder that lost its pid file, and children without a server."""
        remains = await asyncio.to_thread(processes.find_all, self._account, self._left_behind)
        if not remains:
            return False
        _log.warning("server_remains_ended", server=self.name, pids=[process.pid for process in remains])
        if not await processes.kill_all(remains, self.patience):
            raise self._failure(f"has left processes that cannot be killed: {[process.pid for process in remains]}.")
        return True

    def _port(self) -> int:
        port = self._port_before()
        if port is None:
            raise self._failure(
                f"is running, but {self.directory / 'port'} does not contain its port. Stop the server and start again."
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
                f"(pid {self.pid}) is running, but its password file {self._password_file} is missing. Stop it with "
                f"`kill -QUIT {self.pid}` and start again to set a new password."
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
