"""Single processes, for a deployment of several machines and as children of `interlock up`; and `migrate`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, Panel, command, usage
from interlock.cli.output import present

if TYPE_CHECKING:
    from interlock.kernel.loop import Service
    from interlock.settings import Settings

app = typer.Typer()

# How `interlock up` holds its children.
Descriptor = Annotated[int | None, typer.Option("--fd", hidden=True, help="Listening socket to serve.")]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True, help="Process to end with.")]
Handover = Annotated[int | None, typer.Option("--handover", hidden=True, help="Socket to the supervisor.")]
OperatorsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--operators",
        metavar="DIR_OR_MODULE",
        help="Folder or Python module whose @operator functions jobs may name; repeatable.",
        show_default=False,
    ),
]
LogFile = Annotated[Path | None, typer.Option("--log-file", help="Log to this file, too.", show_default=False)]


@command(app, "gateway", panel=Panel.PROCESSES, example="INTERLOCK_STATE_URL=postgresql://… interlock gateway")
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
    from interlock.api.run import run_gateway

    inherited = take_over(handover)
    settings = configured("gateway", log_file, dir=folder, gateway=address)
    run_process(run_gateway(settings, descriptor=inherited or descriptor))


@command(
    app,
    "dispatcher",
    panel=Panel.PROCESSES,
    example="INTERLOCK_STATE_URL=postgresql://… INTERLOCK_VALKEY_URL=valkey://… interlock dispatcher",
)
def dispatcher(
    address: Annotated[str | None, typer.Option("--internal", help="host:port. Default: 127.0.0.1:7071")] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one dispatcher, with the background loops; any number may run.

    It needs INTERLOCK_STATE_URL, and INTERLOCK_VALKEY_URL for the limits of runs.
    """
    join(parent)
    from interlock.api.run import run_dispatcher

    inherited = take_over(handover)
    settings = configured("dispatcher", log_file, dir=folder, internal=address)
    run_process(run_dispatcher(settings, descriptor=inherited or descriptor))


@command(
    app,
    "worker",
    panel=Panel.PROCESSES,
    example="interlock worker --runtime platform --operators src/operators\n"
    "INTERLOCK_INTERNAL_URL=https://… INTERLOCK_WORKER_TOKEN=ilw_… interlock worker",
)
def worker(
    runtime: Annotated[str, typer.Option(help="Whose queue to work on.")] = "platform",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Tasks at once. Default: one per core; two for Spark.", show_default=False),
    ] = None,
    operators: OperatorsOption = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="As --operators, and load the module when a child starts."),
    ] = None,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-env",
            metavar="ORG:NAME",
            help="Let configs of one org, named by its id, use a variable as ${NAME}; may be repeated. Secrets of an "
            "org need no such option: see interlock secret.",
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
    """Run one worker: it takes tasks from the dispatcher and runs their operators in child processes.

    With --runtime spark they run in one Spark session, which starts with the first task. Beside the built-in operators
    it runs the functions that are declared with @operator in what --operators names, and nothing else.
    """
    join(parent)
    from interlock.workers import main

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
    """By org: the values of the variables that --pass-env names."""
    found: dict[UUID, dict[str, str]] = {}
    for entry in entries:
        org, _, name = entry.rpartition(":")
        try:
            org_id = UUID(org)
        except ValueError:
            raise usage(
                f"--pass-env {entry} names no org, and a variable is no longer open to all of them: write --pass-env "
                f"ORG:{name} with the id of the org whose configs may use it, or --process-env {name} if Spark or "
                "installed code reads it from the environment."
            ) from None
        if name.upper().startswith("INTERLOCK_") or name not in environment:
            raise usage(f"--pass-env {entry}: this worker's environment has no variable {name!r} to pass on.")
        found.setdefault(org_id, {})[name] = environment[name]
    return found


def join(parent: int | None) -> None:
    if parent is not None:
        from interlock.supervisor.lifeline import die_with

        die_with(parent)


def take_over(channel: int | None) -> int | None:
    """After the caller has loaded its modules: the supervisor may not have much to say before that."""
    if channel is None:
        return None

    from interlock.supervisor.lifeline import take_over as listen

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


async def run_loops(process: str, services: Sequence[Service]) -> None:
    """Until a signal. What a pass has not committed then is done by the next process."""
    import gc
    import signal

    import structlog

    from interlock.kernel.loop import forever

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    structlog.get_logger().info(f"{process}.started")
    gc.freeze()  # what is loaded by now stays: the collector need not walk it
    loops = [asyncio.create_task(forever(service), name=service.name) for service in services]
    await stop.wait()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    gc.unfreeze()


def serve_metrics(address: str, *, setting: str) -> None:
    """In a thread that ends with the process: whoever asks does not wait for a loop."""
    from prometheus_client import start_http_server

    from interlock.api.listener import require_loopback
    from interlock.telemetry import REGISTRY

    require_loopback(address, setting=setting)
    host, _, port = address.rpartition(":")
    start_http_server(int(port), host.strip("[]"), REGISTRY)


@command(app, "migrate", panel=Panel.OPERATION, example="INTERLOCK_STATE_URL=postgresql://… interlock migrate")
def migrate(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Bring the schema of the state database forward. `interlock up` does this by itself."""
    from interlock.adapters.postgres import migrate as apply

    applied = asyncio.run(apply(_state_url(folder)))
    present({"applied": applied}, output, _applied)


def _applied(answer: dict[str, list[str]]) -> str:
    return f"Applied: {', '.join(answer['applied'])}." if answer["applied"] else "The schema is up to date."


def _state_url(folder: Path | None) -> str:
    from interlock.cli.stores import store_urls
    from interlock.errors import ConfigurationError
    from interlock.settings import load

    url = store_urls(load(dir=folder)).get("state")
    if url is None:
        raise ConfigurationError(
            "Which database? Set INTERLOCK_STATE_URL; `interlock up` migrates the embedded one by itself."
        )
    return url
