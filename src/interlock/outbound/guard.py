"""The addresses that outbound requests may use, and the errors of such requests.

Public addresses, and the exceptions that the operator allows. One refused address refuses the whole host.

OutboundFailed
├── BadUrl             the URL is not a valid http or https URL
├── AddressRefused     the address or the port must not be reached from here
├── HostNotBound       a secret in the request is bound to other hosts
├── NameUnknown        the name cannot be resolved, at least for now
├── Unreachable        the connection failed, or broke before a response arrived
│   ├── TlsFailed      the certificate is not trusted, or TLS failed
│   └── ProxyFailed    the forward proxy rejected the request
├── TooSlow            the response was not complete before the timeout
├── BadReply           the response is not valid HTTP, or is truncated
├── ReplyTooLarge      the response exceeds the size limit, compressed or decompressed
└── TooManyRedirects   the limit on redirects is exceeded

Messages contain at most the host, because paths and queries of URLs often contain a key.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import ClassVar, Final


class OutboundFailed(Exception):
    retryable: ClassVar[bool] = True
    """True if the same request may succeed later."""


class BadUrl(OutboundFailed):
    retryable = False


class AddressRefused(OutboundFailed):
    retryable = False


class HostNotBound(OutboundFailed):
    retryable = False


class NameUnknown(OutboundFailed):
    pass


class Unreachable(OutboundFailed):
    def __init__(self, message: str, *, broke_off: bool = False) -> None:
        super().__init__(message)
        self.broke_off = broke_off
        """True if the connection was established and then closed before the response."""


class TlsFailed(Unreachable):
    def __init__(self, message: str, *, untrusted: bool = False) -> None:
        super().__init__(message)
        self.untrusted = untrusted
        """True if the certificate was rejected; a retry gets the same certificate."""


class ProxyFailed(Unreachable):
    pass


class TooSlow(OutboundFailed):
    pass


class BadReply(OutboundFailed):
    pass


class ReplyTooLarge(OutboundFailed):
    retryable = False


class TooManyRedirects(OutboundFailed):
    retryable = False


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_REFUSED: Final[dict[Network, str]] = {
    ip_network(network): why
    for network, why in {
        "0.0.0.0/8": "unspecified",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "shared by the customers of a provider",
        "127.0.0.0/8": "loopback",
        "169.254.0.0/16": "link-local, where clouds serve credentials",
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "reserved",
        "192.0.2.0/24": "for documentation",
        "192.88.99.0/24": "a relay to other addresses",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "for benchmarks",
        "198.51.100.0/24": "for documentation",
        "203.0.113.0/24": "for documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
        # These embed another address. Checking it would require the same interpretation as the translating router.
        "::/96": "an embedded IPv4 address",
        "::ffff:0:0/96": "an embedded IPv4 address",
        "64:ff9b::/96": "an embedded IPv4 address",
        "64:ff9b:1::/48": "an embedded IPv4 address",
        "2001::/32": "an embedded IPv4 address",
        "2002::/16": "an embedded IPv4 address",
        "2001::/23": "reserved",
        "2001:db8::/32": "for documentation",
        "3fff::/20": "for documentation",
        "fc00::/7": "private",
        "fe80::/10": "link-local",
        "ff00::/8": "multicast",
    }.items()
}
_GLOBAL_V6: Final = IPv6Network("2000::/3")
"""All of the IPv6 space allocated so far. Addresses outside it are refused."""

_NAME: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")

_WITH_PORT: Final = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]/]+):(?P<port>[0-9]{1,5})")
_PORTS: Final = 65_536


def why_refused(address: Address) -> str | None:
    """Returns the reason why an address is not public, or None if it is public."""
    for network, why in _REFUSED.items():
        if address in network:
            return why
    if isinstance(address, IPv6Address) and (address.scope_id or address not in _GLOBAL_V6):
        return "reserved"
    return None if address.is_global and not address.is_multicast else "reserved"


@dataclass(frozen=True)
class Exceptions:
    """Hosts that may be reached although they are not public, each on all ports or on one.

    An entry is a network, a name, or `*.example.com` for all names below it. The port is None for all ports.
    """

    networks: tuple[tuple[Network, int | None], ...] = ()
    names: frozenset[tuple[str, int | None]] = frozenset()

    @classmethod
    def read(cls, entries: Iterable[str]) -> Exceptions:
        """Parses the entries. Raises ValueError with the expected format."""
        networks: list[tuple[Network, int | None]] = []
        names: set[tuple[str, int | None]] = set()
        for entry in entries:
            host, port = host_and_port(entry)
            network = _network(host)
            if network is not None:
                networks.append((network, port))
            elif _NAME.fullmatch(plain_name(host)) and not re.fullmatch(r"[\d./:]+", host):
                names.add((plain_name(host), port))
            else:
                raise ValueError(
                    f"{entry!r} is not an address, a network such as 10.1.0.0/16, or a host name such as "
                    "hooks.example or *.hooks.example; write names without scheme, and a port as in 127.0.0.1:8545"
                )
        return cls(tuple(networks), frozenset(names))

    def name(self, host: str, port: int) -> bool:
        parts = plain_name(host).split(".")
        above = {"*." + ".".join(parts[start:]) for start in range(1, len(parts))}
        return any((name, on) in self.names for name in above | {plain_name(host)} for on in (None, port))

    def address(self, address: Address, port: int) -> bool:
        return any(address in network and on in (None, port) for network, on in self.networks)


def host_and_port(entry: str) -> tuple[str, int | None]:
    """Splits an entry into host and port. An IPv6 address with a port needs brackets; without them it has no port."""
    found = _WITH_PORT.fullmatch(entry)
    if found is None or not 0 < int(found["port"]) < _PORTS:
        return entry, None
    return found["host"].removeprefix("[").removesuffix("]"), int(found["port"])


def is_name(host: str) -> bool:
    """Returns True for a host name without wildcards. Rejects digits only, which some resolvers read as an address."""
    return _NAME.fullmatch(host) is not None and "*" not in host and not re.fullmatch(r"[\d./:]+|0x[0-9a-f.x]+", host)


def _network(text: str) -> Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None


def plain_name(host: str) -> str:
    return host.lower().removesuffix(".")


def literal(host: str) -> Address | None:
    """Returns the address if the host is an IP literal, otherwise None."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


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
                f"The secret {self.secret!r} is not bound to {host}:{port}, so the request was not sent. To allow this "
                "host, set the secret again and add the host with --host."
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
