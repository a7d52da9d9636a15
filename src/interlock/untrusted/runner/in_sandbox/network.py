"""Listeners for the platform inside a network that has nothing else.

They are created here and handed to the runner, which accepts from them outside and forwards to the platform: inside
there is neither a route nor a process to attack.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Final

from interlock.untrusted.runner.in_sandbox.job import Place

_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_IFF_UP: Final = 0x1
_BACKLOG: Final = 64


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def listen(places: list[Place]) -> list[socket.socket]:
    """Returns one listening socket per place, in order."""
    return [_listening(place, number) for number, place in enumerate(places)]


def _listening(place: Place, number: int) -> socket.socket:
    address = ipaddress.ip_address(place.host)
    if address.version == 4 and not address.is_loopback:
        _add_address(f"lo:{number + 1}", address.packed)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((place.host, place.port))
    listener.listen(_BACKLOG)
    return listener


def _add_address(alias: str, packed: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sHH4s8x", alias.encode(), socket.AF_INET, 0, packed)
        fcntl.ioctl(any_socket, _SIOCSIFADDR, request)


def hosts(names: Mapping[str, str]) -> Iterator[str]:
    """Yields lines for `/etc/hosts` with these names and addresses."""
    yield "127.0.0.1 localhost"
    yield "::1 localhost"
    for name, address in names.items():
        yield f"{address} {name}"
