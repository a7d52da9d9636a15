"""A host to the addresses that a connection may go to. Deny by default: one that is refused refuses the host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from interlock.outbound.addresses import Address, Exceptions, literal, why_refused
from interlock.outbound.failures import AddressRefused, NameUnknown

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a name, as text."""

_MOST_ADDRESSES: Final = 8
"""Of one name: more are not tried."""


async def ask_the_system(host: str, port: int) -> list[str]:
    """Raises OSError when the name has no address."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class Guard:
    """`ports`: those that may be connected to; none means all."""

    def __init__(
        self,
        allowed: Exceptions | None = None,
        *,
        ports: Collection[int] = (),
        resolve: Resolve = ask_the_system,
    ) -> None:
        self._allowed, self._ports, self._resolve = allowed or Exceptions(), frozenset(ports), resolve

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Where a connection to this host may go, to be asked before each one. Raises AddressRefused, NameUnknown."""
        if self._ports and port not in self._ports:
            shown = ", ".join(map(str, sorted(self._ports)))
            raise AddressRefused(f"Port {port} may not be connected to from here: outbound_ports has {shown}.")
        found = await self.unchecked(host, port)
        if not self._allowed.name(host, port):
            for address in found:
                self._check(host, port, address)
        return found[:_MOST_ADDRESSES]

    def _check(self, host: str, port: int, address: Address) -> None:
        why = why_refused(address)
        if why is not None and not self._allowed.address(address, port):
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise AddressRefused(
                f"{host} leads to an address that is {why}, and may not be reached from here. If it is meant to be, "
                f"name it in outbound_allow, such as {shown}."
            )

    async def unchecked(self, host: str, port: int) -> list[Address]:
        """For a host that the installation itself has named. Raises NameUnknown."""
        written = literal(host)
        if written is not None:
            return [written]
        try:
            texts = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise NameUnknown(f"{host} has no address ({getattr(error, 'strerror', None) or error}).") from None
        found = [address for address in map(literal, texts) if address is not None]
        if not found or len(found) != len(texts):
            raise NameUnknown(f"{host} has no address that can be used.")
        return found
