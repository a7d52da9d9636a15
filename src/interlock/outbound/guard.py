"""Resolves a host to the addresses that a connection may use, and checks the host bindings of secrets.

One refused address refuses the whole host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from interlock.outbound.addresses import Address, Exceptions, host_and_port, is_name, literal, plain_name, why_refused
from interlock.outbound.failures import AddressRefused, HostNotBound, NameUnknown

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a name to addresses, as text."""

_MAX_ADDRESSES: Final = 8
"""Maximum number of addresses of one name to try."""


async def ask_the_system(host: str, port: int) -> list[str]:
    """Resolves with the system's resolver. Raises OSError if the name has no address."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class Guard:
    """Checks hosts against the allowed addresses and `ports`; an empty `ports` allows all."""

    def __init__(
        self,
        allowed: Exceptions | None = None,
        *,
        ports: Collection[int] = (),
        resolve: Resolve = ask_the_system,
    ) -> None:
        self._allowed, self._ports, self._resolve = allowed or Exceptions(), frozenset(ports), resolve

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Returns the addresses for one connection to this host; call it before each.

        Raises AddressRefused, NameUnknown.
        """
        if self._ports and port not in self._ports:
            shown = ", ".join(map(str, sorted(self._ports)))
            raise AddressRefused(f"Connections to port {port} are not allowed; outbound_ports allows {shown}.")
        found = await self.unchecked(host, port)
        if not self._allowed.name(host, port):
            for address in found:
                self._check(host, port, address)
        return found[:_MAX_ADDRESSES]

    def _check(self, host: str, port: int, address: Address) -> None:
        why = why_refused(address)
        if why is not None and not self._allowed.address(address, port):
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise AddressRefused(
                f"{host} resolves to an address that is {why}, and must not be reached from here. To allow it, add it "
                f"to outbound_allow, for example as {shown}."
            )

    async def unchecked(self, host: str, port: int) -> list[Address]:
        """Resolves a host chosen by the operator, without checks. Raises NameUnknown."""
        written = literal(host)
        if written is not None:
            return [written]
        try:
            texts = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise NameUnknown(f"{host} cannot be resolved ({getattr(error, 'strerror', None) or error}).") from None
        found = [address for address in map(literal, texts) if address is not None]
        if not found or len(found) != len(texts):
            raise NameUnknown(f"{host} has no usable address.")
        return found


@dataclass(frozen=True)
class Binding:
    """Exact hosts without wildcards, each on one port or on all ports (None)."""

    secret: str
    """Name of the secret, for error messages."""
    hosts: frozenset[tuple[str, int | None]]

    @classmethod
    def read(cls, secret: str, entries: Iterable[str]) -> Binding:
        """Parses the entries. Raises ValueError with the expected format."""
        return cls(secret, frozenset(map(_host, entries)))

    def check(self, host: str, port: int) -> None:
        """Raises HostNotBound. The message does not repeat the URL, which may contain the secret."""
        plain = _plain(host)
        if (plain, None) not in self.hosts and (plain, port) not in self.hosts:
            raise HostNotBound(
                f"The secret {self.secret!r} is not bound to {host}:{port}, so the request was not sent. To allow "
                "this host, "
                "set the secret again and add the host with --host."
            )


def plain_hosts(entries: Iterable[str]) -> list[str]:
    """Returns the entries as they are stored and displayed: in lower case, without a final dot. Raises ValueError."""
    return list(dict.fromkeys(_shown(*_host(entry)) for entry in entries))


def _host(entry: str) -> tuple[str, int | None]:
    host, port = host_and_port(entry)
    plain = _plain(host)
    if literal(plain) is None and not is_name(plain):
        raise ValueError(
            f"{entry!r} is not a host: write a name such as rpc.example.com, or an address, without scheme and path; a "
            "port may follow, as in rpc.example.com:8545 or [2001:db8::1]:8545. Write international names in "
            "punycode (xn--...)"
        )
    return plain, port


def _plain(host: str) -> str:
    """Returns one canonical spelling per host; IPv6 addresses have many."""
    address = literal(host)
    return plain_name(host) if address is None else str(address)


def _shown(host: str, port: int | None) -> str:
    if port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
