"""`interlock doctor`: whether this machine and these settings can run Interlock, and what to do where not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, Panel, command
from interlock.cli.output import present, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.cli.checks import Finding

app = typer.Typer()


@command(app, "doctor", panel=Panel.START, example="interlock doctor\ninterlock doctor --dir /srv/interlock")
def doctor(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Check the machine, the settings and, when it runs, the system; exit code 1 when something is broken."""
    import asyncio

    from interlock.cli.checks import Result, examine
    from interlock.settings import load

    findings = asyncio.run(examine(load(dir=folder)))
    present(findings, output, _table)
    if any(finding.result is Result.FAIL for finding in findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> RenderableType:
    rows = [(finding.result, finding.check, finding.detail, finding.advice or "") for finding in findings]
    return table(("", "check", "found", "what to do"), rows, empty="Nothing to check.")
