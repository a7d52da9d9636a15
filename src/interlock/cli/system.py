"""The installation: settings, checks, OpenAPI documents, migrations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, Panel, ask, command
from interlock.cli.output import present, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.settings import Settings


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.apps.doctor_checks import Finding


from typing import TYPE_CHECKING, Annotated

from interlock.cli.output import print_json

app = typer.Typer()


@command(app, "config", panel=Panel.OPERATION, example="interlock config\ninterlock config --output json")
def config(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show every setting with its value and origin. Secrets are masked.

    A setting is INTERLOCK_NAME in the environment, or a key in interlock.toml in the working directory (or in the file
    of INTERLOCK_CONFIG). The environment takes precedence.
    """
    from interlock.settings import load

    present(_rows(load(dir=folder), dir=folder), output, _settings_table)


def _rows(settings: Settings, **overrides: Any) -> list[dict[str, Any]]:
    from interlock.settings import origins

    origin = origins(settings, **overrides)
    values = settings.model_dump(mode="json")
    return [
        {"setting": name, "value": values[name], "origin": origin[name], "about": field.description}
        for name, field in type(settings).model_fields.items()
    ]


def _settings_table(rows: list[dict[str, Any]]) -> RenderableType:

    columns = ("setting", "value", "origin", "about")
    return table(columns, [[row[column] for column in columns] for row in rows], empty="There are no settings.")


@command(app, "doctor", panel=Panel.START, example="interlock doctor\ninterlock doctor --dir /srv/interlock")
def doctor(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Check the machine, the settings and, if it is running, the system. Exit code 1 if a check fails."""
    from interlock.apps.doctor_checks import Result, examine
    from interlock.settings import load

    findings = asyncio.run(examine(load(dir=folder)))
    present(findings, output, _table)
    if any(finding.result is Result.FAIL for finding in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> RenderableType:
    rows = [(finding.result, finding.check, finding.detail, finding.advice or "") for finding in findings]
    return table(("", "check", "found", "advice"), rows, empty="Nothing to check.")


@command(app, "open", panel=Panel.START, example="interlock open\ninterlock open --print")
def open_dashboard(
    only_print: Annotated[bool, typer.Option("--print", help="Print the link; do not start a browser.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Open the dashboard in a browser, signed in with your API key. The link works once, and only for minutes."""
    import webbrowser

    link = ask(folder, lambda client: client.sign_in_link())
    opened = not only_print and webbrowser.open(link.url)
    present(link, output, lambda found: "Opened the dashboard in your browser." if opened else found.url)


@command(
    app, "openapi", panel=Panel.OPERATION, example="interlock openapi > gateway.json\ninterlock openapi --internal"
)
def openapi(
    internal: Annotated[
        bool, typer.Option("--internal", help="Document of the dispatcher instead of the gateway.")
    ] = False,
    query: Annotated[
        bool, typer.Option("--query", help="Document of the query service instead of the gateway.")
    ] = False,
) -> None:
    """Print the OpenAPI document of the gateway, of the dispatcher, or of the query service."""
    asyncio.run(_print("query" if query else "dispatcher" if internal else "gateway"))


async def _print(listener: str) -> None:
    from interlock.apps.app import without_stores
    from interlock.apps.dispatcher import dispatcher
    from interlock.apps.gateway import gateway
    from interlock.apps.query import query
    from interlock.http.openapi import exact

    describe = {"gateway": gateway, "dispatcher": dispatcher, "query": query}[listener]
    print_json(exact(describe(without_stores()).openapi_schema.to_schema()))


@command(app, "migrate", panel=Panel.OPERATION, example="INTERLOCK_STATE_URL=postgresql://… interlock migrate")
def migrate(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Migrate the schema of the state database. `interlock up` does this automatically."""
    from interlock.apps.stores import migrate_state

    applied = asyncio.run(migrate_state(_state_url(folder)))
    present({"applied": applied}, output, _applied)


def _applied(answer: dict[str, list[str]]) -> str:
    return f"Applied: {', '.join(answer['applied'])}." if answer["applied"] else "The schema is up to date."


def _state_url(folder: Path | None) -> str:
    from interlock.apps.stores import store_urls
    from interlock.errors import ConfigurationError
    from interlock.settings import load

    url = store_urls(load(dir=folder)).get("state")
    if url is None:
        raise ConfigurationError(
            "No database is configured: set INTERLOCK_STATE_URL. `interlock up` migrates the embedded one itself."
        )
    return url
