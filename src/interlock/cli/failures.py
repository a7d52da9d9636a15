"""Failing jobs of DAGs, shown by every command that lists something they make or use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from interlock.cli.conventions import Output, ask
from interlock.cli.output import console, present

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.dags import FailingJob

T = TypeVar("T")


def present_with_failures(
    folder: Path | None,
    read: Callable[[Client], Coroutine[Any, Any, T]],
    output: Output,
    show: Callable[[T], RenderableType],
    *,
    dag: str | None = None,
) -> None:
    """Prints what `read` returns and, for people, the jobs that fail now with the command that shows more."""
    failures: list[FailingJob] = []

    async def work(client: Client) -> T:
        found = await read(client)
        if output is Output.TABLE:
            failures.extend((await client.dags.failures(dag)).failures)
        return found

    present(ask(folder, work), output, show)
    for failure in failures:
        console().print(line(failure), style="red", markup=False, soft_wrap=True)


def line(failure: FailingJob) -> str:
    tasks = f"{failure.failing}{'+' if failure.more else ''} failed task{'' if failure.failing == 1 else 's'}"
    why = ": ".join(filter(None, (failure.error_class, failure.error_message)))
    return f"{failure.dag}/{failure.job}: {tasks}, {why or 'no message'} · interlock task logs {failure.task_id}"
