"""A fresh process that has loaded what a handler needs, and waits to be told whose code to run."""

from __future__ import annotations

import os
import socket
import sys
import traceback
import urllib.request  # noqa: F401 - what the SDK loads, for a process that waits in stock
from collections.abc import Callable
from typing import NoReturn

from interlock.runner.inside import keeper, walls
from interlock.runner.inside.job import EXIT_WALLS, Job, receive


def main(descriptor: int) -> NoReturn:
    """As the first process that the runner starts: it makes the walls itself. It ends when the runner hangs up."""
    control, job = _told(descriptor)
    if job.namespaces:
        _attempt(walls.separate)
        walls.follow_parent()
    child = os.fork()
    if child == 0:
        _begin(control, job)
    # The first process inside is the child: this one stays outside and waits.
    control.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else EXIT_WALLS)


def inside(descriptor: int) -> NoReturn:
    """As the first process inside of bubblewrap's walls."""
    control, job = _told(descriptor)
    if job.user:
        os.chown(job.work, job.user, job.user)
    keeper.keep(control, job)


def _told(descriptor: int) -> tuple[socket.socket, Job]:
    os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=descriptor)
    job = receive(control)
    if job is None:
        os._exit(0)
    return control, job


def _begin(control: socket.socket, job: Job) -> NoReturn:
    """Without namespaces the keeper must outlive its parent, to kill what it keeps when the runner is gone."""
    if job.namespaces:
        walls.follow_parent()
        _attempt(lambda: walls.build(job))
        walls.forget_outside()
    keeper.keep(control, job)


def _attempt(step: Callable[[], None]) -> None:
    try:
        step()
    except OSError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_WALLS)
