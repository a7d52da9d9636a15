"""Listening sockets. Cheap to import, because a supervisor binds them long before it loads a server."""

from __future__ import annotations

import socket

from interlock.errors import ConfigurationError
from interlock.settings import Settings, host_of, is_loopback, is_wildcard


def bind(address: str, *, setting: str, is_option: bool = True) -> socket.socket:
    """Binds a listening socket to `host:port`, with IPv6 addresses in brackets.

    `is_option` says if the setting is also an option of the command.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit this option. Without it, a response in two writes waits 40 ms for the client's first ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, int(port)))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        how = f"with --{setting} host:port; port 0 takes any free port" if is_option else f"in the setting {setting}"
        raise ConfigurationError(
            f"Cannot listen on {address}: {error.strerror or error}. Choose another address {how}."
        ) from None
    return listener


def require_safe(address: str, settings: Settings) -> None:
    """Ensures that credentials cross a network in plain text only if the operator allows it explicitly."""
    host = address.rpartition(":")[0].strip("[]")
    if settings.tls_cert is not None or settings.allow_plaintext_listener or is_loopback(host):
        return
    raise ConfigurationError(
        f"{address} is not a loopback address, and TLS is not configured. Set tls_cert and tls_key, or, behind a proxy "
        "that terminates TLS, set allow_plaintext_listener = true."
    )


def require_public_urls(settings: Settings) -> None:
    """Raises if a listener on 0.0.0.0 or :: has no URL.

    Clients cannot connect to such an address, and every process generates URLs of the others (signed URLs, bundles,
    endpoints of tasks).
    """
    named = {
        "gateway": settings.gateway_url or settings.objects_public_url,
        "internal": settings.internal_url,
        "query": settings.query_url,
    }
    for setting, url in named.items():
        address: str = getattr(settings, setting)
        if url is None and is_wildcard(host_of(address)):
            port = address.rpartition(":")[2]
            raise ConfigurationError(
                f"{setting} = {address} listens on all addresses, and clients cannot connect to that address. Write "
                f'{setting}_url = "https://interlock.example:{port}" with the host name that clients use.'
            )


def require_loopback(address: str, *, setting: str) -> None:
    """Raises unless the address is a loopback address, for services of the same machine only."""
    if not is_loopback(host_of(address)):
        raise ConfigurationError(f"{setting} = {address} is not a loopback address: write 127.0.0.1:port.")


def url_of(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.tls_cert else 'http'}://{shown}:{port}"
