"""`interlock demo`: a complete Interlock in a temporary folder, with a demonstration."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.conventions import Panel, command, usage
from interlock.cli.output import console

if TYPE_CHECKING:
    from interlock.apps.up.folder import Folder
    from interlock.apps.up.supervisor import Started, Supervisor

    Play = Callable[[Supervisor, Started], Coroutine[Any, Any, bool]]

app = typer.Typer()

_PATIENCE_SECONDS = 30.0
"""Allows for a query service that is still starting."""


class What(StrEnum):
    PIPELINE = "pipeline"
    TASKS = "tasks"


@command(
    app,
    "demo",
    panel=Panel.START,
    example="interlock demo\ninterlock demo --dir /tmp/demo --keep\ninterlock demo tasks\n"
    "interlock demo --rpc https://rpc.example.org",
)
def demo(
    what: Annotated[
        What, typer.Argument(help="The pipeline, or the lifecycle of single tasks.", show_default=True)
    ] = What.PIPELINE,
    rpc: Annotated[
        str | None,
        typer.Option(
            "--rpc",
            help="An EVM endpoint to follow instead of a development chain: its newest blocks, without a reorg.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder to use and keep. Default: a temporary folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder for inspection.")] = False,
) -> None:
    """Turn a chain into token transfers, hourly volumes and alerts, through a reorg, and check the result.

    Spark computes transfers and volumes; untrusted code in a sandbox computes alerts. `interlock demo tasks` shows
    single tasks instead: retried, redriven, canceled, and surviving the loss of their worker. Either demo starts its
    own servers, gateway, dispatcher and workers, touches nothing else, takes less than 90 s on two cores, and exits
    with code 0 if the result is correct.
    """
    import asyncio

    from interlock.apps.up.folder import Folder

    if rpc is not None and (what is What.TASKS or not rpc.startswith(("http://", "https://"))):
        raise usage("--rpc takes a URL like https://host/path, and only with the pipeline")
    _forget_settings()
    with _place(folder, keep=keep or folder is not None) as path:
        state = Folder(path)
        with state.locked():
            passed = asyncio.run(_perform(state, what, rpc))
    if not passed:
        raise typer.Exit(1)
    _what_next(what)


def _forget_settings() -> None:
    """Clears all settings: the demo is the same everywhere, and never uses a database from a user's settings."""
    for name in list(os.environ):
        if name.upper().startswith("INTERLOCK_"):
            del os.environ[name]
    os.environ["INTERLOCK_CONFIG"] = os.devnull
    # Also for child processes: a follower never ends by itself, so a drain would wait for the full timeout.
    os.environ["INTERLOCK_DRAIN_SECONDS"] = "1"


@contextlib.contextmanager
def _place(folder: Path | None, *, keep: bool) -> Iterator[Path]:
    path = folder or Path(tempfile.mkdtemp(prefix="interlock-demo-"))
    try:
        yield path
    finally:
        if keep:
            console().print(f"\nEverything is in {path}: `interlock up --dir {path}` continues from there.")
        else:
            shutil.rmtree(path, ignore_errors=True)


async def _perform(folder: Folder, what: What, rpc: str | None) -> bool:
    if what is What.TASKS:
        return await _on_stage(folder, ("platform",), _tasks)
    async with _chain(rpc) as play:
        return await _on_stage(folder, ("platform", "spark"), play)


async def _tasks(supervisor: Supervisor, started: Started) -> bool:
    from interlock.cli.demos.tasks import Stage, play
    from interlock.client import Client

    async with Client(started.gateway, started.admin_key) as client:
        return await play(Stage(client, supervisor))


@contextlib.asynccontextmanager
async def _chain(rpc: str | None) -> AsyncIterator[Play]:
    from interlock.cli.demos.chain import BLOCKS, development_chain, foreign_chain
    from interlock.cli.demos.pipeline import SPAN, AlertWatch, Office, Play, play
    from interlock.client import Client, QueryClient

    async with development_chain() if rpc is None else foreign_chain(rpc) as chain:
        # Chains on this machine or in its network can be reached only if outbound_allow names them.
        os.environ["INTERLOCK_OUTBOUND_ALLOW"] = json.dumps([chain.place])

        async def perform(_: Supervisor, started: Started) -> bool:
            # Starts at a multiple of all range sizes, with as many blocks as the development chain has.
            first = 0 if rpc is None else max(await chain.head() - BLOCKS, 0) // SPAN * SPAN
            async with (
                Client(started.gateway, started.admin_key) as client,
                QueryClient(started.query, started.admin_key, patience=_PATIENCE_SECONDS) as queries,
            ):
                alerts, office = AlertWatch(client, queries), Office(client, started.gateway)
                return await play(Play(client, chain, first, tame=rpc is None, alerts=alerts, office=office))

        yield perform


async def _on_stage(folder: Folder, workers: tuple[str, ...], play: Play) -> bool:
    """Starts everything, runs the demo, and stops everything, whatever happens in between."""
    from interlock.apps.up.supervisor import Plan, Supervisor
    from interlock.cli.demos.chain import example
    from interlock.processes.supervision import Interrupted, Interrupts
    from interlock.settings import load

    interrupts = Interrupts()
    interrupts.listen()
    anywhere = dict.fromkeys(("gateway", "internal", "query"), "127.0.0.1:0")
    settings = load(dir=folder.path, **anywhere)
    with _logged(folder) as log:
        plan = Plan(workers=workers, operators=[str(example("operators"))], children_stderr=log)
        supervisor = Supervisor(settings, folder, plan)
        begun = time.monotonic()
        try:
            with console().status("Starting two PostgreSQL servers, Valkey, gateway, dispatcher and workers …"):
                started = await interrupts.unless_asked(supervisor.start())
            console().print(f"Interlock is up after {time.monotonic() - begun:.1f} s, at {started.gateway}.")
            return await interrupts.unless_asked(play(supervisor, started))
        except Interrupted:
            console().print("Interrupted.")
            return False
        finally:
            with console().status("Stopping …"):
                await supervisor.stop(interrupts.hurry)


@contextlib.contextmanager
def _logged(folder: Folder) -> Iterator[int]:
    """Sends logs to files only: the terminal shows the demo."""
    import logging

    from interlock.telemetry import configure

    configure(process="demo", file=folder.log_of("demo"))
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if isinstance(handler, logging.FileHandler)]
    with folder.log_of("children").open("ab") as log:
        yield log.fileno()


def _what_next(what: What) -> None:
    console().print("\n[bold]What to try next[/]")
    lines = [
        ("interlock up", "a permanent installation"),
        ("interlock devchain", "a chain; then `interlock dag deploy examples/dags/tokens.yaml`"),
        ("interlock dataset show volumes", "the contents of a dataset; `lineage` draws its origin"),
        ('interlock sql "select * from volumes"', "query tables and files alike"),
        ("interlock route health", "the command bus; see docs/bus.md for services, routes and keys"),
        ("interlock operator new my_operator", "your own Spark operator, with a test"),
        ("interlock demo tasks" if what is What.PIPELINE else "interlock demo", "the other demo"),
        ("interlock doctor", "what this machine has and lacks"),
    ]
    for line, about in lines:
        console().print(f"  {line:<39}{about}", markup=False)
