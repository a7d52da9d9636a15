"""Which addresses somebody else's URL may lead to: public ones, and what the installation has made an exception of."""

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
        "100.64.0.0/10": "shared by a provider's customers",
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
        # These hold another address, which would have to be checked as whoever translates it understands it.
        "::/96": "an IPv4 address in disguise",
        "::ffff:0:0/96": "an IPv4 address in disguise",
        "64:ff9b::/96": "an IPv4 address in disguise",
        "64:ff9b:1::/48": "an IPv4 address in disguise",
        "2001::/32": "an IPv4 address in disguise",
        "2002::/16": "an IPv4 address in disguise",
        "2001::/23": "reserved",
        "2001:db8::/32": "for documentation",
        "3fff::/20": "for documentation",
        "fc00::/7": "private",
        "fe80::/10": "link-local",
        "ff00::/8": "multicast",
    }.items()
}
_GLOBAL_V6: Final = IPv6Network("2000::/3")
"""All that is handed out of IPv6. What is beyond it is refused unseen."""

_NAME: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def why_refused(address: Address) -> str | None:
    """Why an address is none of the public internet's; None when it is."""
    for network, why in _REFUSED.items():
        if address in network:
            return why
    if isinstance(address, IPv6Address) and (address.scope_id or address not in _GLOBAL_V6):
        return "reserved"
    return None if address.is_global and not address.is_multicast else "reserved"


@dataclass(frozen=True)
class Exceptions:
    """What may be reached all the same: networks, names, and `*.example.com` for every name under it."""

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def read(cls, entries: Iterable[str]) -> Exceptions:
        """Raises ValueError with what to write instead."""
        networks: list[Network] = []
        names: set[str] = set()
        for entry in entries:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif _NAME.fullmatch(plain_name(entry)) and not re.fullmatch(r"[\d./:]+", entry):
                names.add(plain_name(entry))
            else:
                raise ValueError(
                    f"{entry!r} is neither an address, a network such as 10.1.0.0/16, nor a host name such as "
                    "hooks.example or *.hooks.example; write names without scheme and port"
                )
        return cls(tuple(networks), frozenset(names))

    def name(self, host: str) -> bool:
        parts = plain_name(host).split(".")
        above = {"*." + ".".join(parts[start:]) for start in range(1, len(parts))}
        return bool(self.names & (above | {plain_name(host)}))

    def address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _network(text: str) -> Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None


def plain_name(host: str) -> str:
    return host.lower().removesuffix(".")


def literal(host: str) -> Address | None:
    """The address that a host is written as, if it is one."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
