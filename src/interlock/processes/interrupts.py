"""Signals to the supervisor: the first one starts a drain, the next one shortens it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

T = TypeVar("T")
log = structlog.get_logger()

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """Raised when a drain is requested before the current work is complete."""


class Interrupts:
    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurry = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            log.warning("hurrying", signal=number.name)
            self.hurry.set()
        else:
            log.info("draining", signal=number.name, hint="send it again to hurry")
            self.requested.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. If a drain is requested first, cancels `work` and raises Interrupted."""
        working = asyncio.create_task(work)
        requested = asyncio.create_task(self.requested.wait())
        try:
            await asyncio.wait({working, requested}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted
        finally:
            requested.cancel()
            working.cancel()
            await asyncio.wait({working})
