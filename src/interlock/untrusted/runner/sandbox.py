"""One confined process: start it, send its job, wait for its end, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from interlock.processes.child import Child
from interlock.untrusted.runner.cgroups import Group
from interlock.untrusted.runner.confinement import Machine, Walls
from interlock.untrusted.runner.forwarder import Forwarder, Routes
from interlock.untrusted.runner.in_sandbox.job import Ending, Job, encode

TAIL_BYTES: Final = 4_096
_MAX_LISTENERS: Final = 16
_KILL_SECONDS: Final = 10.0
_WATCH_SECONDS: Final = 0.2

LEFT_BEHIND: Final = ("programs-", "work-")
"""Prefixes of a runner's folders, followed by its process id: a killed runner leaves them behind."""

_ending = msgspec.json.Decoder(Ending)


@dataclass
class Process:
    """A process, with the tail of its output, and the socket to send its job."""

    child: Child
    control: socket.socket

    @classmethod
    async def start(cls, command: Sequence[str], control: socket.socket, descriptors: Sequence[int]) -> Process:
        child = await Child.start(
            command, environment={}, descriptors=descriptors, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
        )
        child.keep_tail(TAIL_BYTES)
        return cls(child, control)

    async def end(self, walls: Walls) -> None:
        """Closes the socket, on which the process kills all its children. With a PID namespace it is killed directly,
        because the kernel kills the children.
        """
        self.control.close()
        if not walls.own_files:
            await self.child.ended(_KILL_SECONDS)
        # Not its group, which contains the keeper: only the keeper finds children that have left the session.
        self.child.signal(signal.SIGKILL)
        await self.child.wait()


class Sandbox:
    """Starts processes. Keeps one spare process loaded and waiting, unless the walls need the job at the start."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._spare: asyncio.Task[Process] | None = None

    def stock_up(self) -> None:
        if self.machine.walls is not Walls.BUBBLEWRAP and self._spare is None:
            self._spare = asyncio.create_task(self._launcher())

    async def close(self) -> None:
        if self._spare is not None:
            await (await self._spare).end(self.machine.walls)
            self._spare = None

    async def start(self, job: Job) -> Process:
        if self.machine.walls is Walls.BUBBLEWRAP:
            return await self._bubblewrap(job)
        spare, self._spare = self._spare, None
        if spare is not None:
            process = await spare
            if process.child.alive:
                return process
            await process.end(self.machine.walls)
        return await self._launcher()

    async def _launcher(self) -> Process:
        ours, theirs = _channel()
        with theirs:
            number = theirs.fileno()
            return await Process.start(self.machine.launcher(number), ours, [number])

    async def _bubblewrap(self, job: Job) -> Process:
        ours, theirs = _channel()
        with theirs, _in_memory(job.files) as files:
            command = self.machine.bubblewrap(theirs.fileno(), job, files)
            return await Process.start(command, ours, [theirs.fileno(), *files.values()])


def _channel() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


@contextlib.contextmanager
def _in_memory(files: dict[str, str]) -> Iterator[dict[str, int]]:
    handles = dict[str, int]()
    try:
        for path, text in files.items():
            handles[path] = os.memfd_create(Path(path).name)
            os.write(handles[path], text.encode())
            os.lseek(handles[path], 0, os.SEEK_SET)
        yield handles
    finally:
        for handle in handles.values():
            os.close(handle)


@dataclass(frozen=True)
class Ended:
    """How a run ended; `ending` is None if it was aborted or if its keeper sent no report."""

    ending: Ending | None
    code: int | None
    """Exit code of the process that the runner started."""
    tail: str
    overdrawn: bool = False
    """Aborted because it exceeded its disk limit, if no file system of its own enforces that."""


async def run(sandbox: Sandbox, job: Job, routes: Routes, group: Group | None) -> Ended:
    """Runs the job to its end. Cancelling this call kills all its processes before it returns."""
    with _room_for(job, sandbox.machine) as placed:
        process = await sandbox.start(placed)
        try:
            if group is not None:
                # A process that has already ended never received its job, so no user code has run.
                with suppress(ProcessLookupError, FileNotFoundError):
                    group.add(process.child.pid)
            living = _live(process, placed, routes, sandbox.machine.tls)
            ending, overdrawn = await _watched(living, placed, sandbox.machine.walls)
        finally:
            await asyncio.shield(process.end(sandbox.machine.walls))
        return Ended(ending, process.child.returncode, process.child.tail.decode(errors="replace"), overdrawn)


async def _live(process: Process, job: Job, routes: Routes, tls: ssl.SSLContext) -> Ending | None:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(process.control, encode(job))
        listeners = await _listeners(process.control) if job.own_network else routes.listeners
    except (BrokenPipeError, ConnectionResetError):
        return None  # its exit code shows why
    forwarder = Forwarder(listeners, routes.targets[: len(listeners)], tls)
    forwarder.start()
    try:
        return await _ending_of(process)
    finally:
        await forwarder.close()


async def _listeners(control: socket.socket) -> list[socket.socket]:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(control, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(control)
    _, descriptors, _, _ = socket.recv_fds(control, 1, _MAX_LISTENERS)
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


async def _ending_of(process: Process) -> Ending | None:
    loop, received = asyncio.get_running_loop(), b""
    with suppress(ConnectionResetError):
        while not received.endswith(b"\n") and (more := await loop.sock_recv(process.control, 4_096)):
            received += more
    return _ending.decode(received) if received else None


# Without a separate file system


@contextlib.contextmanager
def _room_for(job: Job, machine: Machine) -> Iterator[Job]:
    if machine.walls.own_files:
        yield job
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{LEFT_BEHIND[1]}{os.getpid()}-", dir=machine.programs.parent))
    try:
        if job.user:
            os.chown(folder, job.user, job.user)
        work = {"HOME": str(folder), "TMPDIR": str(folder)}
        yield replace(job, work=str(folder), environment=job.environment | work)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _watched(living: Coroutine[Any, Any, Ending | None], job: Job, walls: Walls) -> tuple[Ending | None, bool]:
    """Aborts the run if it exceeds its limit on a shared disk."""
    life = asyncio.create_task(living)
    try:
        while True:
            done, _ = await asyncio.wait({life}, timeout=None if walls.own_files else _WATCH_SECONDS)
            if done:
                return life.result(), False
            if await asyncio.to_thread(_filled, job.work) > job.disk_bytes:
                return None, True
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def _filled(folder: str) -> int:
    """Returns the bytes on disk of all files below. Files that disappear during the walk are ignored."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return total
