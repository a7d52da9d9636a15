"""`interlock config`: every setting, its value, and where that came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, Panel, command
from interlock.cli.output import present, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.settings import Settings

app = typer.Typer()


@command(app, "config", panel=Panel.OPERATION, example="interlock config\ninterlock config --output json")
def config(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show every setting with its value and origin; secrets are masked.

    A setting is INTERLOCK_NAME in the environment, or a key in interlock.toml of the working directory (or of the file
    that INTERLOCK_CONFIG names). The environment comes first.
    """
    from interlock.settings import load

    present(_rows(load(dir=folder), dir=folder), output, _table)


def _rows(settings: Settings, **overrides: Any) -> list[dict[str, Any]]:
    from interlock.settings import origins

    origin = origins(settings, **overrides)
    values = settings.model_dump(mode="json")
    return [
        {"setting": name, "value": values[name], "origin": origin[name], "about": field.description}
        for name, field in type(settings).model_fields.items()
    ]


def _table(rows: list[dict[str, Any]]) -> RenderableType:

    columns = ("setting", "value", "origin", "about")
    return table(columns, [[row[column] for column in columns] for row in rows], empty="There are no settings.")
