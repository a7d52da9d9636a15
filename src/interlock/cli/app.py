"""The root command: all groups, and the conversion of errors to a message and an exit code."""

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
    bulk,
    bundle,
    bus_changes,
    bus_commands,
    bus_registry,
    dag,
    dataset,
    demo,
    devchain,
    job_results,
    operator,
    queue,
    replay,
    run,
    secret,
    serve,
    source,
    sql,
    system,
    task,
    up,
    users,
    webhook,
)
from interlock.cli.conventions import Panel, epilog
from interlock.cli.extras import missing_extra
from interlock.errors import InterlockError

DONE, FAILED, USAGE = 0, 1, 2
_SERVED = ("gateway", "dispatcher", "query", "sink", "ingest", "bus", "scheduler", "runner", "worker")
_FORMER: dict[str, tuple[str, ...]] = {name: ("serve", name) for name in _SERVED} | {
    "key": ("service-key",),
    "keys": ("signing-key",),
    "route-health": ("route", "health"),
}
"""Names of commands before 0.1.0. They work for one release."""
_VERBOSE = "--verbose"

app = typer.Typer(name="interlock", no_args_is_help=True, pretty_exceptions_enable=False)
for module in (up, demo):
    app.add_typer(module.app)
for name, group in (
    ("dag", dag.app),
    ("dataset", dataset.app),
    ("buffer", dataset.buffers),
    ("backfill", backfill.app),
    ("source", source.app),
    ("operator", operator.app),
    ("bundle", bundle.app),
    ("job", job_results.app),
    ("run", run.app),
    ("task", task.app),
    ("bulk", bulk.app),
    ("receipt", job_results.receipts),
    ("queue", queue.app),
    ("webhook", webhook.app),
    ("secret", secret.app),
    ("alert", alert.app),
    ("command", bus_commands.app),
    ("service", bus_registry.services),
    ("route", bus_registry.routes),
    ("acl", bus_registry.acls),
    ("limit", bus_registry.limits),
    ("service-key", bus_changes.keys),
    ("change", bus_changes.changes),
    ("replay", replay.app),
):
    app.add_typer(group, name=name, rich_help_panel=Panel.WORK)
for name, group in (("users", users.users), ("signing-key", users.keys)):
    app.add_typer(group, name=name, rich_help_panel=Panel.OPERATION)
app.add_typer(serve.app, name="serve", rich_help_panel=Panel.PROCESSES)
for module in (sql, system, devchain):
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
        bool, typer.Option(_VERBOSE, help="Show the traceback of an error; may be given anywhere.")
    ] = False,
) -> None:
    """Dispatches data work as fenced, leased tasks in PostgreSQL."""


def execute(arguments: list[str]) -> int:
    """Runs one command line. The exit code is 0 for success, 1 for failure, 2 for wrong usage."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbose = _VERBOSE in options
    rest = [word for word in options if word != _VERBOSE] + arguments[len(options) :]
    rest = _with_current_name(rest)
    try:
        return _exit_code(typer.main.get_command(app).main(rest, prog_name="interlock", standalone_mode=False))
    except Exception as error:
        if verbose:
            traceback.print_exception(error)
        return _explain(error)


def _with_current_name(arguments: list[str]) -> list[str]:
    """Replaces the former name of a command, and prints the current one as a hint."""
    current = _FORMER.get(arguments[0]) if arguments else None
    if current is None:
        return arguments
    print(f"`interlock {arguments[0]}` is now `interlock {' '.join(current)}`.", file=sys.stderr)
    return [*current, *arguments[1:]]


def _exit_code(outcome: object) -> int:
    """Converts the outcome of a command: commands return nothing or raise `typer.Exit`; Ctrl-C is 130."""
    return outcome if isinstance(outcome, int) and outcome <= USAGE else FAILED if outcome else DONE


def _explain(error: Exception) -> int:
    match error:
        case typer.TyperException():
            return _explain_usage(error)
        case typer.Abort():
            return _say("Nothing was changed.")
        case BrokenPipeError():
            # The reader has closed the pipe. Buffered output must not fail again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        case InterlockError():
            return _say(error.detail)
        case OSError():
            return _say(str(error))
        case ModuleNotFoundError() if sentence := missing_extra(error):
            return _say(sentence)
        case _:
            return _say(f"Unexpected {type(error).__name__}: {error}. Run it again with {_VERBOSE} for the traceback.")


def _explain_usage(error: typer.TyperException) -> int:
    # Typer has no public name for the classes with a message. An error without one has shown the help instead.
    if isinstance(error, typer.BadParameter) and error.param is None:
        sentence = error.message
    else:
        sentence = str(getattr(error, "format_message", lambda: "")())
    if sentence.strip():
        path = getattr(getattr(error, "ctx", None), "command_path", "interlock")
        _say(f"{sentence.strip().rstrip('.')}. `{path} --help` shows the usage.")
    return USAGE


def _say(sentence: str) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}Error:{plain} {sentence}", file=sys.stderr)
    return FAILED
