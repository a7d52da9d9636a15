"""The runner process: executes bundles of user code."""

from __future__ import annotations

import os
import socket

import structlog

from interlock.apps.process import connection_limits, stop_on_signals
from interlock.http.listener import bind, require_loopback
from interlock.settings import Settings
from interlock.untrusted.runner.server import Rules, require_token, serve

log = structlog.get_logger()


async def run_runner(settings: Settings, *, descriptor: int | None = None) -> None:
    rules = _rules(settings)
    await _serve(rules, _listener(settings, descriptor))


def _rules(settings: Settings) -> Rules:
    secret = settings.runner_token
    # Removed from the environment, so that no child process inherits it.
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
        connections=connection_limits(settings),
    )


def _listener(settings: Settings, descriptor: int | None) -> socket.socket:
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    require_loopback(settings.runner, setting="runner")
    return bind(settings.runner, setting="runner")


async def _serve(rules: Rules, listener: socket.socket) -> None:
    stop = stop_on_signals()
    host, port = listener.getsockname()[:2]
    log.info("listening", at=f"http://{host}:{port}")
    await serve(rules, listener, stop)
