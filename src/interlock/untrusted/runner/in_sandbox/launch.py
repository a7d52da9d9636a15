"""A fresh process that has loaded what a handler needs and waits for a job."""

from __future__ import annotations

import os
import socket
import sys
import traceback
import urllib.request  # noqa: F401 - what the SDK loads, for a process that waits in stock
from collections.abc import Callable
from typing import NoReturn

from interlock.untrusted.runner.in_sandbox import keeper, namespaces
from interlock.untrusted.runner.in_sandbox.job import EXIT_WALLS, Job, receive


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
    keeper.keep(control, job)


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
    keeper.keep(control, job)


def _attempt(step: Callable[[], None]) -> None:
    try:
        step()
    except OSError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_WALLS)
