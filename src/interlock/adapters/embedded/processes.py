"""Server processes: started apart from us, found again, told from strangers, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from interlock.adapters.embedded.account import Account
from interlock.adapters.embedded.files import TICK

Recognise = Callable[[Sequence[str]], bool]
"""Tells from a command line whether a process is the one meant."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers started by this process, kept so that whoever finds one ended can reap it."""


def server_environment() -> dict[str, str]:
    """Nothing of ours: the supervisor's environment holds secrets, and its PG* variables steer servers."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def spawn(command: Sequence[str], *, account: Account, cwd: Path, log: int) -> psutil.Process:
    """Starts a server in a session of its own, so that neither Ctrl-C nor our death reaches it."""
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
    """False for zombies too: in a container there may be nobody to reap a server that was adopted."""
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
    """The process with that id when it is ours; None when it is gone or the id has passed to a stranger."""
    try:
        process = psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None
    return process if is_alive(process) and _matches(process, account, recognise) else None


def find_all(account: Account, recognise: Recognise) -> list[psutil.Process]:
    """Every process that is ours, with all that descends from it."""
    found = [process for process in psutil.process_iter() if _matches(process, account, recognise)]
    return list({*found, *(descendant for process in found for descendant in _descendants(process))})


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def end(process: psutil.Process, signal_number: int, patience: float) -> bool:
    """Sends the signal and waits; True when the process has ended."""
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
    """False for a process of a container seen from its host: the same path means another folder there."""
    root = Path(f"/proc/{pid}/root")
    try:
        return root.samefile("/")
    except OSError:  # not ours to see, or no /proc: then there are no other roots in sight
        return True
