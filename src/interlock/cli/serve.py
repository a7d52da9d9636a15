"""`interlock serve`: single processes, for deployments on several machines and as children of `interlock up`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from interlock.cli.conventions import FolderOption, command, usage

if TYPE_CHECKING:
    from interlock.settings import Settings

app = typer.Typer(help="Run one process, for deployments on several machines.", no_args_is_help=True)

# Options with which `interlock up` controls its children.
Descriptor = Annotated[int | None, typer.Option("--fd", hidden=True, help="Listening socket to serve.")]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True, help="Parent process; exit when it dies.")]
Handover = Annotated[int | None, typer.Option("--handover", hidden=True, help="Socket to the supervisor.")]
OperatorsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--operators",
        metavar="DIR_OR_MODULE",
        help="Folder or Python module whose @operator functions jobs may use; repeatable.",
        show_default=False,
    ),
]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Also log to this file.", show_default=False)]


@command(app, "gateway", example="INTERLOCK_STATE_URL=postgresql://… interlock serve gateway")
def gateway(
    address: Annotated[str | None, typer.Option("--gateway", help="host:port. Default: 127.0.0.1:7070")] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one public gateway. It needs INTERLOCK_STATE_URL."""
    join(parent)
    from interlock.apps.gateway import run_gateway

    inherited = take_over(handover)
    settings = configured("gateway", log_file, dir=folder, gateway=address)
    run_process(run_gateway(settings, descriptor=inherited or descriptor))


@command(
    app,
    "dispatcher",
    example="INTERLOCK_STATE_URL=postgresql://… INTERLOCK_VALKEY_URL=valkey://… interlock serve dispatcher",
)
def dispatcher(
    address: Annotated[str | None, typer.Option("--internal", help="host:port. Default: 127.0.0.1:7071")] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one dispatcher, with the background loops. Any number may run.

    It needs INTERLOCK_STATE_URL, and INTERLOCK_VALKEY_URL for the limits of runs.
    """
    join(parent)
    from interlock.apps.dispatcher import run_dispatcher

    inherited = take_over(handover)
    settings = configured("dispatcher", log_file, dir=folder, internal=address)
    run_process(run_dispatcher(settings, descriptor=inherited or descriptor))


@command(app, "query", example="INTERLOCK_STATE_URL=postgresql://… interlock serve query")
def query(
    address: Annotated[str | None, typer.Option("--query", help="host:port. Default: 127.0.0.1:7072")] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one query service. It needs INTERLOCK_STATE_URL, and INTERLOCK_QUERY_DATA_URL for datasets that are tables.

    Any number may run. To run a query, see `interlock sql`.
    """
    join(parent)
    from interlock.apps.query import run_query

    inherited = take_over(handover)
    settings = configured("query", log_file, dir=folder, query=address)
    run_process(run_query(settings, descriptor=inherited or descriptor))


@command(
    app,
    "sink",
    example="INTERLOCK_STATE_URL=postgresql://… INTERLOCK_DATA_URL=postgresql://… interlock serve sink",
)
def sink(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one sink, which loads published batches into the tables of buffered datasets.

    It needs INTERLOCK_STATE_URL, INTERLOCK_DATA_URL and the object store. Any number may run.
    """
    join(parent)
    from interlock.apps.sink import run_sink

    take_over(handover)
    run_process(run_sink(configured("sink", log_file, dir=folder)))


@command(
    app,
    "ingest",
    example="INTERLOCK_STATE_URL=postgresql://… interlock serve ingest",
)
def ingest(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one ingest process, which creates the tasks of runs with staged lists, and of backfills.

    It needs INTERLOCK_STATE_URL and the object store. Any number may run.
    """
    join(parent)
    from interlock.apps.ingest import run_ingest

    take_over(handover)
    run_process(run_ingest(configured("ingest", log_file, dir=folder)))


@command(app, "bus", example="INTERLOCK_STATE_URL=postgresql://… interlock serve bus")
def bus(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one background process of the command bus.

    It processes commands that the gateway has deferred, delivers telemetry to tenants, writes the archive, checks
    routes, sends alerts by e-mail, rotates keys and executes replays. It needs INTERLOCK_STATE_URL, and the object
    store and keys of the gateway. Any number may run.
    """
    join(parent)
    from interlock.apps.bus import run_bus

    take_over(handover)
    run_process(run_bus(configured("bus", log_file, dir=folder)))


@command(app, "scheduler", example="INTERLOCK_STATE_URL=postgresql://… interlock serve scheduler")
def scheduler(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one scheduler, which starts cron sources. It needs INTERLOCK_STATE_URL. Any number may run."""
    join(parent)
    from interlock.apps.scheduler import run_scheduler

    take_over(handover)
    run_process(run_scheduler(configured("scheduler", log_file, dir=folder)))


@command(app, "runner", example="INTERLOCK_RUNNER_TOKEN=… interlock serve runner --runner 127.0.0.1:7073")
def runner(
    address: Annotated[
        str | None, typer.Option("--runner", help="host:port, loopback. Default: 127.0.0.1:0, a free port")
    ] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one runner, which executes each invocation of a bundle in a confined process. It needs
    INTERLOCK_RUNNER_TOKEN.

    Dispatchers on this machine connect to it with INTERLOCK_RUNNER_URL. `interlock doctor` shows how code is confined
    here.
    """
    join(parent)
    from interlock.apps.runner import run_runner

    inherited = take_over(handover)
    settings = configured("runner", log_file, dir=folder, runner=address)
    run_process(run_runner(settings, descriptor=inherited or descriptor))


@command(
    app,
    "worker",
    example="interlock serve worker --runtime platform --operators src/operators\n"
    "INTERLOCK_INTERNAL_URL=https://… INTERLOCK_WORKER_TOKEN=ilw_… interlock serve worker",
)
def worker(
    runtime: Annotated[str, typer.Option(help="Runtime whose queue to process.")] = "platform",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Number of concurrent tasks. Default: one per core; two for Spark.",
            show_default=False,
        ),
    ] = None,
    operators: OperatorsOption = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Like --operators, and import the module when a child process starts."),
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-env",
            metavar="ORG:NAME",
            help="Let configs of one org, given by its id, use a variable as ${NAME}; may be repeated. An org's "
            "secrets do not need this option: see interlock secret.",
        ),
    ] = None,
    process_env: Annotated[
        list[str] | None,
        typer.Option(
            "--process-env",
            metavar="NAME",
            help="Keep a variable in the environment of the worker's processes, for Spark and for installed code that "
            "reads it. Configs cannot use it.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--id", help="Worker id. Default: host/pid/random", show_default=False)
    ] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one worker: it claims tasks from the dispatcher and runs their operators in child processes.

    With --runtime spark they run in one Spark session, which starts with the first task. The worker runs only built-in
    operators and functions with @operator in the folders and modules of --operators.
    """
    join(parent)
    from interlock.workers import main

    if runtime == "spark" and find_spec("pyspark") is None:
        # Spark is loaded with the first task, which would be too late to say so.
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
    take_over(handover)
    variables = _passed_on(pass_env or (), os.environ)
    settings = configured(f"worker-{runtime}", log_file, dir=folder)
    run_process(
        main(
            settings,
            runtime,
            name,
            concurrency,
            operators=operators or (),
            modules=modules or (),
            environment=process_env or (),
            variables=variables,
        )
    )


def _passed_on(entries: Iterable[str], environment: Mapping[str, str]) -> dict[UUID, dict[str, str]]:
    """Returns the values of the --pass-env variables, by org."""
    found: dict[UUID, dict[str, str]] = {}
    for entry in entries:
        org, _, name = entry.rpartition(":")
        try:
            org_id = UUID(org)
        except ValueError:
            raise usage(
                f"--pass-env {entry} has no org, and a variable is no longer available to all orgs: write --pass-env "
                f"ORG:{name} with the id of the org whose configs may use it, or --process-env {name} if Spark or "
                "installed code reads it from the environment."
            ) from None
        if name.upper().startswith("INTERLOCK_") or name not in environment:
            raise usage(f"--pass-env {entry}: this worker's environment has no variable {name!r} to pass on.")
        found.setdefault(org_id, {})[name] = environment[name]
    return found


def join(parent: int | None) -> None:
    if parent is not None:
        from interlock.processes.linux import die_with

        die_with(parent)


def take_over(channel: int | None) -> int | None:
    """Receives the listener from the supervisor. Call it after imports: the supervisor may not be ready before."""
    if channel is None:
        return None

    from interlock.processes.supervision import take_over as listen

    return listen(channel)


def configured(process: str, log_file: Path | None, **overrides: Any) -> Settings:
    from interlock.failpoints import arm_from_environment
    from interlock.settings import load
    from interlock.telemetry import configure

    settings = load(**overrides)
    configure(settings.log_level, settings.log_format, process=process, file=log_file)
    arm_from_environment(os.environ.get("INTERLOCK_FAILPOINTS"))
    return settings


def run_process(process: Coroutine[Any, Any, None]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process)
