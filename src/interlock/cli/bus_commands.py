"""`interlock command`: sends signed commands, and shows the fate of those that were pending."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from interlock.cli.bus_registry import NameArgument, TargetArgument
from interlock.cli.conventions import FolderOption, Output, OutputOption, command, group, usage
from interlock.cli.job import payloads_of
from interlock.cli.output import present, sheet, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Access
    from interlock.client.bus import Producer
    from interlock.settings import Settings
    from interlock.wire.commands import CommandVerdict, CommandVerdicts

app = group("Commands: send them, and read their fates.")

_BORROWED_DAYS: Final = 0.01
"""Lifetime of the key that `--from` creates and revokes, in case it cannot be revoked."""

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="The sending service, for the key of an admin. Default: the service of the API key.",
        metavar="SERVICE",
        show_default=False,
    ),
]


@command(
    app,
    "send",
    example='interlock command send discord-bot post-message \'{"text": "paid"}\' --from billing\n'
    "interlock command send discord-bot post-message --payloads messages.jsonl --from billing",
)
def send(
    target: TargetArgument,
    name: NameArgument,
    payload: Annotated[
        str | None, typer.Argument(metavar="[PAYLOAD]", help="JSON; null by default.", show_default=False)
    ] = None,
    payloads: Annotated[
        str | None,
        typer.Option(help="File with one JSON payload per line, each a command; - for stdin.", metavar="FILE"),
    ] = None,
    sender: FromOption = None,
    command_id: Annotated[
        UUID | None, typer.Option("--id", help="Id of the command; random by default.", show_default=False)
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for which a command beyond a limit is sent again.")
    ] = 60.0,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Sign and send a command, and wait until it is delivered or refused."""
    from interlock.client import bus
    from interlock.wire.commands import CommandVerdicts

    if payload is not None and payloads is not None:
        raise usage("Give either one PAYLOAD or --payloads FILE")
    if payloads is not None and command_id is not None:
        raise usage("--id names one command; leave it out with --payloads")
    bodies = payloads_of([payload or "null"] if payloads is None else [], payloads)
    ids = {} if command_id is None else {"command_id": str(command_id)}
    commands = [bus.Command(target=target, name=name, payload=body, **ids) for body in bodies]

    async def work() -> CommandVerdicts:
        async with _producer(folder, sender, patience) as producer:
            return CommandVerdicts(results=await producer.send_many(commands))

    verdicts = asyncio.run(work())
    if payloads is None:
        present(bus.delivered(verdicts.results[0]), output, _verdict)
        return
    present(verdicts, output, _counts)
    if any(each.outcome not in ("delivered", "duplicate") for each in verdicts.results):
        raise typer.Exit(1)


@command(app, "show", example="interlock command show 0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f --from billing")
def show(
    command_id: Annotated[UUID, typer.Argument(metavar="COMMAND", help="Id of the command.", show_default=False)],
    sender: FromOption = None,
    wait: Annotated[float, typer.Option(min=0, max=30, help="Seconds to wait while it is pending.")] = 0.0,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the fate of a command that was pending when it was sent."""

    async def work() -> CommandVerdict:
        async with _producer(folder, sender, 0.0) as producer:
            return await producer.fate(str(command_id), wait=wait)

    present(asyncio.run(work()), output, _verdict)


@asynccontextmanager
async def _producer(folder: Path | None, sender: str | None, patience: float) -> AsyncIterator[Producer]:
    from interlock.client import bus, gateway_access
    from interlock.errors import Forbidden
    from interlock.settings import load

    settings = load(dir=folder)
    access = gateway_access(settings)
    if sender is not None:
        async with (
            _borrowed_key(settings, access, sender) as key,
            bus.Producer(access.url, key, patience=patience, verify=access.verify) as producer,
        ):
            yield producer
        return
    async with bus.Producer(access.url, access.secret, patience=patience, verify=access.verify) as producer:
        try:
            await producer.config()
        except Forbidden as error:
            reason = error.detail.rstrip(".")
            raise usage(f"This is no API key of a service ({reason}): name the sender with --from SERVICE") from None
        yield producer


@asynccontextmanager
async def _borrowed_key(settings: Settings, access: Access, service: str) -> AsyncIterator[str]:
    """Creates an API key of the service with the caller's own key, which must be an admin's, and revokes it."""
    from interlock.client import Client
    from interlock.wire.access import KeyRequest, Role

    async with Client(access.url, access.secret, verify=access.verify, org=settings.org) as client:
        request = KeyRequest(
            user="interlock-command", role=Role.WRITER, service=service, expires_in_days=_BORROWED_DAYS
        )
        made = await client.create_key(request)
        try:
            yield made.key
        finally:
            await client.revoke_key(made.view.key_id)


def _verdict(verdict: CommandVerdict) -> RenderableType:
    return sheet(
        [
            ("command", verdict.command_id),
            ("outcome", verdict.outcome),
            ("reason", verdict.reason),
            ("", verdict.detail),
            ("retry after", None if verdict.retry_after_ms is None else f"{verdict.retry_after_ms} ms"),
        ]
    )


def _counts(verdicts: CommandVerdicts) -> RenderableType:
    counts = Counter((each.outcome, each.reason or "", each.detail or "") for each in verdicts.results)
    return table(
        ["commands", "outcome", "reason", "what to do"],
        [(amount, *key) for key, amount in counts.most_common()],
        empty="No commands.",
    )
