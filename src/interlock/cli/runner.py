"""`interlock runner`: the process that runs bundles of users' code."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import Descriptor, Handover, LogFile, Parent, configured, join, run_process, take_over

if TYPE_CHECKING:
    import socket

    from interlock.runner.server import Rules
    from interlock.settings import Settings

app = typer.Typer()


@command(
    app, "runner", panel=Panel.PROCESSES, example="INTERLOCK_RUNNER_TOKEN=… interlock runner --runner 127.0.0.1:7073"
)
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
    """Run one runner of users' bundles, each invocation in a confined process. It needs INTERLOCK_RUNNER_TOKEN.

    Dispatchers on this machine find it by INTERLOCK_RUNNER_URL. `interlock doctor` says how code is confined here.
    """
    join(parent)
    import interlock.runner.server  # noqa: F401 - loaded while the supervisor starts the stores

    inherited = take_over(handover)
    settings = configured("runner", log_file, dir=folder, runner=address)
    rules = _rules(settings)
    run_process(_serve(rules, _listener(settings, inherited or descriptor)))


def _rules(settings: Settings) -> Rules:
    from interlock.runner.server import Rules, require_token

    secret = settings.runner_token
    # Taken out of the environment, so that nothing that is started could inherit it.
    os.environ.pop("INTERLOCK_RUNNER_TOKEN", None)
    return Rules(
        token=require_token(secret.get_secret_value() if secret else None),
        folder=settings.dir / "runner",
        concurrency=settings.runner_concurrency or os.cpu_count() or 1,
        confinement=settings.runner_confinement,
        python=str(settings.runner_python) if settings.runner_python else None,
        authorities=settings.tls_ca,
        first_user=settings.runner_first_user,
        bundle_bytes=settings.bundle_limit_bytes,
        unpacked_bytes=settings.bundle_unpacked_bytes,
        body_bytes=settings.body_limit_bytes,
        drain_seconds=settings.drain_seconds,
        connections=settings.connection_limits,
    )


def _listener(settings: Settings, descriptor: int | None) -> socket.socket:
    import socket

    from interlock.api.listener import bind, require_loopback

    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    require_loopback(settings.runner, setting="runner")
    return bind(settings.runner, setting="runner")


async def _serve(rules: Rules, listener: socket.socket) -> None:
    import structlog

    from interlock.api.server import stop_on_signals
    from interlock.runner.server import serve

    host, port = listener.getsockname()[:2]
    structlog.get_logger().info("listening", at=f"http://{host}:{port}")
    await serve(rules, listener, stop_on_signals())
