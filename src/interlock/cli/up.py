"""`interlock up`: starts all processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import Panel, command, usage
from interlock.cli.output import console, sheet

if TYPE_CHECKING:
    from interlock.apps.up.supervisor import Started

app = typer.Typer()


@command(
    app,
    "up",
    panel=Panel.START,
    example="interlock up\ninterlock up --dir /srv/interlock --gateway 127.0.0.1:0 --internal 127.0.0.1:0 "
    "--query 127.0.0.1:0 --json",
)
def up(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of all state. Default: .interlock", show_default=False)
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="host:port for users; port 0 selects a free port. Default: 127.0.0.1:7070")
    ] = None,
    internal: Annotated[
        str | None, typer.Option(help="host:port for workers; port 0 selects a free port. Default: 127.0.0.1:7071")
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="host:port for queries; port 0 selects a free port. Default: 127.0.0.1:7072")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Comma-separated runtimes to start workers for. Default: all of this build.")
    ] = None,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="Start no workers; run `interlock serve worker` yourself.")
    ] = False,
    operators: Annotated[
        list[str] | None,
        typer.Option(
            "--operators",
            metavar="DIR_OR_MODULE",
            help="Folder or Python module whose @operator functions jobs may use; repeatable. Default: current folder.",
            show_default=False,
        ),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Like --operators, and import the module when workers start; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one line of JSON, when ready.")] = False,
) -> None:
    """Start servers, gateway, dispatcher, query, sink, ingest, bus, scheduler, runner and workers; keep them running.

    Stopping and starting with the same folder resumes everything. Ctrl-C or SIGTERM shuts down gracefully: running
    tasks get some time to finish and are then released. A second signal stops immediately.
    """
    import asyncio

    from interlock.apps.up.folder import Folder
    from interlock.apps.up.supervisor import Plan
    from interlock.apps.up.supervisor import up as supervise
    from interlock.settings import load
    from interlock.telemetry import configure

    settings = load(dir=folder, gateway=gateway, internal=internal, query=query)
    plan = Plan(
        workers=_chosen(workers, no_workers),
        operators=operators or settings.operators or _project(),
        modules=modules or (),
    )
    state = Folder(settings.dir)
    with state.locked():
        configure(settings.log_level, settings.log_format, process="up", file=state.log_of("up"))
        asyncio.run(supervise(settings, state, plan, _print_json if as_json else _print_table))


def _project() -> list[str]:
    """Returns the current folder; a service that is started in / has no project."""
    here = Path.cwd()
    return [] if here == Path(here.anchor) else [str(here)]


def _chosen(workers: str | None, no_workers: bool) -> tuple[str, ...]:
    from interlock.apps.up.supervisor import WORKER_RUNTIMES
    from interlock.settings import BUILT_IN_RUNTIMES

    if no_workers:
        if workers:
            raise usage("Give --workers or --no-workers, not both")
        return ()
    if workers is None:
        return WORKER_RUNTIMES
    names = [name.strip() for name in workers.split(",") if name.strip()]
    for name in names:
        if name not in WORKER_RUNTIMES:
            what = "has no worker in this build" if name in BUILT_IN_RUNTIMES else "is not a runtime"
            raise usage(f"--workers: {name!r} {what}; choose from: {', '.join(WORKER_RUNTIMES)}")
    if not names:
        raise usage(f"--workers is empty; choose from: {', '.join(WORKER_RUNTIMES)}, or give --no-workers")
    return tuple(dict.fromkeys(names))


def _print_json(started: Started) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(started).decode() + "\n")
    sys.stdout.flush()


def _print_table(started: Started) -> None:
    from interlock.workers.confinement import NOT_CONFINED, OF_ROOT, is_possible

    where = "" if Path(started.dir) == Path(".interlock").absolute() else f" --dir {started.dir}"
    console().print()
    if not is_possible():
        console().print(f"[bold yellow]Not confined:[/] {NOT_CONFINED}.")
    elif os.geteuid() == 0:
        console().print(f"[bold yellow]Started as root:[/] {OF_ROOT}.")
    console().print("[bold green]Interlock is up.[/] Ctrl-C drains and stops it.")
    console().print(
        sheet(
            [
                ("dashboard", started.sign_in_url),
                ("", f"This link signs in once; `interlock open{where}` makes another."),
                ("gateway", started.gateway),
                ("internal", started.internal),
                ("query", started.query),
                ("folder", started.dir),
                ("credentials", f"{started.dir}/credentials.json"),
                ("try", f'interlock job submit{where} --operator echo --task \'{{"hello": "world"}}\' --watch'),
            ]
        )
    )
    console().print()
