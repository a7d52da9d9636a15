"""The lines of logs on the terminal, for `interlock task logs` and `interlock job logs`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from interlock.cli.conventions import Output
from interlock.cli.output import console
from interlock.wire.logs import GAP, JobLogLine, LogLine

if TYPE_CHECKING:
    from interlock.client import Client

_STYLES: Final = {"stderr": "yellow", "traceback": "red", GAP: "dim"}


async def print_task_log(
    client: Client, task_id: UUID | str, *, attempt: int | None, follow: bool, output: Output
) -> int:
    """Prints the lines of an attempt as they arrive. Returns their number."""
    count = 0
    async for line in client.logs.of_task(task_id, attempt=attempt, follow=follow):
        _print(line, output)
        count += 1
    return count


async def print_job_log(client: Client, job: str, *, run: UUID | str | None, follow: bool, output: Output) -> int:
    """Prints the lines of a job's tasks as they arrive, each with its task. Returns their number."""
    count = 0
    async for line in client.logs.of_job(job, run=run, follow=follow):
        _print(line, output)
        count += 1
    return count


def _print(line: LogLine | JobLogLine, output: Output) -> None:
    if output is Output.JSON:
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        return
    from rich.text import Text

    at = line.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    parts = [(f"{at} ", "dim")]
    if isinstance(line, JobLogLine):
        parts.append((f"{str(line.task_id)[:13]}/{line.attempt} ", "cyan"))
    console().print(Text.assemble(*parts, (line.text, _STYLES.get(line.stream, ""))), soft_wrap=True)
