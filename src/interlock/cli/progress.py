"""Progress of uploads, runs and tasks: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from interlock.cli.output import console
from interlock.wire.jobs import ListFormat

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire.jobs import JobRequest, ListSource


import asyncio
import time
from typing import TYPE_CHECKING
from uuid import UUID

from interlock.cli.output import percent
from interlock.wire.base import TaskStatus

if TYPE_CHECKING:
    from rich.progress import Progress

    from interlock.client import Client
    from interlock.wire.dags import BackfillView
    from interlock.wire.jobs import Counts, RunView
    from interlock.wire.tasks import TaskView


_BY_NAME: Final = {".csv": ListFormat.CSV, ".txt": ListFormat.LINES, ".jsonl": ListFormat.JSONL}
_PACKED: Final = (".gz", ".zst", ".zstd")


async def uploaded(
    client: Client, request: JobRequest, file: Path, form: ListFormat | None, *, quiet: bool
) -> JobRequest:
    """Uploads the list and returns the request with it as source."""
    if quiet or not console().is_terminal:
        source = await client.lists.put(file, form or format_of(file))
    else:
        source = await _upload_with_bar(client, file, form or format_of(file))
    return msgspec.structs.replace(request, tasks=None, source=source)


async def _upload_with_bar(client: Client, file: Path, form: ListFormat) -> ListSource:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console()) as bar:
        row = bar.add_task(f"upload {file.name}", total=None)

        def show(sent: int, total: int) -> None:
            bar.update(row, completed=sent, total=total)

        return await client.lists.put(file, form, on_sent=show)


def format_of(file: Path) -> ListFormat:
    """Determines the format by the file's extension, without that of the compression."""
    plain = file.with_suffix("") if file.suffix in _PACKED else file
    return _BY_NAME.get(plain.suffix, ListFormat.JSONL)


_LOOK_SECONDS: Final = 0.2
_LINE_SECONDS: Final = 5.0
_DIGITS: Final = 8


def ended(run: RunView) -> int:
    """Number of tasks in a final state."""
    return _ended(run.counts)


async def watch_run(client: Client, run_id: UUID | str, *, quiet: bool = False, label: str | None = None) -> RunView:
    name = label or f"run {str(run_id)[:_DIGITS]}"
    if quiet:
        return await client.wait(run_id, poll_seconds=_LOOK_SECONDS)
    if console().is_terminal:
        return await _with_bar(client, run_id, name)
    lines = _Lines(name)
    return await client.wait(run_id, lines.show, poll_seconds=_LOOK_SECONDS)


async def _with_bar(client: Client, run_id: UUID | str, label: str) -> RunView:
    with _bar() as bar:
        row = bar.add_task(label, total=None, failed="", rate="")
        start = time.monotonic()

        def show(run: RunView) -> None:
            done = ended(run)
            failed = f"[red]{run.counts.dead} failed[/]" if run.counts.dead else ""
            rate = f"{done / max(time.monotonic() - start, 0.001):,.0f}/s"
            bar.update(row, total=run.total, completed=done, failed=failed, rate=rate)

        return await client.wait(run_id, show, poll_seconds=_LOOK_SECONDS)


def _bar() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/]"),
        TimeRemainingColumn(),
        console=console(),
    )


async def watch_backfill(client: Client, run_id: UUID | str, *, quiet: bool = False) -> BackfillView:
    """Shows how many tasks are created and how many of them are done, until the last one has ended."""
    name = f"backfill {str(run_id)[:_DIGITS]}"
    if quiet:
        return await client.backfills.wait(run_id)
    if console().is_terminal:
        return await _backfill_with_bar(client, run_id, name)
    shown = ""

    def show(found: BackfillView) -> None:
        nonlocal shown
        line = f"{name}: {found.state}, {found.made} tasks created, {_ended(found.counts)} done"
        if line != shown:
            console().print(line)
            shown = line

    return await client.backfills.wait(run_id, show, poll_seconds=_LINE_SECONDS / 5)


async def _backfill_with_bar(client: Client, run_id: UUID | str, label: str) -> BackfillView:
    with _bar() as bar:
        row = bar.add_task(label, total=None, failed="", rate="")
        start = time.monotonic()

        def show(found: BackfillView) -> None:
            done = _ended(found.counts)
            failed = f"[red]{found.counts.dead} failed[/]" if found.counts.dead else ""
            rate = f"{found.state}, {done / max(time.monotonic() - start, 0.001):,.0f}/s"
            bar.update(row, total=found.total, completed=done, failed=failed, rate=rate)

        return await client.backfills.wait(run_id, show, poll_seconds=_LOOK_SECONDS)


def _ended(counts: Counts) -> int:
    return counts.Completed + counts.Canceled + counts.dead


class _Lines:
    """Prints a line when the state changes, and at intervals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = ""
        self._shown_at = float("-inf")

    def show(self, run: RunView) -> None:
        if run.state == self._state and time.monotonic() - self._shown_at < _LINE_SECONDS:
            return
        self._state, self._shown_at = run.state, time.monotonic()
        failed = f", {run.counts.dead} failed" if run.counts.dead else ""
        of = "" if run.total is None else f" of {run.total}"
        console().print(f"{self._name}: {run.state}, {ended(run)}{of} done{failed}")


async def watch_task(client: Client, task_id: UUID | str, *, quiet: bool = False) -> TaskView:
    """Follows a task through its attempts. A failed task with a retry to come has not ended."""
    shown = ""
    while True:
        task = await client.task(task_id)
        line = _line(task)
        if line != shown and not quiet:
            console().print(f"{time.strftime('%H:%M:%S')} {line}")
            shown = line
        if task.dead or task.status in (TaskStatus.COMPLETED, TaskStatus.CANCELED):
            return task
        await asyncio.sleep(_LOOK_SECONDS)


def _line(task: TaskView) -> str:
    parts = [f"attempt {task.attempt}", str(task.status)]
    if task.status is TaskStatus.RUNNING:
        parts += filter(None, [percent(task.progress), task.progress_text, task.worker_id and f"on {task.worker_id}"])
    if task.status is TaskStatus.FAILED:
        parts += filter(None, [task.error_class, task.error_message])
        parts.append("no retry" if task.dead else "will be retried")
    return ", ".join(parts)
