"""Signals to the supervisor: the first asks for a drain, the next to hurry."""

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
    """A drain was asked for before the work at hand was done."""


class Interrupts:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP for us
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            log.warning("hurrying", signal=number.name)
            self.hurry.set()
        else:
            log.info("draining", signal=number.name, hint="once more to hurry")
            self.asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`; when a drain is asked for first, `work` is cancelled and Interrupted raised."""
        working = asyncio.create_task(work)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Interrupted
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.wait({working})
