"""Loads Interlock once, and forks a process of it whenever the tests ask: most of a start is loading.

Run as a program with the descriptor of its channel. A request is a packet with the arguments of `interlock`, a file for
what it says, and its end of the handover. Answers are packets, too: `[pid]` for a start, `[pid, code]` for an end.
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
    "interlock.api.run",
    "interlock.wiring",
    "interlock.workers",
    "interlock.telemetry",
    "uvloop",
)
MOST_BYTES = 65_536


def serve(channel: socket.socket) -> None:
    """Until the tests hang up: what still runs then dies with its parent."""
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()  # or a collection in each child would copy what they share
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(mouth)
    while True:
        ready, _, _ = select.select([channel.fileno(), ears], [], [])
        if ears in ready:
            os.read(ears, MOST_BYTES)
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
    said, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, 2)
    if not said:
        return False
    # Its end may be told only after its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = os.fork()
    if pid == 0:
        _become(json.loads(said), descriptors, channel)
    channel.send(json.dumps([pid]).encode())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _become(arguments: list[str], descriptors: list[int], channel: socket.socket) -> None:
    """As if it had been started by itself."""
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
    except BaseException:  # nothing may go on as the server that it was forked from
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
