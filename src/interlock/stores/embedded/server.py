"""The base class of embedded servers: start, adoption and stop.

    start ─► lock the folder ─► is its server running? ─ yes ─► wait until it responds: adopted
                                                       └ no ──► end the remains of an earlier one,
                                                                create the data, choose a port, launch

A server runs in its own session. It is identified by three things together: the pid in its folder, a command line that
names the folder, and that it accepts the folder's password. A pid file alone proves nothing.

Its files are private, and its log is limited in size.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

import psutil
import structlog

from interlock.errors import InterlockError
from interlock.stores.embedded.account import Account, server_account

LOG_BYTES: Final = 10 * 1024 * 1024
TICK: Final = 0.02
"""Poll interval in seconds for changes by another process."""


def write_private(path: Path, text: str, owner: Account | None = None) -> None:
    """Writes `text` atomically to a file that only its owner can read.

    Writes nothing if nothing changes, so that a server can restart on a full disk.
    """
    if path.is_file() and not path.is_symlink() and path.read_text() == text:
        return
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if owner is not None:
        owner.own(draft)
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable across a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def trim_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Moves the content of a log over `limit` bytes to `{path}.1`.

    The server has the file open for appending, so the file is truncated in place instead of renamed.
    """
    if not path.is_file() or path.stat().st_size <= limit:
        return
    earlier = path.with_name(f"{path.name}.1")
    earlier.unlink(missing_ok=True)
    shutil.copyfile(path, earlier)
    earlier.chmod(0o600)
    os.truncate(path, 0)


def last_lines(path: Path, since: int, count: int = 15) -> list[str]:
    """Returns the last lines of a log, ignoring its first `since` bytes."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(since if since <= size else 0, size - 16_384))
        return file.read().decode(errors="replace").splitlines()[-count:]


@asynccontextmanager
async def locked(path: Path, patience: float) -> AsyncIterator[None]:
    """Holds a kernel lock on `path`, which is released when its holder ends for any reason."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _try_lock(handle):
            if loop.time() > deadline:
                raise TimeoutError(f"another process has been starting this server for {patience:.0f} s")
            await asyncio.sleep(TICK)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
        return self._process is not None and is_alive(self._process)

    async def start(self) -> str:
        """Starts or adopts the server and returns its URL. Also restarts a server that has died."""
        try:
            await asyncio.to_thread(self._prepare_folders)
            async with locked(self.directory / "start.lock", self.patience):
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
        trim_log(self.log)

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
        return None if pid is None else find(pid, self._account, self._recognises)

    async def _launch(self) -> None:
        await self._end_remains()
        await asyncio.to_thread(self._make_data)
        for _ in range(LAUNCHES):
            port = choose(self._port_before())
            write_private(self.directory / "port", f"{port}\n")
            self._configure(port)
            # Not in a thread: if this task were cancelled in the meantime, nothing would know about the server.
            self._process = self._spawn()
            if await self._ready(self._process):
                _log.info("server_started", server=self.name, pid=self._process.pid, port=port)
                return
            if not await self._end_remains() and is_free(port):
                break
        raise self._failure("ended during its start.")

    def _spawn(self) -> psutil.Process:
        self._launched_at_byte = self.log.stat().st_size if self.log.exists() else 0
        with open_log(self.log) as log:
            return spawn(self._command(), account=self._account, cwd=self.data, log=log.fileno())

    async def _ready(self, process: psutil.Process) -> bool:
        """Returns True once the server responds, or False if it ends."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        while is_alive(process):
            if await self._answers(self._port(), self._password()):
                return True
            if loop.time() > deadline:
                raise self._failure(
                    f"(pid {process.pid}) is running but has not responded for {self.patience:.0f} s (its last "
                    f"answer: {self._last_answer}). If it is recovering, start again to continue waiting; if it "
                    f"hangs, run `kill -KILL {process.pid}` and start again: committed data is safe."
                )
            await asyncio.sleep(TICK)
        return False

    async def _end_remains(self) -> bool:
        """Ends an earlier server of this folder that lost its pid file, and children without a server."""
        remains = await asyncio.to_thread(find_all, self._account, self._left_behind)
        if not remains:
            return False
        _log.warning("server_remains_ended", server=self.name, pids=[process.pid for process in remains])
        if not await kill_all(remains, self.patience):
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
            write_private(self._password_file, f"{secrets.token_urlsafe(32)}\n")
        return self._password_file.read_text().strip()

    def _failure(self, what: str) -> EmbeddedServerError:
        lines = last_lines(self.log, self._launched_at_byte)
        sentence = f"The embedded {self.product} server {self.name!r} {what} Its log: {self.log}"
        return EmbeddedServerError(self._without_password("\n".join([sentence, *lines])))

    def _without_password(self, text: str) -> str:
        if not self._password_file.is_file():
            return text
        password = self._password_file.read_text().strip()
        return text.replace(password, "***") if password else text


LOOPBACK: Final = "127.0.0.1"
# Below the ephemeral ports of Linux and macOS: an outgoing connection could otherwise take the port of a stopped
# server,
# and the server would restart with another URL.
CHOICES: Final = range(20_000, 32_768)
_TRIES: Final = 200


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # The servers also set this: connections in TIME_WAIT from an earlier run do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def choose(preferred: int | None) -> int:
    """Returns `preferred` if it is free, otherwise any free port."""
    if preferred is not None and is_free(preferred):
        return preferred
    for _ in range(_TRIES):
        port = secrets.choice(CHOICES)
        if is_free(port):
            return port
    raise OSError(f"no free port on {LOOPBACK} between {CHOICES.start} and {CHOICES.stop - 1}")


_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def memory_mib() -> int:
    """Returns the memory of the machine, or the limit of the container."""
    total = psutil.virtual_memory().total
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else ""
    return (min(total, int(limit)) if limit.isdecimal() else total) // (1024 * 1024)


Recognise = Callable[[Sequence[str]], bool]
"""Returns True if a command line belongs to the wanted process."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers started by this process, kept so that they can be reaped."""


def server_environment() -> dict[str, str]:
    """Returns a minimal environment: ours contains secrets, and PG* variables that would affect servers."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def spawn(command: Sequence[str], *, account: Account, cwd: Path, log: int) -> psutil.Process:
    """Starts a server in its own session, so that neither Ctrl-C nor our death ends it.

    Not with `processes.child`: a server outlives this process and its event loop, and the next process adopts it.
    """
    child = subprocess.Popen(
        command,
        cwd=cwd,
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        umask=0o077,
        **account.identity,
    )
    _children[child.pid] = child
    return psutil.Process(child.pid)


def is_alive(process: psutil.Process) -> bool:
    """Returns False for zombies too: in a container, there may be no process to reap an adopted server."""
    child = _children.get(process.pid)
    if child is not None:
        return not _reaped(child)
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _reaped(child: subprocess.Popen[bytes]) -> bool:
    if child.poll() is None:
        return False
    _children.pop(child.pid, None)
    return True


def find(pid: int, account: Account, recognise: Recognise) -> psutil.Process | None:
    """Returns the process with that id if it is ours; None if it is gone or the id belongs to another process."""
    try:
        process = psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None
    return process if is_alive(process) and _matches(process, account, recognise) else None


def find_all(account: Account, recognise: Recognise) -> list[psutil.Process]:
    """Returns all processes of ours, with their descendants."""
    found = [process for process in psutil.process_iter() if _matches(process, account, recognise)]
    return list({*found, *(descendant for process in found for descendant in _descendants(process))})


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def end(process: psutil.Process, signal_number: int, patience: float) -> bool:
    """Sends the signal and waits. Returns True if the process has ended."""
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return True
    return await _ended(process, patience)


async def kill_all(processes: Iterable[psutil.Process], patience: float) -> bool:
    return all(await asyncio.gather(*(end(process, signal.SIGKILL, patience) for process in processes)))


async def _ended(process: psutil.Process, patience: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while is_alive(process):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(TICK)
    return True


def _matches(process: psutil.Process, account: Account, recognise: Recognise) -> bool:
    try:
        return process.uids().real == account.uid and recognise(process.cmdline()) and _shares_root(process.pid)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _shares_root(pid: int) -> bool:
    """Returns False for a process in a container seen from its host: there, the same path is another folder."""
    root = Path(f"/proc/{pid}/root")
    try:
        return root.samefile("/")
    except OSError:  # no permission, or no /proc: then no other roots are visible
        return True
