"""Hosts that a secret is bound to: a request that holds it goes to these hosts and no others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlock.outbound.addresses import host_and_port, is_name, literal, plain_name
from interlock.outbound.failures import HostNotBound


@dataclass(frozen=True)
class Binding:
    """Exact hosts, each on all ports (None) or on one. There are no wildcards."""

    secret: str
    """The name of the secret, for messages."""
    hosts: frozenset[tuple[str, int | None]]

    @classmethod
    def read(cls, secret: str, entries: Iterable[str]) -> Binding:
        """Raises ValueError with what to write instead."""
        return cls(secret, frozenset(map(_host, entries)))

    def check(self, host: str, port: int) -> None:
        """Raises HostNotBound. The message does not repeat the URL, which may hold the secret."""
        plain = _plain(host)
        if (plain, None) not in self.hosts and (plain, port) not in self.hosts:
            raise HostNotBound(
                f"The secret {self.secret!r} is bound to other hosts than {host}:{port}, so the request was not sent. "
                "If this host may see it, set the secret again with this host among its --host."
            )


def plain_hosts(entries: Iterable[str]) -> list[str]:
    """The entries as they are stored and shown: in lower case, without a final dot. Raises ValueError."""
    return list(dict.fromkeys(_shown(*_host(entry)) for entry in entries))


def _host(entry: str) -> tuple[str, int | None]:
    host, port = host_and_port(entry)
    plain = _plain(host)
    if literal(plain) is None and not is_name(plain):
        raise ValueError(
            f"{entry!r} is no host: write a name such as rpc.example.com, or an address, without scheme and path; a "
            "port may follow, as in rpc.example.com:8545 or [2001:db8::1]:8545. Names in other alphabets are written "
            "as xn--..."
        )
    return plain, port


def _plain(host: str) -> str:
    """One spelling for each host: IPv6 addresses have many."""
    address = literal(host)
    return plain_name(host) if address is None else str(address)


def _shown(host: str, port: int | None) -> str:
    if port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
