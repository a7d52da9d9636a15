"""One confined process: start it, tell it its job, hear of its end, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from interlock.runner.confinement import Machine, Walls
from interlock.runner.forward import Forwarder, Target
from interlock.runner.groups import Group
from interlock.runner.inside.job import Ending, Job, encode

TAIL_BYTES: Final = 4_096
_CHUNK: Final = 1 << 16
_MOST_LISTENERS: Final = 16
_KILL_SECONDS: Final = 10.0
_LAST_WORDS_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 0.2

LEFT_BEHIND: Final = ("programs-", "work-")
"""Folders of a runner, followed by its process id: it may be killed before it can remove them."""

_ending = msgspec.json.Decoder(Ending)


@dataclass
class Process:
    """A process, the socket by which it is told its job, and the end of what it writes."""

    handle: asyncio.subprocess.Process
    control: socket.socket
    tail: bytearray = field(default_factory=bytearray)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, command: Sequence[str], control: socket.socket, descriptors: Sequence[int]) -> Process:
        handle = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            cwd="/",
            pass_fds=descriptors,
            start_new_session=True,
        )
        process = cls(handle, control)
        process._reading = asyncio.create_task(process._read())
        return process

    async def _read(self) -> None:
        """However much it writes: it is never held up, and only the end is kept."""
        if self.handle.stdout is None:
            return
        while chunk := await self.handle.stdout.read(_CHUNK):
            self.tail += chunk
            del self.tail[:-TAIL_BYTES]

    @property
    def alive(self) -> bool:
        return self.handle.returncode is None

    async def end(self, walls: Walls) -> None:
        """It hears that we hung up and kills all that it started; where the kernel does so by itself, it is killed."""
        self.control.close()
        if not walls.own_files:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.handle.wait(), _KILL_SECONDS)
        with suppress(ProcessLookupError):
            self.handle.kill()
        await self.handle.wait()
        if self._reading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reading, _LAST_WORDS_SECONDS)


class Sandbox:
    """Starts processes. One is kept in stock, loaded and waiting, where it need not know its job from the start."""

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
            if process.alive:
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
    """How a run ended; `ending` is None for one that was broken off, or whose keeper did not say."""

    ending: Ending | None
    code: int | None
    """Of the process that the runner started."""
    tail: str
    overdrawn: bool = False
    """Ended for filling more of the disk than it may, where no file system of its own holds it to that."""


async def run(sandbox: Sandbox, job: Job, targets: Sequence[Target], group: Group | None) -> Ended:
    """Until its end. Cancelling this kills everything of it before it returns."""
    with _room_for(job, sandbox.machine) as placed:
        process = await sandbox.start(placed)
        try:
            if group is not None:
                # One that has ended already has not begun with the code, for it was not told of it.
                with suppress(ProcessLookupError, FileNotFoundError):
                    group.add(process.handle.pid)
            ending, overdrawn = await _watched(_live(process, placed, targets), placed, sandbox.machine.walls)
        finally:
            await asyncio.shield(process.end(sandbox.machine.walls))
        return Ended(ending, process.handle.returncode, process.tail.decode(errors="replace"), overdrawn)


async def _live(process: Process, job: Job, targets: Sequence[Target]) -> Ending | None:
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(process.control, encode(job))
        if not job.own_network:
            return await _ending_of(process)
        listeners = await _listeners(process.control)
    except (BrokenPipeError, ConnectionResetError):
        return None  # its exit code says why
    forwarder = Forwarder(listeners, targets[: len(listeners)])
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
    _, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_LISTENERS)
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


async def _ending_of(process: Process) -> Ending | None:
    loop, said = asyncio.get_running_loop(), b""
    with suppress(ConnectionResetError):
        while not said.endswith(b"\n") and (more := await loop.sock_recv(process.control, 4_096)):
            said += more
    return _ending.decode(said) if said else None


# Where there is no file system of its own


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
    """Breaks it off when it has filled more than its share of a disk that it shares with others."""
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
    """Bytes on disk of all files below; what goes away meanwhile counts nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return total
