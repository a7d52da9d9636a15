"""The command's root: all groups, and the one place that turns errors into a sentence and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from interlock import __version__
from interlock.cli import (
    alert,
    backfill,
    buffer,
    bundle,
    bus,
    config,
    dag,
    dataset,
    demo,
    devchain,
    doctor,
    ingest,
    job_control,
    openapi,
    operator,
    principals,
    processes,
    query,
    queue,
    receipt,
    registry,
    registry_changes,
    replay,
    run,
    runner,
    scheduler,
    secret,
    sink,
    source,
    sql,
    task,
    up,
    webhook,
)
from interlock.cli.conventions import Panel, epilog
from interlock.errors import InterlockError

DONE, FAILED, USAGE = 0, 1, 2
_VERBOSE = "--verbose"

app = typer.Typer(name="interlock", no_args_is_help=True, pretty_exceptions_enable=False)
for module in (up, demo, doctor):
    app.add_typer(module.app)
for name, group in (
    ("dag", dag.app),
    ("dataset", dataset.app),
    ("buffer", buffer.app),
    ("backfill", backfill.app),
    ("source", source.app),
    ("operator", operator.app),
    ("bundle", bundle.app),
    ("job", job_control.app),
    ("run", run.app),
    ("task", task.app),
    ("receipt", receipt.app),
    ("queue", queue.app),
    ("webhook", webhook.app),
    ("secret", secret.app),
    ("alert", alert.app),
    ("service", registry.services),
    ("route", registry.routes),
    ("acl", registry.acls),
    ("limit", registry.limits),
    ("key", registry_changes.keys),
    ("change", registry_changes.changes),
    ("replay", replay.app),
):
    app.add_typer(group, name=name, rich_help_panel=Panel.WORK)
for name, group in (("users", principals.users), ("keys", principals.keys)):
    app.add_typer(group, name=name, rich_help_panel=Panel.OPERATION)
app.add_typer(alert.health)
for module in (sql, config, openapi, processes, query, scheduler, sink, ingest, bus, runner, devchain):
    app.add_typer(module.app)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"interlock {__version__}")
        raise typer.Exit


@app.callback(epilog=epilog("interlock demo\ninterlock up"))
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option(_VERBOSE, help="Show the trace behind an error; may stand anywhere on the line.")
    ] = False,
) -> None:
    """Dispatches data work as fenced, leased tasks kept in PostgreSQL."""


def execute(arguments: list[str]) -> int:
    """Runs one command line; the exit code is 0 for done, 1 for failed, 2 for wrong usage."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbose = _VERBOSE in options
    rest = [word for word in options if word != _VERBOSE] + arguments[len(options) :]
    try:
        return _exit_code(typer.main.get_command(app).main(rest, prog_name="interlock", standalone_mode=False))
    except Exception as error:
        if verbose:
            traceback.print_exception(error)
        return _explain(error)


def _exit_code(outcome: object) -> int:
    """Commands return nothing, or leave with `typer.Exit`; Ctrl-C comes as 130."""
    return outcome if isinstance(outcome, int) and outcome <= USAGE else FAILED if outcome else DONE


def _explain(error: Exception) -> int:
    match error:
        case typer.TyperException():
            return _explain_usage(error)
        case typer.Abort():
            return _say("Nothing was changed.")
        case BrokenPipeError():
            # The reader has seen enough. What is still buffered must not fail again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        case InterlockError():
            return _say(error.detail)
        case OSError():
            return _say(str(error))
        case _:
            return _say(f"Unexpected {type(error).__name__}: {error}. Run it again with {_VERBOSE} for the trace.")


def _explain_usage(error: typer.TyperException) -> int:
    # Typer has no public name for the classes that carry a message; one without a message has shown the help instead.
    if isinstance(error, typer.BadParameter) and error.param is None:
        sentence = error.message
    else:
        sentence = str(getattr(error, "format_message", lambda: "")())
    if sentence.strip():
        path = getattr(getattr(error, "ctx", None), "command_path", "interlock")
        _say(f"{sentence.strip().rstrip('.')}. `{path} --help` shows how it goes.")
    return USAGE


def _say(sentence: str) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}Error:{plain} {sentence}", file=sys.stderr)
    return FAILED
