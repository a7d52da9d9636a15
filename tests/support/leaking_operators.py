"""Operators that leak a secret by accident, through each channel that operators have."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from interlock.workers import TaskContext, TaskFailed, operator


@operator
def leak(payload: Any, ctx: TaskContext) -> Any:
    """`payload` selects the channel."""
    value = ctx.secret("KEY")
    if ctx.config["key"] != "${secret:KEY}":
        raise TaskFailed("the config was filled in", "ConfigFilled")
    return globals()[f"_{payload['way']}"](value, ctx)


def _message(value: str, ctx: TaskContext) -> Any:
    raise RuntimeError(f"GET https://node/{value}?key={quote(value)} failed: {{'x-key': {value!r}}}")


def _cut_message(value: str, ctx: TaskContext) -> Any:
    raise RuntimeError("x" * (10_000 - len(value) // 2) + value + "y" * 100)


def _error_class(value: str, ctx: TaskContext) -> Any:
    raise TaskFailed("failed", value)


def _cause(value: str, ctx: TaskContext) -> Any:
    try:
        raise ValueError(value)
    except ValueError as error:
        raise RuntimeError(f"caused by {error}") from error


def _result(value: str, ctx: TaskContext) -> Any:
    return {"headers": {"x-key": value}, value: [value, f"Bearer {value}"], "bytes": value.encode().hex()}


def _progress(value: str, ctx: TaskContext) -> Any:
    ctx.progress(0.5, f"asking https://node/{value}")
    Path(ctx.config["fifo"]).read_bytes()  # blocks until the test has seen it
    return None


def _prints(value: str, ctx: TaskContext) -> Any:
    sys.stdout.write(f"key is {value}\n")
    sys.stderr.write(f"key is {value}")
    os.write(1, f"past Python: {value}\n".encode())
    os.write(2, f"past Python: {value}\n".encode())
    return None


def _crash(value: str, ctx: TaskContext) -> Any:
    os.write(2, f"Fatal: {value}\n".encode())
    if ctx.attempt == 1:
        os._exit(3)
    return {"attempt": ctx.attempt, "key": value}


@operator
def seen(payload: Any, ctx: TaskContext) -> Any:
    """Shows which value it received without revealing it."""
    return {"is": [ctx.secret("KEY") == guess for guess in payload["guesses"]], "env": dict.fromkeys(ctx.environment)}
