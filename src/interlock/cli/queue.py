"""`interlock queue`: queues, their workers, and their dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from interlock.cli.conventions import (
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    ask,
    collect,
    command,
    group,
)
from interlock.cli.failures import present_with_failures
from interlock.cli.output import confirm, present, seconds_since, table
from interlock.wire.dags import PauseLevel, PauseView
from interlock.wire.tasks import QueueList, QueueView

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.access import WorkerList
    from interlock.wire.tasks import DeadMessagePage

app = group("Queues of wake-ups, their dead letters and their workers.")

_MAX_PAUSES: Final = 1_000
_HELD: Final = {PauseLevel.BULK: "bulk", PauseLevel.ALL: "all work"}

QueueName = Annotated[
    str, typer.Argument(help="Name of the queue; the queue of a runtime has the same name.", metavar="QUEUE")
]


@command(app, "list", example="interlock queue list")
def list_queues(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show depth, age and dead letters of every queue."""

    present(ask(folder, lambda client: client.queues()), output, _queues)


class QueueStatus(Struct, frozen=True, kw_only=True):
    queues: list[QueueView]
    pauses: list[PauseView]


@command(app, "status", example="interlock queue status --output json")
def status(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show every queue, and the jobs that are paused by backpressure: why, since when, and the path to the cause."""

    async def read(client: Client) -> QueueStatus:
        pauses, _ = await collect(client.pause_page, lambda page: page.pauses, None, _MAX_PAUSES)
        return QueueStatus(queues=(await client.queues()).queues, pauses=pauses)

    present_with_failures(folder, read, output, _status)


def _status(found: QueueStatus) -> RenderableType:
    from rich.console import Group

    queues = _queues(QueueList(queues=found.queues))
    return Group(queues, "", _pauses(found.pauses)) if found.pauses else queues


def _pauses(pauses: list[PauseView]) -> RenderableType:
    rows = [(" → ".join(p.path), _HELD[p.level], p.since, seconds_since(p.since), p.reason) for p in pauses]
    return table(("paused job → cause", "paused", "since", "", "reason"), rows, empty="No job is paused.")


def _queues(found: QueueList) -> RenderableType:

    rows = [(q.queue, q.depth, q.in_flight, q.oldest_age_seconds, q.dead_letters) for q in found.queues]
    return table(("queue", "waiting", "in flight", "oldest s", "dead letters"), rows, empty="There are no queues.")


@command(app, "workers", example="interlock queue workers")
def workers(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show workers that have polled for work in the last minute."""

    present(ask(folder, lambda client: client.workers()), output, _workers)


def _workers(found: WorkerList) -> RenderableType:

    rows = [(w.worker_id, w.queue, seconds_since(w.last_seen_at)) for w in found.workers]
    empty = "No worker has polled for work in the last minute; start one with `interlock serve worker`."
    return table(("worker", "queue", "last seen"), rows, empty=empty)


@command(app, "dead-letters", example="interlock queue dead-letters platform")
def dead_letters(
    queue: QueueName, limit: LimitOption = 100, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Show wake-ups that were received too often without being settled.

    Tasks that have used up their attempts are dead letters of another kind: `interlock task list --status Failed`.
    """

    present(ask(folder, lambda client: client.dead_letters(queue, min(limit, 1000))), output, _dead_letters)


def _dead_letters(found: DeadMessagePage) -> RenderableType:

    rows = [(m.message_id, m.receives, m.enqueued_at, m.dead_at, m.body) for m in found.messages]
    return table(("message", "receives", "sent", "dead since", "body"), rows, empty="There are no dead letters.")


@command(app, "redrive", example="interlock queue redrive platform")
def redrive(
    queue: QueueName, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Redeliver the dead letters of a queue."""

    confirm(f"Redeliver all dead letters of {queue}?", yes=yes)
    changed = ask(folder, lambda client: client.redrive_queue(queue))
    present(changed, output, lambda done: f"{done.matched} redelivered.")
