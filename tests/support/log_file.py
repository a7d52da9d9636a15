"""Logs of this process in a file, whatever other tests have configured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import structlog

from interlock import telemetry


@contextlib.contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """Logs like a process at its most verbose level, and restores the configuration afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    telemetry.configure("debug", "json", process="test", file=file)
    structlog.configure(cache_logger_on_first_use=False)
    try:
        yield
    finally:
        for handler in root.handlers:
            with contextlib.suppress(OSError):  # a full disk loses these lines, too
                handler.close()
        root.handlers, root.level = handlers, level
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
