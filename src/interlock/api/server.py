"""Serves one application on one listener until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from litestar import Litestar

from interlock.errors import ConfigurationError
from interlock.settings import Settings

log = structlog.get_logger()
_GRACE_SECONDS = 10


def bind(address: str, *, setting: str) -> socket.socket:
    """A listening socket for `host:port`, IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"Cannot listen on {address}: {error.strerror or error}. "
            f"Choose another with --{setting} host:port; port 0 takes a free one."
        ) from None
    return listener


def require_safe(address: str, settings: Settings) -> None:
    """Credentials never cross a network in the clear unless somebody says so by name."""
    host = address.rpartition(":")[0].strip("[]")
    if settings.tls_cert is not None or settings.allow_plaintext_listener or _is_loopback(host):
        return
    raise ConfigurationError(
        f"{address} is not a loopback address, and there is no TLS. Set tls_cert and tls_key, or, behind a proxy that "
        "terminates TLS, set allow_plaintext_listener = true."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.tls_cert else 'http'}://{shown}:{port}"


class _Server(uvicorn.Server):
    """Signals belong to the process, not to the server: a dispatcher drains more than its connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: Litestar,
    listener: socket.socket,
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_stop: Callable[[], None],
) -> None:
    """`on_stop` runs when draining begins, before open requests are waited for."""
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        timeout_keep_alive=75,
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    on_stop()
    server.should_exit = True
    await serving


def stop_on_signals() -> asyncio.Event:
    """SIGTERM and SIGINT ask for a drain; the second one is left to the default and ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("draining", signal=number.name)
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
