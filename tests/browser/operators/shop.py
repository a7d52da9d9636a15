"""Operators of the installation that the browser tests open."""

from __future__ import annotations

import threading
from typing import Any

from interlock.workers import TaskContext, TaskFailed, operator


@operator
def fetch_page(payload: dict[str, Any], ctx: TaskContext) -> dict[str, int]:
    """Fails with one of two errors, depending on the number of the page."""
    number = payload["n"]
    ctx.progress(0.5, f"page {number}")
    if number % 11 == 3:
        raise TaskFailed(f"GET {payload['url']} answered 503 after {number * 13} ms", "HttpStatus503")
    if number % 23 == 5:
        raise TimeoutError(f"no answer from host-{number % 5} in 30 s")
    return {"bytes": number * 1000}


@operator
def crawl(_payload: dict[str, Any], ctx: TaskContext) -> None:
    """Runs until it is canceled."""
    step, pause = 0, threading.Event()
    while not ctx.canceled:
        step += 1
        ctx.progress(min(step / 2000, 1.0), f"page {step} of 2000")
        pause.wait(0.2)


@operator
def shout(payload: dict[str, Any], _ctx: TaskContext) -> None:
    """Fails with the text of the payload as error class and message."""
    raise TaskFailed(payload["text"], payload["text"][:60])
