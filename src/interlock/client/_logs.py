"""Calls for the logs of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final
from uuid import UUID

from interlock.client._caller import Caller, path, query
from interlock.wire.logs import JobLog, JobLogLine, LogLine, TaskLog

POLL_SECONDS: Final = 0.5


class LogCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def task_page(
        self, task_id: UUID | str, *, attempt: int | None = None, after: int = 0, limit: int = 16
    ) -> TaskLog:
        """Returns a part of the log of an attempt, by default of the latest."""
        target = query(path("v1", "tasks", task_id, "logs"), attempt=attempt, after=after, limit=limit)
        return await self._caller.call("GET", target, TaskLog)

    async def of_task(
        self, task_id: UUID | str, *, attempt: int | None = None, follow: bool = False
    ) -> AsyncIterator[LogLine]:
        """Yields the lines of an attempt; with `follow`, until the attempt has ended."""
        after = 0
        while True:
            page = await self.task_page(task_id, attempt=attempt, after=after)
            attempt, after = page.attempt, page.next
            for line in page.lines:
                yield line
            if page.more:
                continue
            if page.ended or not follow:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def job_page(
        self, job: UUID | str, *, run: UUID | str | None = None, after: int = 0, limit: int = 16
    ) -> JobLog:
        """Returns a part of the log of a run, by default the newest of the job, or of a job of a DAG.

        Without `after` these are the newest lines.
        """
        target = query(path("v1", "jobs", job, "logs"), run=run, after=after, limit=limit)
        return await self._caller.call("GET", target, JobLog)

    async def of_job(
        self, job: UUID | str, *, run: UUID | str | None = None, follow: bool = False
    ) -> AsyncIterator[JobLogLine]:
        """Yields the newest lines of a job's tasks; with `follow`, also those that are printed from now on."""
        after = 0
        while True:
            page = await self.job_page(job, run=run, after=after, limit=100)
            after = page.next
            for line in page.lines:
                yield line
            if not page.more:
                if not follow:
                    return
                await asyncio.sleep(POLL_SECONDS)
