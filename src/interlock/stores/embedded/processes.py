"""Server processes: start them detached, find them again, identify them safely, and stop them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from interlock.stores.embedded.account import Account
from interlock.stores.embedded.files import TICK

Recognise = Callable[[Sequence[str]], bool]
"""Returns True if a command line belongs to the wanted process."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers started by this process, kept so that they can be reaped."""


def server_environment() -> dict[str, str]:
    """Returns a minimal environment: ours contains secrets, and PG* variables that would affect servers."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def spawn(command: Sequence[str], *, account: Account, cwd: Path, log: int) -> psutil.Process:
    """Starts a server in its own session, so that neither Ctrl-C nor our death ends it."""
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
