"""Reports the operators of a worker to the dispatcher: on start, on change, and every REPORT_SECONDS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from interlock.client import WorkerClient
from interlock.errors import NotFound
from interlock.wire import OperatorsReport
from interlock.workers.catalogue import MAX_OPERATORS, Catalogue

log = structlog.get_logger()

LOOK_SECONDS: Final = 2.0
"""Pause between two scans of the sources. A new operator is usable after this time."""
REPORT_SECONDS: Final = 20.0


class OperatorReports:
    def __init__(
        self,
        client: WorkerClient,
        catalogue: Catalogue,
        queue: str,
        worker_id: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called before a report if operators were added or removed since the last one."""
        self._client, self._catalogue, self._on_change = client, catalogue, on_change
        self._queue, self._worker_id = queue, worker_id
        self._reported: list[str] | None = None
        self._reported_at = 0.0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self.run_once()
            # Large folders are scanned less often: scans take at most a twentieth of a core.
            await asyncio.sleep(max(LOOK_SECONDS, 20 * (time.monotonic() - began)))

    async def run_once(self) -> None:
        """Reports if the operators changed, or if the last report is old."""
        names = await asyncio.to_thread(self._catalogue.names)
        due = time.monotonic() - self._reported_at >= REPORT_SECONDS
        if names == self._reported and not due:
            return
        if names != self._reported:
            self._log(names)
            if self._reported is not None:
                self._on_change()
        try:
            report = OperatorsReport(queue=self._queue, worker_id=self._worker_id, operators=names)
            await self._client.report_operators(report)
        except NotFound:
            # The dispatcher has an older version. It does not check names, so only the worker does.
            log.warning("worker.operators_not_reported", reason="the dispatcher has no endpoint for these reports")
        self._reported, self._reported_at = names, time.monotonic()

    def _log(self, names: list[str]) -> None:
        log.info("worker.operators", operators=len(names), sources=[one.text for one in self._catalogue.sources])
        if self._catalogue.truncated:
            log.warning(
                "worker.operators_left_out",
                limit=MAX_OPERATORS,
                hint="the folders contain too many files or operators: pass smaller ones with --operators",
            )
