"""Addresses that user-provided URLs may reach: public addresses, and the exceptions that the operator allows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

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
