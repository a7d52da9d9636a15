"""`interlock demo`: a whole Interlock in a scratch folder, and tasks that live through all that may happen to one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import Panel, command
from interlock.cli.output import console

if TYPE_CHECKING:
    from interlock.supervisor.folder import Folder

app = typer.Typer()


@command(app, "demo", panel=Panel.START, example="interlock demo\ninterlock demo --dir /tmp/demo --keep")
def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Work here and leave it there. Default: a scratch folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the scratch folder, to look around in.")] = False,
) -> None:
    """Watch tasks complete, be retried, die, be redriven, be canceled, and survive the death of their worker.

    It starts servers, gateway, dispatcher and a worker of its own, touches nothing else, takes well under a minute, and
    ends with exit code 0 when every count is as it should be.
    """
    import asyncio

    from interlock.supervisor.folder import Folder

    _forget_settings()
    with _place(folder, keep=keep or folder is not None) as path:
        state = Folder(path)
        with state.locked():
            passed = asyncio.run(_perform(state))
    if not passed:
        raise typer.Exit(1)


def _forget_settings() -> None:
    """The demo is the same everywhere, and never meets a database that somebody's settings name."""
    for name in list(os.environ):
        if name.upper().startswith("INTERLOCK_"):
            del os.environ[name]
    os.environ["INTERLOCK_CONFIG"] = os.devnull


@contextlib.contextmanager
def _place(folder: Path | None, *, keep: bool) -> Iterator[Path]:
    path = folder or Path(tempfile.mkdtemp(prefix="interlock-demo-"))
    try:
        yield path
    finally:
        if keep:
            console().print(f"\nAll of it is in {path}: `interlock up --dir {path}` goes on from there.")
        else:
            shutil.rmtree(path, ignore_errors=True)


async def _perform(folder: Folder) -> bool:
    """Starts everything, plays, and puts everything away, whatever happens in between."""
    from interlock.cli.demo_acts import Stage, play
    from interlock.client import Client
    from interlock.settings import load
    from interlock.supervisor.interrupts import Interrupted, Interrupts
    from interlock.supervisor.run import Plan, Supervisor

    interrupts = Interrupts()
    interrupts.listen()
    settings = load(dir=folder.path, gateway="127.0.0.1:0", internal="127.0.0.1:0")
    with _logged(folder) as log:
        supervisor = Supervisor(settings, folder, Plan(children_stderr=log))
        begun = time.monotonic()
        try:
            with console().status("Starting two PostgreSQL servers, Valkey, gateway, dispatcher and a worker …"):
                started = await interrupts.unless_asked(supervisor.start())
            console().print(f"Interlock is up after {time.monotonic() - begun:.1f} s, at {started.gateway}.")
            async with Client(started.gateway, started.admin_key) as client:
                return await interrupts.unless_asked(play(Stage(client, supervisor)))
        except Interrupted:
            console().print("Stopped before its end.")
            return False
        finally:
            with console().status("Putting everything away …"):
                await supervisor.stop(interrupts.hurry)


@contextlib.contextmanager
def _logged(folder: Folder) -> Iterator[int]:
    """Logs go to files alone: the stage is for the play."""
    import logging

    from interlock.telemetry import configure

    configure(process="demo", file=folder.log_of("demo"))
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if isinstance(handler, logging.FileHandler)]
    with folder.log_of("children").open("ab") as log:
        yield log.fileno()
