"""Resolves a host to the addresses that a connection may use. One refused address refuses the whole host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from interlock.outbound.addresses import Address, Exceptions, literal, why_refused
from interlock.outbound.failures import AddressRefused, NameUnknown

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
