"""User code that exceeds each of its limits, one entrypoint per limit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from interlock.client.task import Task


def memory(event: dict[str, Any], task: Task) -> int:
    return len(bytearray(1 << 30))


def memory_of_many(event: dict[str, Any], task: Task) -> None:
    """Starts processes that each stay within their own limit."""
    for _ in range(6):
        if os.fork() == 0:
            held = bytearray(b"x") * (60 << 20)
            signal.pause()
            os._exit(len(held) % 2)
    os.wait()
    sys.exit(9)


def processor(event: dict[str, Any], task: Task) -> None:
    while True:
        pass


def disk(event: dict[str, Any], task: Task) -> None:
    for number in range(1000):
        Path(f"file-{number}").write_bytes(b"x" * (1 << 20))


def disk_unseen(event: dict[str, Any], task: Task) -> None:
    """Ignores errors, and fails later."""
    try:
        disk(event, task)
    except OSError:
        sys.exit(3)


def one_large_file(event: dict[str, Any], task: Task) -> None:
    with Path("file").open("wb") as file:
        file.truncate(1 << 40)


def forks(event: dict[str, Any], task: Task) -> None:
    while True:
        if os.fork() == 0:
            signal.pause()


def fork_bomb(event: dict[str, Any], task: Task) -> None:
    while True:
        try:
            os.fork()
        except OSError:
            continue


def threads(event: dict[str, Any], task: Task) -> None:
    while True:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def time(event: dict[str, Any], task: Task) -> None:
    threading.Event().wait()


def leaves(event: dict[str, Any], task: Task) -> None:
    sys.exit(7)


def breaks(event: dict[str, Any], task: Task) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def writes(event: dict[str, Any], task: Task) -> str:
    for _ in range(200):
        sys.stdout.write("x" * 100_000 + "\n")
    sys.stdout.write("the end\n")
    return "written"


def raises(event: dict[str, Any], task: Task) -> None:
    raise KeyError("of the handler's own")
