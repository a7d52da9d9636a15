"""The processes around a handler: one that waits for a job, and the first one inside the walls.

A fresh process loads the modules that a handler needs and waits for a job. The first process inside, the keeper, starts
the user process, waits, and reports how it ended. Its own end ends all others. In a PID namespace the kernel ensures
that. Without one, the keeper adopts orphans and kills them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
import urllib.request  # noqa: F401 - what the SDK loads, for a process that waits in stock
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from interlock.processes import linux
from interlock.untrusted.runner.in_sandbox import entry, namespaces, privileges
from interlock.untrusted.runner.in_sandbox.job import EXIT_WALLS, Ending, Job, receive, send_ending, send_listeners

_PATIENCE_MS: Final = 100
"""Interval between two checks for orphans that have ended."""


def keep(control: socket.socket, job: Job) -> NoReturn:
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    if job.own_network:
        _hand_over_network(control, job)
    process = os.fork()
    if process == 0:
        _run(job)
    status = _wait(control, process)
    _kill_rest(job)
    if status is not None:
        send_ending(control, _ending(status, job))
    os._exit(0)


def _hand_over_network(control: socket.socket, job: Job) -> None:
    namespaces.bring_up_loopback()
    listeners = namespaces.listen(job.places)
    send_listeners(control, listeners)
    for listener in listeners:
        listener.close()


def _run(job: Job) -> NoReturn:
    """Runs the user process. It skips Python's exit handlers, which belong to the keeper."""
    code = EXIT_WALLS
    try:
        os.setsid()
        namespaces.die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        privileges.drop_privileges(job)
        code = entry.FAILED  # from here on, a failure is one of the user code
        code = entry.run(job)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(control: socket.socket, process: int) -> int | None:
    """Returns the wait status, or None if the runner disconnects first."""
    with socket.socket(fileno=os.dup(control.fileno())) as lifeline:
        watched = select.poll()
        watched.register(lifeline, select.POLLIN | select.POLLHUP)
        handle = os.pidfd_open(process)
        watched.register(handle, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in watched.poll(_PATIENCE_MS)}
            if handle in ready:
                return os.waitpid(process, 0)[1]
            if lifeline.fileno() in ready:
                return None
            _reap_orphans(process)


def _reap_orphans(process: int) -> None:
    """Reaps every ended process except the user process, whose status is collected separately."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != process:
        os.waitpid(ended.si_pid, 0)


def _kill_rest(job: Job) -> None:
    """Kills remaining processes.

    In a PID namespace the keeper's end does so; otherwise it kills all its descendants.
    """
    if os.getpid() == 1:
        return
    if job.user:
        _kill_all_of(job.user)
    while found := _descendants(os.getpid()):
        _freeze(found)
        for descendant in _descendants(os.getpid()):
            _signal(descendant, signal.SIGKILL)
        for child in _children(os.getpid()):
            _reap(child)


def _freeze(found: list[int]) -> None:
    """Stops all descendants before the first one is killed. Killing one lets others fork again, possibly forever; a
    stopped process cannot fork, and the number of processes is limited."""
    frozen: set[int] = set()
    while new := set(found) - frozen:
        for descendant in new:
            _signal(descendant, signal.SIGSTOP)
        frozen |= new
        found = _descendants(os.getpid())


def _kill_all_of(user: int) -> None:
    """Kills all processes of a user with one call, so that they cannot outrun it by forking.

    No other code has this user.
    """
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(user, user, user)
            _signal(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    _reap(killer)


def _signal(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def _reap(process: int) -> None:
    try:
        os.waitpid(process, 0)
    except ChildProcessError:
        return


def _descendants(process: int) -> list[int]:
    """Lists all descendants. Orphans are included: the keeper adopts them."""
    children = _children(process)
    return [*children, *(below for child in children for below in _descendants(child))]


def _children(process: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(word) for word in thread.read_text().split()]
        except OSError:
            continue  # the process has ended
    return found


def _ending(status: int, job: Job) -> Ending:
    code = os.waitstatus_to_exitcode(status)
    room = os.statvfs(job.work)
    return Ending(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        disk_free=room.f_bavail * room.f_frsize,
        files_free=room.f_favail,
    )


def main(descriptor: int) -> NoReturn:
    """Entry point of the process that the runner starts; it builds the walls itself.

    Exits if the runner disconnects.
    """
    control, job = _receive_job(descriptor)
    if job.namespaces:
        _attempt(namespaces.separate)
        namespaces.die_with_parent()
    child = os.fork()
    if child == 0:
        _begin(control, job)
    # The child is the first process inside; this process stays outside and waits.
    control.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else EXIT_WALLS)


def inside(descriptor: int) -> NoReturn:
    """Entry point of the first process inside bubblewrap's namespaces."""
    control, job = _receive_job(descriptor)
    if job.user:
        os.chown(job.work, job.user, job.user)
    keep(control, job)


def _receive_job(descriptor: int) -> tuple[socket.socket, Job]:
    os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=descriptor)
    job = receive(control)
    if job is None:
        os._exit(0)
    return control, job


def _begin(control: socket.socket, job: Job) -> NoReturn:
    """Starts the keeper.

    Without namespaces it must outlive its parent, to kill its processes when the runner is gone.
    """
    if job.namespaces:
        namespaces.die_with_parent()
        _attempt(lambda: namespaces.build(job))
        namespaces.forget_outside()
    keep(control, job)


def _attempt(step: Callable[[], None]) -> None:
    try:
        step()
    except OSError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_WALLS)
