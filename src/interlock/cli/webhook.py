"""`interlock webhook`: webhooks for run outcomes, and their deliveries."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    ask,
    collect,
    command,
    group,
    usage,
)
from interlock.cli.output import confirm, present, sheet, table

# Typer needs them at runtime, to read the annotations.
from interlock.wire.webhooks import DeliveryStatus, RunEnd

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.webhooks import DeliveryPage, DeliveryView, WebhookPage, WebhookSecret, WebhookView

app = group("Webhooks: calls to your own services when runs end or have too many failures.")

_LOOK_SECONDS: Final = 0.2

WebhookArgument = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="Name or id of the webhook.", show_default=False)
]


@command(
    app,
    "add",
    example="interlock webhook add done https://hooks.example/interlock\n"
    "interlock webhook add alarm https://hooks.example/alarm --event run.failed --failed-share 0.1 --job crawl",
)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the webhook.", show_default=False)],
    url: Annotated[str, typer.Argument(metavar="URL", help="URL to call.", show_default=False)],
    event: Annotated[
        list[RunEnd] | None,
        typer.Option("--event", help="A run outcome to report; may be repeated. Default: all.", show_default=False),
    ] = None,
    failed_share: Annotated[
        float | None,
        typer.Option(
            help="Also report when this share of a run has failed permanently, from 0 to 1.", show_default=False
        ),
    ] = None,
    done_share: Annotated[
        float | None,
        typer.Option(help="Also report when this share of a run has ended, from 0 to 1.", show_default=False),
    ] = None,
    no_ends: Annotated[bool, typer.Option("--no-ends", help="Report only shares.")] = False,
    job: Annotated[str | None, typer.Option(help="Only runs of jobs with this name.", show_default=False)] = None,
    dag: Annotated[str | None, typer.Option(help="Only runs of jobs of this DAG.", show_default=False)] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create a webhook. Its secret is shown only once."""
    from interlock.wire.webhooks import WebhookRequest

    if no_ends and event:
        raise usage("--no-ends and --event cannot be combined.")
    request = WebhookRequest(
        name=name,
        url=url,
        events=[] if no_ends else event or list(RunEnd),
        failed_share=failed_share,
        done_share=done_share,
        job=job,
        dag=dag,
    )
    present(ask(folder, lambda client: client.webhooks.create(request)), output, _secret)


@command(app, "list", example="interlock webhook list")
def list_webhooks(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show all webhooks."""
    from interlock.wire.webhooks import WebhookPage

    async def read(client: Client) -> WebhookPage:
        found, following = await collect(client.webhooks.page, lambda page: page.webhooks, cursor, limit)
        return WebhookPage(webhooks=found, next_cursor=following)

    present(ask(folder, read), output, _table)


@command(app, "show", example="interlock webhook show done")
def show(webhook: WebhookArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a webhook: its events and its state."""
    present(ask(folder, lambda client: client.webhooks.webhook(webhook)), output, _sheet)


@command(app, "deliveries", example="interlock webhook deliveries done --status Dead")
def deliveries(
    webhook: WebhookArgument,
    status: Annotated[
        DeliveryStatus | None, typer.Option(help="Only deliveries with this status.", show_default=False)
    ] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the deliveries of a webhook, sent and pending, newest first."""
    from interlock.wire.webhooks import DeliveryPage

    async def read(client: Client) -> DeliveryPage:
        found, following = await collect(
            lambda at, size: client.webhooks.deliveries(webhook, status, at, size),
            lambda page: page.deliveries,
            cursor,
            limit,
        )
        return DeliveryPage(deliveries=found, next_cursor=following)

    present(ask(folder, read), output, _deliveries)


@command(
    app,
    "redrive",
    example="interlock webhook redrive done\ninterlock webhook redrive done --delivery 0192f0c1-…",
)
def redrive(
    webhook: WebhookArgument,
    delivery: Annotated[
        list[UUID] | None,
        typer.Option(
            "--delivery", help="Only this delivery; may be repeated. Default: the oldest.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of deliveries to retry.")] = 1_000,
    folder: FolderOption = None,
) -> None:
    """Retry dead deliveries, each with its original id."""
    changed = ask(folder, lambda client: client.webhooks.redrive(webhook, delivery, limit=limit))
    print(f"{changed.matched} deliver{'y is' if changed.matched == 1 else 'ies are'} retried.")


@command(app, "pause", example="interlock webhook pause done")
def pause(webhook: WebhookArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Stop calling a webhook. Its events wait, for at most `webhook_expire_hours`."""
    present(ask(folder, lambda client: client.webhooks.pause(webhook)), output, _sheet)


@command(app, "resume", example="interlock webhook resume done")
def resume(webhook: WebhookArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Resume calling a webhook, immediately."""
    present(ask(folder, lambda client: client.webhooks.resume(webhook)), output, _sheet)


@command(app, "rotate", example="interlock webhook rotate done --overlap-hours 24")
def rotate(
    webhook: WebhookArgument,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=720, help="How long calls are also signed with the old secret.")
    ] = 24.0,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create a new secret. It is shown only once."""
    made = ask(folder, lambda client: client.webhooks.rotate(webhook, overlap_seconds=overlap_hours * 3600))
    present(made, output, _secret)


@command(app, "remove", example="interlock webhook remove done --yes")
def remove(
    webhook: WebhookArgument, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Remove a webhook with its pending deliveries."""
    confirm(f"Remove the webhook {webhook} and its history?", yes=yes)
    present(ask(folder, lambda client: client.webhooks.delete(webhook)), output, _sheet)


@command(app, "test", example="interlock webhook test done")
def try_it(
    webhook: WebhookArgument,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for the outcome.")] = 30.0,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Send a `webhook.test` event and show the outcome. Exit code 1 unless it was delivered."""
    delivery = ask(folder, lambda client: _tried(client, webhook, wait))
    present(delivery, output, _delivery_sheet)
    if delivery.status is not DeliveryStatus.DELIVERED:
        raise typer.Exit(1)


async def _tried(client: Client, webhook: str, wait: float) -> DeliveryView:
    """Waits for the first try only. A failed delivery is retried, but a person wants to see why it failed."""
    delivery = await client.webhooks.test(webhook)
    until = time.monotonic() + wait
    while delivery.status is DeliveryStatus.PENDING and delivery.reason is None and time.monotonic() < until:
        await asyncio.sleep(_LOOK_SECONDS)
        delivery = await client.webhooks.delivery(webhook, delivery.delivery_id)
    return delivery


def _table(page: WebhookPage) -> RenderableType:
    rows = [(each.name, each.url, _events(each), _state(each), each.failures or None) for each in page.webhooks]
    columns = ("name", "url", "events", "state", "failures")
    return table(columns, rows, empty="There are no webhooks; create one: interlock webhook add NAME URL")


def _events(view: WebhookView) -> list[str]:
    shares = [("failed", view.failed_share), ("done", view.done_share)]
    return [*view.events, *(f"{name} {share:.0%}" for name, share in shares if share is not None)]


def _state(view: WebhookView) -> str:
    if view.paused:
        return "paused"
    return "active" if view.resting_until is None else f"suspended until {view.resting_until:%H:%M:%S} UTC"


def _sheet(view: WebhookView) -> RenderableType:
    return sheet(
        [
            ("webhook", view.webhook_id),
            ("name", view.name),
            ("url", view.url),
            ("events", _events(view)),
            ("dag", view.dag),
            ("job", view.job),
            ("state", _state(view)),
            ("failures", view.failures or None),
            ("key version", view.key_version),
            ("old secret until", view.previous_until),
            ("by", view.created_by),
            ("created", view.created_at),
        ]
    )


def _secret(made: WebhookSecret) -> RenderableType:
    from rich.console import Group

    return Group(_sheet(made.view), sheet([("secret", made.secret), ("", "Store it: it is not shown again.")]))


def _deliveries(page: DeliveryPage) -> RenderableType:
    rows = [
        (each.delivery_id, each.event, each.run_id, each.status, each.tries, each.created_at, each.reason)
        for each in page.deliveries
    ]
    columns = ("delivery", "event", "run", "status", "tries", "created", "reason")
    return table(columns, rows, empty="There are no deliveries.")


def _delivery_sheet(view: DeliveryView) -> RenderableType:
    return sheet(
        [
            ("delivery", view.delivery_id),
            ("event", view.event),
            ("status", view.status),
            ("tries", view.tries),
            ("http status", view.http_status),
            ("reason", view.reason),
            ("next try", view.due_at if view.reason else None),
        ]
    )
