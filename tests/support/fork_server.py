"""Imports Interlock once and forks a process on request: most of the start-up time is imports.

Run as a program with the descriptor of its channel. A request is a packet with the arguments of `interlock`, a file for
its output, and its end of the handover. Replies are packets, too: `[pid]` for a start, `[pid, code]` for an exit.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback

LOADED = (
    "interlock.cli.app",
    "interlock.apps.dispatcher",
    "interlock.apps.gateway",
    "interlock.workers",
    "interlock.telemetry",
    "uvloop",
)
MAX_BYTES = 65_536


def serve(channel: socket.socket) -> None:
    """Serves until the tests disconnect. Children that still run then die with this process."""
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()  # otherwise a collection in each child would copy shared pages
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(mouth)
    while True:
        ready, _, _ = select.select([channel.fileno(), ears], [], [])
        if ears in ready:
            os.read(ears, MAX_BYTES)
            _tell_ends(channel)
        if channel.fileno() in ready and not _fork(channel):
            return


def _tell_ends(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _fork(channel: socket.socket) -> bool:
    request, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 2)
    if not request:
        return False
    # Its exit must be reported after its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = os.fork()
    if pid == 0:
        _become(json.loads(request), descriptors, channel)
    channel.send(json.dumps([pid]).encode())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _become(arguments: list[str], descriptors: list[int], channel: socket.socket) -> None:
    """Runs `interlock` in the child, as if started separately."""
    code = 1
    try:
        parent, (output, handover) = os.getppid(), descriptors
        os.setsid()
        channel.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for number in (1, 2):
            os.dup2(output, number)
        random.seed()
        sys.argv = ["interlock", *arguments, "--parent", str(parent), "--handover", str(handover)]
        sys.exit(importlib.import_module("interlock.cli.app").execute(sys.argv[1:]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # the child must never continue as the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
