"""The gateway and dispatcher processes."""

from __future__ import annotations

import asyncio
import socket

import structlog

from interlock.api.dispatcher import dispatcher
from interlock.api.gateway import gateway
from interlock.api.listener import bind, require_public_urls, require_safe, url_of
from interlock.api.server import serve, stop_on_signals
from interlock.errors import ConfigurationError
from interlock.kernel.loop import forever
from interlock.settings import Settings
from interlock.wiring import Kernel, kernel

log = structlog.get_logger()


def listener_of(settings: Settings, address: str, name: str, descriptor: int | None) -> socket.socket:
    """A supervisor hands its socket down, so that a restart keeps the port and drops no connection."""
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    require_safe(address, settings)
    require_public_urls(settings)
    return bind(address, setting=name)


async def run_gateway(settings: Settings, *, descriptor: int | None = None) -> None:
    listener = listener_of(settings, settings.gateway, "gateway", descriptor)
    stop = stop_on_signals()
    async with kernel(settings, process="gateway") as parts:
        log.info("listening", at=url_of(listener, settings))
        await serve(gateway(parts), listener, settings, stop=stop, on_stop=parts.wakeups.close)


async def run_dispatcher(settings: Settings, *, descriptor: int | None = None) -> None:
    if settings.valkey_url is None:
        raise ConfigurationError(
            "INTERLOCK_VALKEY_URL is not set: a dispatcher checks the limits of runs in Valkey. "
            "Write INTERLOCK_VALKEY_URL=valkey://host:port/0, the same for all gateways and dispatchers."
        )
    listener = listener_of(settings, settings.internal, "internal", descriptor)
    stop = stop_on_signals()
    async with kernel(settings, process="dispatcher", commands=False) as parts:
        loops = [asyncio.create_task(forever(service), name=service.name) for service in parts.services()]
        log.info("listening", at=url_of(listener, settings))
        try:
            await serve(dispatcher(parts), listener, settings, stop=stop, on_stop=parts.wakeups.close)
        finally:
            await _stop_loops(parts, loops, settings.drain_seconds)


async def _stop_loops(parts: Kernel, loops: list[asyncio.Task[None]], seconds: float) -> None:
    """Every pass is one transaction or safe to repeat, so cancelling one loses nothing."""
    for task in loops:
        task.cancel()
    ended = await asyncio.gather(*loops, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            log.error("loop.died", exc_info=error)
    await asyncio.gather(parts.inline.drain(seconds), parts.invoker.drain(seconds))
