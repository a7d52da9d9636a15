"""The child's side of being supervised: it takes over what its supervisor hands it, and does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Final

import msgspec

ORPHANED: Final = 1
_LOOK_SECONDS: Final = 1.0
_MOST_BYTES: Final = 1 << 16


def die_with(parent: int) -> None:
    """Has this process killed when `parent`, which started it, ends; also when it has ended already.

    The kernel does it on Linux, so that it holds for a process that hangs, too. Elsewhere a thread looks.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ORPHANED)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(ORPHANED)


def take_over(channel: int) -> int | None:
    """Waits for what the supervisor hands over: variables for the environment, and maybe a listening socket."""
    with socket.socket(fileno=channel) as supervisor:
        said, listeners, _, _ = socket.recv_fds(supervisor, _MOST_BYTES, 1)
        while more := supervisor.recv(_MOST_BYTES):
            said += more
    if not said:  # it ended before it got that far
        os._exit(ORPHANED)
    os.environ.update(msgspec.json.decode(said, type=dict[str, str]))
    return listeners[0] if listeners else None
